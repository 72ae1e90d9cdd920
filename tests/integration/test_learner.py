"""Real DeepSpeed ranks against a plain torch loop, and everything that must leave a learner as it was."""

from __future__ import annotations

import _thread
import dataclasses
import json
import math
import os
import sys
import threading
import time

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rlkit import actors, weights
from rlkit.config import TrainSpec
from rlkit.context import Owner
from rlkit.errors import (
    ActorDiedError,
    BatchError,
    CheckpointError,
    ConfigError,
    LearnerError,
    LogprobGapError,
    SpecChangedError,
    StaleBatchError,
)
from rlkit.learner import Learner
from rlkit.losses import Objective, token_weights
from rlkit.zero import checkpoint, work
from rlkit.zero.rank import Rank, environment
from tests.tiny_batches import make_batch, make_shards, plain_logprobs, rows_of
from tests.tiny_models import make_model

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file
SMALL = {"cpus_per_rank": 0.1, "threads": 1, "lr": 1e-4, "micro_batch_tokens": 64}
ANY_GAP = {"max_logprob_gap": math.inf}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def shards(plain):
    return make_shards(plain)


@pytest.fixture(scope="module")
def learner(ray_local, path):
    """One learner for all tests that leave it as it was: two ranks, ZeRO-2, the gate on."""
    owner = Owner(f"learner-{os.getpid()}")
    made = Learner.start(path, TrainSpec(ranks=2, zero_stage=2, **SMALL), owner)
    yield made
    made.close()


def batch_of(shards, version=0, **changes):
    return make_batch(shards, ray.put, version=version, **changes)


