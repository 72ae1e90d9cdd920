"""Engine and learner on one card, as far as a CPU can show: states that leave and come back, turns, and memory that runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_model

from rlkit.errors import ConfigError, OutOfMemoryError, RolloutError, SyncError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model")))


def test_states_that_leave_and_come_back_and_memory_that_runs_out_change_no_bit(model, tmp_path):
    script = ROOT / "tests" / "integration" / "offload_check.py"
    env = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, script, model, tmp_path], capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for stage, kinds in found.items():
        assert kinds["moved"]["files"] == kinds["still"]["files"], f"ZeRO-{stage}"
        assert min(kinds["moved"]["away"]) > 0
        assert max(kinds["moved"]["away"]) <= kinds["moved"]["needed"]
    # 4 bytes of gradient a parameter: 2 layers of 2 x 64 x 64 + 2 x 64 x 32 + 3 x 64 x 128 weights, 64 + 2 x 32 biases and 2 norms of 64
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 128 + 128
    assert {name: kinds["moved"]["shared"] for name, kinds in found.items()} == {
        "0": 0,
        "1": 0,
        "2": 0,
        "3": 0,
        "3 offloaded": 4 * (2 * layer + 96 * 64 + 64),
    }


HF = {"engine": "hf", "cpus_per_engine": 0.1, "threads": 1, "max_model_len": 128}
TRAIN = {"zero_stage": 2, "lr": 1e-2, "cpus_per_rank": 0.1, "threads": 1, "max_logprob_gap": 100.0, "max_lag": 5}


def start(model, owner, **engine):
    from rlkit.config import EngineSpec, TrainSpec
    from rlkit.learner import Learner
    from rlkit.sampler import Sampler

    sampler = Sampler.start(model, EngineSpec.make(HF, **engine), owner)
    learner = Learner.start(model, TrainSpec.make(TRAIN, offload_between_turns=bool(engine.get("sleep_level"))), owner)
    return sampler, learner


def batch_of(rollouts, seed=0):
    import numpy as np

    from rlkit.types import Batch, Scored

    advantages = np.random.default_rng(seed).standard_normal(rollouts.lengths.shape).astype(np.float32)
    return Batch(Scored(rollouts, advantages, {}, {}, {}, (), 0.0), advantages, np.ones(len(rollouts.lengths), bool), "grpo", 0, None)


def tokens_of(rollouts):
    from rlkit.types import fetch

    return [fetch(shard).tokens.tolist() for shard in rollouts.shards]


def sleep_and_wake_by_hand(sampler, learner):
    before = tokens_of(sampler.generate("1+1=", max_tokens=6, seed=3, progress=False))
    sampler.sleep()
    sampler.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        sampler.generate("1+1=", max_tokens=6, progress=False)
    with pytest.raises(SyncError, match=r"asleep.*call sampler.wake\(\) first"):
        sampler.sync(learner)
    sampler.wake()
    sampler.wake()
    assert tokens_of(sampler.generate("1+1=", max_tokens=6, seed=3, progress=False)) == before
    sampler.sleep(2)
    with pytest.raises(SyncError, match="no complete set of weights"):
        sampler.generate("1+1=", max_tokens=6, progress=False)
    with pytest.raises(ConfigError, match="level is 1"):
        sampler.sleep(3)


@pytest.mark.slow
def test_turns_in_any_order_give_what_engines_that_stay_awake_give(model, ray_local, owner):
    from rlkit.context import Owner
    from rlkit.engines.base import ASLEEP, AWAKE

    def full(inputs, **_):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    prompts, spec = ["1+1=", "2+2=", "7-3="], {"n": 2, "max_tokens": 6, "progress": False}
    other = Owner(f"{owner.name}-awake", seed=0)
    try:
        results = []
        for who, level in ((owner, 2), (other, 0)):
            sampler, learner = start(model, who, sleep_level=level)
            modes, seen = [], []

            def note(sampler=sampler, modes=modes):
                modes.append(sampler.ask("mode")[0]["mode"])

            sampler.sync(learner)
            note()
            first = sampler.generate(prompts, seed=1, **spec)
            seen.append(tokens_of(first))
            learner.update(batch_of(first))
            note()
            learner.update(batch_of(first, seed=1))  # twice in a row
            if level:
                assert sampler.version is None
                assert sampler.info[0]["mode"] == ASLEEP
            else:
                sampler.sync(learner)
            second = sampler.generate(prompts, seed=2, **spec)  # engines that dropped their weights get the learner's by themselves
            note()
            seen.append(tokens_of(sampler.generate(prompts, seed=3, **spec)))  # twice in a row
            sampler.sync(learner)
            sampler.sync(learner)  # twice, without an update
            seen.append(tokens_of(second))
            assert second.policy_version == learner.version == 2
            learner.forward_backward(batch_of(second))
            third = sampler.generate(prompts, seed=4, **spec)  # while gradients wait
            learner.optim_step()
            if level:
                with pytest.raises(
                    OutOfMemoryError, match=r"rank-0 ran out .*micro_batch_tokens .*Nothing was applied; the learner can go on"
                ):
                    learner.update(batch_of(third), loss=full)
                assert learner.version == 3
            learner.update(batch_of(third))
            assert modes == ([AWAKE, ASLEEP, AWAKE] if level else [AWAKE] * 3)
            seen.append(tokens_of(third))
            results.append((seen, learner.parameters()))
        assert results[0][0] == results[1][0]
        assert all((results[1][1][name] == value).all() for name, value in results[0][1].items())

        sleep_and_wake_by_hand(other.turns.sampler, other.turns.learner)

        # A fresh kernel that has the learner alone finds the engines by name and puts them to sleep; then one with the engines alone.
        sampler.close()
        fresh = Owner(owner.name)
        from rlkit.learner import Learner

        alone = Learner.attach(fresh)
        state = owner.turns.sampler.ask("mode")[0]
        assert state["mode"] == ASLEEP
        owner.turns.sampler.sync(alone)
        assert owner.turns.sampler.ask("mode")[0]["mode"] == AWAKE
        alone.logprobs(third)
        assert owner.turns.sampler.ask("mode")[0] == {"mode": ASLEEP, "version": None, "dropped": True}
        alone.close()
        with pytest.raises(SyncError, match=r"dropped their weights.*no learner"):
            owner.turns.sampler.generate(prompts, **spec)
    finally:
        from rlkit import actors

        actors.end(actors.started_with(other.namespace, ""))


@pytest.mark.slow
def test_the_benchmark_of_a_shared_card_runs_a_whole_step(local_cluster, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import colocated
    import shapes

    model = shapes.write("tiny", tmp_path / "model", context=2048)
    cluster = local_cluster(storage=str(tmp_path))
    result = colocated.one_step(cluster, str(model), "tiny", colocated.Watch(), f"colocated-{os.getpid()}")
    # Embeddings 512 x 128, tied; in each of 2 layers 2 x 128 x 128, 2 x 128 x 64, 128 + 2 x 64 biases, 3 x 128 x 256, 2 norms; a norm
    assert result["parameters"] == 512 * 128 + 2 * (2 * 128 * 128 + 2 * 128 * 64 + 128 + 2 * 64 + 3 * 128 * 256 + 2 * 128) + 128
    assert result["parameters"] == shapes.parameters("tiny")
    assert (result["samples"], result["tokens"], result["policy_version_after"]) == (16, 16 * 8, 1)
    assert result["metrics"]["memory/engine_peak_gib"] > 0
    assert result["metrics"]["memory/learner_peak_gib"] > 0

    from rlkit import cards

    nodes = [n.id for n in cluster.nodes]
    assert cards.size_of(str(model), nodes).params == result["parameters"]
    assert cards.smallest(nodes) == cards.here()
