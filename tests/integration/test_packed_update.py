"""Updates without padding against padded ones, on one DeepSpeed rank in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, math, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM
from rlkit.config import TrainSpec
from rlkit.losses import Objective
from rlkit.zero import engine, peers, train, work
from tests.tiny_batches import make_batch, make_shards

path, store = sys.argv[1:]
torch.set_num_threads(1)
engine.join(0, 1, store, False, 60.0)
shards = make_shards(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
batch = make_batch(shards, lambda x: x, ref=[s.logprobs - 0.1 for s in shards])
objective = Objective(kl_coef=0.1, entropy_coef=0.01)


def run(stage, recompute):
    found = {}
    for packing in ("padded", "varlen"):
        spec = TrainSpec(zero_stage=stage, packing=packing, gradient_checkpointing=recompute, lr=1e-3,
                         micro_batch_tokens=64, logits_chunk=16,
                         minibatches=2, max_logprob_gap=math.inf, weight_decay=0.1)
        made = engine.Engine(path, spec)
        trainer = train.Trainer(made, peers.Peers())
        jobs, facts = work.plan(work.work_of(batch, objective), objective, spec, 0)
        parts = trainer.update(jobs[0], lambda: False)
        logprobs = trainer.logprobs(work.plan(work.work_of(batch, objective), objective, spec, 1, steps=False)[0][0], [0, 1])
        found[packing] = {
            "facts": facts | made.facts,
            "norms": parts["norms"],
            "metrics": work.combine([parts]),
            "logprobs": np.concatenate([logprobs[s] for s in sorted(logprobs)]).tolist(),
            "weights": float(sum(made.read(p).abs().double().sum() for _, p in made.trainable())),
        }
        if packing == "varlen":
            nan = lambda t: (t.logprobs * math.nan, {})
            try:
                trainer.update(work.plan(work.work_of(batch, Objective(nan)), Objective(nan), spec, 2)[0][0], lambda: False)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
            found["after"] = float(sum(made.read(p).abs().double().sum() for _, p in made.trainable()))
        made.ds.destroy()
    return found


found = {str(stage): run(stage, recompute) for stage, recompute in ((2, False), (3, True))}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    path = make_model(folder / "model", scale=0.1)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(path), str(folder / "store")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "checkpointing"), [("2", "off"), ("3", "on")])
def test_an_update_without_padding_equals_the_padded_one(results, stage, checkpointing):
    found = results[stage]
    padded, varlen = found["padded"], found["varlen"]
    assert (padded["facts"]["packing"], varlen["facts"]["packing"]) == ("padded", "varlen")
    assert padded["facts"]["update/padding"] > varlen["facts"]["update/padding"] == 0.0
    assert varlen["facts"]["update/micro_batches"] <= padded["facts"]["update/micro_batches"]
    assert varlen["facts"]["gradient_checkpointing"] == checkpointing
    assert varlen["norms"] == pytest.approx(padded["norms"], rel=1e-5)
    for name, value in padded["metrics"].items():
        if name.startswith("policy/"):
            assert varlen["metrics"][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    assert varlen["logprobs"] == pytest.approx(padded["logprobs"], abs=1e-5)
    assert varlen["weights"] == pytest.approx(padded["weights"], rel=1e-6)
    assert "LearnerError: Loss '<lambda>' failed on rank 0: ValueError: it is nan on micro-batch 1 of" in found["error"]
    assert found["after"] == varlen["weights"]  # the failed update left nothing behind