def torch_loop(path, shards, spec, steps=3, aggregate="token_mean"):
    """Policy gradient with AdamW, row by row, nothing shared with rlkit but the weights' formula (tested by hand elsewhere)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    rows, prompts = rows_of(shards)
    advantages = make_batch(shards, lambda x: x).advantages.reshape(-1)
    per_token = token_weights(np.array([len(r) - p for r, p in zip(rows, prompts, strict=True)]), aggregate, 12)
    for _ in range(steps):
        optimizer.zero_grad()
        found = plain_logprobs(model, rows, prompts)
        loss = -sum(((lp - lp.detach()).exp() * float(a * w)).sum() for lp, a, w in zip(found, advantages, per_token, strict=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def furthest(got, want):
    assert got.keys() == want.keys()
    return max(float(np.abs(got[n] - want[n]).max()) for n in want)


def check_against_torch(owner, path, shards, stage, ranks, **changes):
    spec = TrainSpec(zero_stage=stage, ranks=ranks, weight_decay=0.1, **SMALL, **ANY_GAP, **changes)
    learner = Learner.start(path, spec, owner)
    for version in range(3):
        stats = learner.update(batch_of(shards, version))
    assert stats.policy_version == learner.version == 3
    assert furthest(learner.parameters(), torch_loop(path, shards, spec)) < 1e-5
    learner.close()
    assert not actors.names(owner.namespace)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("stage", "ranks"), [pytest.param(0, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW), (2, 2), (3, 2)])
def test_three_steps_equal_a_plain_torch_loop(owner, path, shards, stage, ranks):
    check_against_torch(owner, path, shards, stage, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_every_number_of_ranks_equals_torch(owner, path, shards, stage, ranks):
    check_against_torch(owner, path, shards, stage, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (1, {"offload_optimizer": True}),
        (2, {"offload_optimizer": True}),
        (3, {"offload_optimizer": True, "offload_param": True}),
        (2, {"gradient_checkpointing": True}),
        (3, {"gradient_checkpointing": True, "logits_chunk": 16}),
    ],
)
def test_offload_and_recomputation_change_nothing(owner, path, shards, stage, changes):
    check_against_torch(owner, path, shards, stage, 2, **changes)


class Probe(Rank):
    """One rank outside a learner, whose accumulated gradient can be read (ZeRO-0 keeps it whole)."""

    def gradient_of(self, job):
        self.engine.discard()
        self.trainer.forward_backward(job, lambda: False)
        return {name: p.grad.numpy().copy() for name, p in self.engine.trainable()}


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_do_not_change_the_gradient(owner, shards, aggregate, tmp_path):
    path = str(make_model(tmp_path / "model", scale=0.05))  # gradients of the usual size, so that 1e-6 means something
    spec = TrainSpec(zero_stage=0, ranks=1, **SMALL, **ANY_GAP)
    probe = actors.spawn(Probe, "probe", owner.namespace, 0, path, spec, env=environment(spec))
    ray.get(probe.connect.remote(str(tmp_path / "store")), timeout=300)
    objective = Objective(aggregate=aggregate, entropy_coef=0.01)
    item = work.work_of(batch_of(shards), objective)
    whole, parts, single = (work.plan(item, objective, spec.but(micro_batch_tokens=n), 0) for n in (10_000, 64, 1))
    assert whole[1]["update/micro_batches"] == 1
    assert parts[1]["update/micro_batches"] >= 4
    assert single[1]["update/micro_batches"] == 16
    want = ray.get(probe.gradient_of.remote(whole[0][0]), timeout=300)
    assert max(float(np.abs(g).max()) for g in want.values()) > 1e-3
    for jobs, _ in (parts, single):
        got = ray.get(probe.gradient_of.remote(jobs[0]), timeout=300)
        assert furthest(got, want) < 1e-6


def test_metrics_of_an_update(owner, path, shards, plain):
    learner = Learner.start(path, TrainSpec(ranks=1, zero_stage=1, warmup_steps=4, **SMALL), owner)
    owner.step = 7
    batch = batch_of(shards, ref=[s.logprobs - 0.1 for s in shards])
    stats = learner.update(batch, kl_coef=0.1, kl_estimator="k3")
    expected = {"policy/kl": math.exp(-0.1) - 1 + 0.1, "policy/approx_kl": 0.0, "policy/clip_fraction": 0.0, "policy/ratio_max": 1.0}
    for name, value in expected.items():
        assert stats.metrics[name] == pytest.approx(value, abs=1e-4), name
    assert stats["logprob_gap"] < 1e-5
    assert stats["lr"] == pytest.approx(0.25e-4)
    lengths = np.concatenate([s.lengths for s in shards]).reshape(-1)
    advantages = batch.advantages.reshape(-1)
    assert stats["loss"] == pytest.approx(-(advantages * lengths).sum() / lengths.sum() + 0.1 * expected["policy/kl"], abs=1e-4)
    rows, prompts = rows_of(shards)
    entropies = []
    for row, p in zip(rows, prompts, strict=True):
        logp = torch.log_softmax(plain(torch.tensor([row])).logits[0].detach(), -1)[p - 1 : -1]
        entropies += (-(logp.exp() * logp).sum(-1)).tolist()
    assert stats["entropy"] == pytest.approx(np.mean(entropies), abs=1e-4)
    assert stats["update/samples"] == 16
    assert 0 <= stats["update/padding"] < 0.5
    state = learner.state()
    assert (state["version"], state["busy"], state["tag"], state["updates_in_tag"]) == (1, None, 7, 1)
    assert state["last_update"]["stats"].metrics == stats.metrics
    silent = [dataclasses.replace(s, logprobs=np.zeros_like(s.logprobs)) for s in shards]
    assert "policy/logprob_gap" not in learner.update(batch_of(silent, version=1, logprobs=False)).metrics


def test_logprobs_equal_plain_transformers(learner, shards):
    got = learner.logprobs(batch_of(shards).scored.rollouts)
    for ref, shard in zip(got, shards, strict=True):
        np.testing.assert_allclose(ray.get(ref), shard.logprobs, atol=1e-5)
    assert learner.version == 0


def test_published_weights_are_the_learners(learner, plain):
    manifest = learner.publish_weights()
    sent = dict(weights.tensors(manifest))
    want = dict(plain.named_parameters())
    assert manifest.version == 0
    assert sent.keys() == want.keys()  # tied embeddings once
    assert all(torch.equal(sent[n], want[n].detach()) for n in want)


def test_save_hf_loads_in_transformers(learner, plain, tmp_path):
    from transformers import AutoTokenizer

    target = learner.save_hf(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(target).encode("12") == AutoTokenizer.from_pretrained(plain.config._name_or_path).encode("12")


def test_the_same_settings_find_the_living_learner_and_others_are_refused(learner, path):
    owner = learner._owner
    assert Learner.start(path, learner.spec, owner).version == learner.version
    assert Learner.attach(owner).spec == learner.spec
    with pytest.raises(SpecChangedError, match=r"lr is 0\.0001, asked for 0\.5"):
        Learner.start(path, learner.spec.but(lr=0.5), owner)


BAD = {
    "other type": (lambda b: b.scored, BatchError, "takes Batch"),
    "nothing kept": (lambda b: dataclasses.replace(b, keep=np.zeros(4, bool)), BatchError, "Nothing to train on"),
    "not finite": (lambda b: dataclasses.replace(b, advantages=b.advantages * np.nan), BatchError, "16 of 16 advantages"),
}


@pytest.mark.parametrize("case", BAD)
def test_batches_that_cannot_be_trained_on(learner, shards, case):
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        learner.update(change(batch_of(shards)))


def test_refusals_that_name_the_fix(learner, shards):
    with pytest.raises(BatchError, match="greedy"):
        learner.update(batch_of(shards, temperature=0.0))
    with pytest.raises(BatchError, match="no reference log-probs"):
        learner.update(batch_of(shards), kl_coef=0.1)
    with pytest.raises(BatchError, match="run 'other'"):
        learner.update(batch_of(shards, run="other"))
    with pytest.raises(BatchError, match="before a checkpoint was loaded"):
        learner.update(batch_of(shards, version=5))
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        learner.update(batch_of(shards), loss="ppo-clip")
    with pytest.raises(LearnerError, match="no gradient to apply"):
        learner.optim_step()
    with pytest.raises(ConfigError, match="rlkit sets it from dtype"):
        Learner.start("nowhere", TrainSpec(deepspeed={"bf16": {"enabled": True}}), learner._owner)
    assert learner.state()["version"] == 0


def test_the_gate_fires_when_the_sync_was_left_out_and_changes_nothing(learner, shards, plain):
    wrong = [dataclasses.replace(s, logprobs=s.logprobs + np.float32(0.01)) for s in shards]
    before = learner.parameters()
    with pytest.raises(LogprobGapError, match=r"0\.01 nats.*0\.001 .*sampler\.sync\(learner\)"):
        learner.update(batch_of(wrong))
    assert learner.state()["version"] == 0
    assert furthest(learner.parameters(), before) == 0.0
    np.testing.assert_allclose(ray.get(learner.logprobs(batch_of(shards).scored.rollouts)[0]), shards[0].logprobs, atol=1e-5)


def test_a_loss_that_fails_is_named_and_undone(learner, shards):
    def broken(t):
        raise ZeroDivisionError("my mistake")

    before = learner.parameters()
    with pytest.raises(LearnerError, match=r"Loss 'broken' failed on rank \d: ZeroDivisionError: my mistake"):
        learner.update(batch_of(shards), loss=broken)
    with pytest.raises(LearnerError, match="nan"):
        learner.update(batch_of(shards), loss=lambda t: (t.logprobs * math.nan, {}))
    assert furthest(learner.parameters(), before) == 0.0


def interrupt_when(marker, lines):
    """Interrupt this process's main thread once the file has so many lines."""

    def watch():
        while not (marker.exists() and len(marker.read_text().splitlines()) >= lines):
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=watch, daemon=True).start()


def slow_loss(marker):
    def loss(t):
        with open(marker, "a") as file:
            file.write("called\n")
        time.sleep(0.5)
        return -t.advantages * t.logprobs, {"mine": t.advantages}

    return loss


def test_an_interrupt_before_the_first_step_undoes_the_update(learner, shards, tmp_path):
    before = learner.parameters()
    interrupt_when(tmp_path / "marker", 1)
    with pytest.raises(KeyboardInterrupt) as caught:
        learner.update(batch_of(shards), loss=slow_loss(str(tmp_path / "marker")))
    assert "undone" in " ".join(caught.value.__notes__)
    assert learner.state()["busy"] is None
    assert learner.state()["version"] == 0
    assert furthest(learner.parameters(), before) == 0.0


def test_an_interrupt_after_the_first_step_finishes_the_update(owner, path, shards, tmp_path):
    spec = TrainSpec(ranks=1, zero_stage=2, minibatches=2, epochs=2, **(SMALL | {"micro_batch_tokens": 10_000}))
    learner = Learner.start(path, spec, owner)
    interrupt_when(tmp_path / "marker", 2)  # the second mini-batch is being worked on
    with pytest.raises(KeyboardInterrupt) as caught:
        learner.update(batch_of(shards), loss=slow_loss(str(tmp_path / "marker")))
    assert "finished" in " ".join(caught.value.__notes__)
    assert learner.version == 1
    stats = learner.state()["last_update"]["stats"]
    assert stats["update/optimizer_steps"] == 4
    assert "policy/mine" in stats.metrics
    # The gate compares with the policy before the update: now the same batch is both too old and too far off.
    with pytest.raises(StaleBatchError, match="1 behind, max_lag allows 0"):
        learner.update(batch_of(shards))
    with pytest.raises(LogprobGapError):
        learner.update(batch_of(shards, version=1))
    seen = []

    def late(t):
        seen.append(t)
        return -t.advantages * t.logprobs / (2 - len(seen)), {}

    with pytest.raises(LearnerError, match=r"(?s)it is nan.*\n1 optimizer step of it had been applied before: .* policy version 2"):
        learner.update(batch_of(shards, version=1, top_p=0.9), loss=late)
    assert learner.version == learner.state()["version"] == 2


def test_gradients_of_several_calls_add_up(owner, path, shards):
    """With the ``constant`` aggregate two halves of a batch weigh twice what they weigh in the whole."""
    spec = TrainSpec(ranks=2, zero_stage=2, weight_decay=0.1, **(SMALL | {"lr": 1e-4}))
    learner = Learner.start(path, spec, owner)
    whole = batch_of(shards)
    halves = [dataclasses.replace(whole, keep=np.array(k), advantages=whole.advantages / 2) for k in ([1, 1, 0, 0], [0, 0, 1, 1])]
    for half in halves:
        metrics = learner.forward_backward(half, aggregate="constant")
        assert metrics["update/samples"] == 8
    assert learner.version == 0
    with pytest.raises(LearnerError, match="call optim_step"):
        learner.update(whole)
    stats = learner.optim_step()
    assert stats.policy_version == 1
    assert furthest(learner.parameters(), torch_loop(path, shards, spec, steps=1, aggregate="constant")) < 1e-5
    with pytest.raises(LearnerError, match="no gradient to apply"):
        learner.optim_step()


def limit_files(to):
    """A loss that makes the rank's process unable to write files larger than this: what a full disk is to a writer."""

    def loss(t):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (to if to else hard, hard))
        return t.logprobs * 0.0, {}

    return loss


def test_checkpoints_resume_exactly_on_other_ranks_and_stages(owner, path, shards, tmp_path):
    common = SMALL | ANY_GAP | {"warmup_steps": 3, "schedule": "linear", "total_steps": 6}
    first = Learner.start(path, TrainSpec(ranks=2, zero_stage=2, **common), owner)
    owner.step = 4
    for version in range(2):
        first.update(batch_of(shards, version))
    saved = first.save(tmp_path / "step-2")
    manifest = checkpoint.verify(saved)
    assert (manifest["version"], manifest["steps"], manifest["tag"], manifest["updates_in_tag"]) == (2, 2, 4, 2)
    first.update(batch_of(shards, 2))
    uninterrupted = first.parameters()

    # A disk that is full: the old checkpoint stays, nothing is left over, training goes on.
    first.update(batch_of(shards, 3), loss=limit_files(100_000))
    with pytest.raises(CheckpointError, match="could not be written"):
        first.save(saved)
    first.update(batch_of(shards, 4), loss=limit_files(0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    checkpoint.verify(saved)
    first.close()

    second = Learner.start(path, TrainSpec(ranks=1, zero_stage=3, **common), owner)
    assert second.load(saved) == 2
    state = second.state()
    assert (state["tag"], state["updates_in_tag"], state["last_update"]) == (4, 2, None)
    stats = second.update(batch_of(shards, 2))
    assert stats["lr"] == pytest.approx(1e-4)  # the third step, the last of the warm-up
    assert furthest(second.parameters(), uninterrupted) < 1e-6

    # A checkpoint cut short, or changed, is refused and the learner stays as it is.
    file = next(saved.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="was cut short"):
        second.load(saved)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        second.load(saved)
    file.write_bytes(data)
    (saved / "manifest.json").write_text(json.dumps(manifest | {"shapes": {"other": [2]}}))
    with pytest.raises(CheckpointError, match="of another model"):
        second.load(saved)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        second.load(tmp_path)
    assert second.state()["version"] == 3
    assert furthest(second.parameters(), uninterrupted) < 1e-6


@pytest.mark.slow
def test_lora_trains_adapters_and_exports_merged_weights(owner, path, shards, plain, tmp_path):
    spec = TrainSpec(ranks=2, zero_stage=3, lora_rank=2, **(SMALL | {"lr": 1e-2}), **ANY_GAP)
    learner = Learner.start(path, spec, owner)
    assert all("lora_" in name for name in learner.parameters())
    same = {name: torch.equal(t, dict(plain.named_parameters())[name]) for name, t in weights.tensors(learner.publish_weights())}
    assert all(same.values())  # LoRA starts as nothing
    for version in range(2):
        learner.update(batch_of(shards, version))
    saved = learner.save(tmp_path / "lora")
    merged = AutoModelForCausalLM.from_pretrained(learner.save_hf(tmp_path / "hf"), dtype=torch.float32)
    changed = {n for n, p in merged.named_parameters() if not torch.equal(p, dict(plain.named_parameters())[n])}
    assert changed == {n for n in same if n.endswith("_proj.weight")}
    found = [ray.get(r) for r in learner.logprobs(batch_of(shards).scored.rollouts)]
    with torch.no_grad():
        want = torch.cat(plain_logprobs(merged, *rows_of(shards))).numpy()
    np.testing.assert_allclose(np.concatenate(found), want, atol=1e-4)
    learner.update(batch_of(shards, 2))
    assert learner.load(saved) == 2
    again = [ray.get(r) for r in learner.logprobs(batch_of(shards).scored.rollouts)]
    np.testing.assert_allclose(np.concatenate(again), np.concatenate(found), atol=1e-6)


def test_a_dead_rank_is_reported_and_a_new_learner_can_be_started(owner, path, shards):
    learner = Learner.start(path, TrainSpec(ranks=1, zero_stage=1, **SMALL), owner)

    def die(t):
        os._exit(1)

    with pytest.raises(ActorDiedError, match=r"died during learner\.update"):
        learner.update(batch_of(shards), loss=die)
    with pytest.raises(LearnerError, match="the last checkpoint"):
        learner.update(batch_of(shards))
    assert learner.state()["broken"]
    learner.close()
    assert not actors.names(owner.namespace)
