"""The frozen model against a plain forward pass over all logits."""

from __future__ import annotations

import dataclasses
import os
import signal

import numpy as np
import pytest
import ray
from tiny_models import make_model

from rlkit import actors
from rlkit.config import SampleSpec, TrainSpec
from rlkit.context import Owner
from rlkit.errors import ActorDiedError, BatchError, ConfigError, DeadlineError, ModelError, SpecChangedError
from rlkit.learner import Learner
from rlkit.reference import Reference
from rlkit.types import Batch, Prompt, Rollouts, RolloutShard, Scored


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(ray_local, model):
    """One owner with one running reference, for the tests that only ask it."""
    owner = Owner(f"test-reference-{os.getpid()}")
    yield Reference.start(str(model), owner=owner, actors=2, micro_batch_tokens=64, logits_chunk=7)
    actors.end(actors.started_with(owner.namespace, ""))


def random_shard(prompts: int, group: int, seed: int) -> RolloutShard:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, size=(prompts, group)).astype(np.int32)
    lengths[0, 0] = 0  # a response that ended at once without its end token
    n = int(lengths.sum())
    return RolloutShard(
        prompts=tuple(Prompt(f"p{seed}-{i}", ({"role": "user", "content": "q"},), "1") for i in range(prompts)),
        prompt_tokens=tuple(rng.integers(5, 90, size=rng.integers(2, 12)).astype(np.int32) for _ in range(prompts)),
        tokens=rng.integers(5, 90, size=n).astype(np.int32),
        lengths=lengths,
        logprobs=np.zeros(n, np.float32),
        texts=("x",) * (prompts * group),
        finish_reasons=("stop",) * (prompts * group),
    )


def make_batch(shards: list[RolloutShard], temperature: float = 1.0, keep=None) -> Batch:
    lengths = np.concatenate([s.lengths for s in shards])
    rollouts = Rollouts(
        id="r",
        shards=tuple(ray.put(s) for s in shards),
        prompt_ids=tuple(p.id for s in shards for p in s.prompts),
        shard_sizes=tuple(len(s.prompts) for s in shards),
        prompt_lengths=np.array([len(t) for s in shards for t in s.prompt_tokens], np.int32),
        lengths=lengths,
        truncated=np.zeros(lengths.shape, bool),
        policy_version=0,
        sampling=SampleSpec(n=lengths.shape[1], temperature=temperature, logprobs=False),
        engine="hf",
        seconds=1.0,
    )
    scored = Scored(rollouts, lengths.astype(np.float32), {}, {}, {}, (), 0.0)
    keep = np.ones(len(lengths), bool) if keep is None else np.array(keep)
    return Batch(scored, np.zeros(lengths.shape, np.float32), keep, "grpo", 0)


def plain_logprobs(path, shard: RolloutShard, temperature: float) -> np.ndarray:
    """One sample at a time, all logits, no chunks and no padding."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    out = []
    offsets = shard.offsets()
    for i in range(len(shard.texts)):
        prompt = shard.prompt_tokens[i // shard.group_size].astype(np.int64)
        response = shard.tokens[offsets[i] : offsets[i + 1]].astype(np.int64)
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = net(ids).logits[0].double() / temperature
        logp = torch.log_softmax(logits, -1)
        out += [float(logp[len(prompt) + t - 1, token]) for t, token in enumerate(response)]
    return np.array(out)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_a_plain_forward_pass(shared, model, temperature):
    shards = [random_shard(4, 3, seed=1), random_shard(2, 3, seed=2), random_shard(3, 3, seed=3)]
    assert actors.names(shared._owner.namespace) == ["reference-0", "reference-1"]
    batch = make_batch(shards, temperature)
    found = shared.logprobs(batch)
    assert batch.ref_logprobs is None  # the batch itself is as it was
    assert found.ref_version == shared.version
    for shard, ref in zip(shards, found.ref_logprobs, strict=True):
        values = ray.get(ref)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, plain_logprobs(model, shard, temperature), atol=1e-5)


def test_dropped_groups_are_nan_and_change_nothing_else(shared):
    shards = [random_shard(4, 2, seed=4), random_shard(3, 2, seed=5)]
    keep = [True, False, True, True, True, True, False]
    whole = [ray.get(r) for r in shared.logprobs(make_batch(shards)).ref_logprobs]
    part = [ray.get(r) for r in shared.logprobs(make_batch(shards, keep=keep)).ref_logprobs]
    for shard, kept, a, b in zip(shards, (keep[:4], keep[4:]), whole, part, strict=True):
        of_token = np.repeat(np.repeat(kept, shard.group_size), shard.lengths.reshape(-1))
        np.testing.assert_allclose(a[of_token], b[of_token], atol=1e-5)
        assert np.isnan(b[~of_token]).all()
        assert np.isfinite(a).all()


def test_found_again_refused_when_changed_and_closed(owner, model, tmp_path):
    first = Reference.start(str(model), owner=owner)
    again = Reference.start(str(model), owner=owner, reference_timeout_s=100.0)
    assert again.info[0]["pid"] == first.info[0]["pid"]
    with pytest.raises(SpecChangedError, match="micro_batch_tokens is 16384, asked for 100"):
        Reference.start(str(model), owner=owner, micro_batch_tokens=100)
    with pytest.raises(SpecChangedError, match="restart=True"):
        Reference.start(str(model), owner=owner, actors=2)
    other = make_model(tmp_path / "other", seed=1)
    fresh = Reference.start(str(other), owner=owner, restart=True, cpu_offload=True)
    assert fresh.version != first.version
    assert np.isfinite(ray.get(fresh.logprobs(make_batch([random_shard(2, 2, seed=6)])).ref_logprobs[0])).all()
    fresh.close()
    assert actors.names(owner.namespace) == []


def test_errors(owner, model, tmp_path):
    with pytest.raises(ModelError):
        Reference.start(str(tmp_path / "nothing"), owner=owner)
    assert actors.names(owner.namespace) == []
    with pytest.raises(ConfigError, match="'cpu_ofload', did you mean 'cpu_offload'"):
        Reference.start(str(model), owner=owner, cpu_ofload=True)
    reference = Reference.start(str(model), owner=owner)
    batch = make_batch([random_shard(2, 2, seed=7)])
    with pytest.raises(BatchError, match=r"reference\.logprobs takes Batch"):
        reference.logprobs(batch.scored)
    late = Reference.start(str(model), owner=owner, reference_timeout_s=1e-9)
    with pytest.raises(DeadlineError, match=r"ReferenceSpec.reference_timeout_s"):
        late.logprobs(batch)
    os.kill(reference.info[0]["pid"], signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        reference.logprobs(batch)
    assert np.isfinite(ray.get(Reference.start(str(model), owner=owner).logprobs(batch).ref_logprobs[0])).all()


def test_kl_is_zero_while_the_learner_is_the_reference(shared, owner, model):
    learner = Learner.start(str(model), TrainSpec(lr=1e-2, zero_stage=0, micro_batch_tokens=200), owner)
    shards = [random_shard(3, 2, seed=8), random_shard(2, 2, seed=9)]
    batch = dataclasses.replace(make_batch(shards), advantages=np.array([[1, -1]] * 5, np.float32))
    batch = shared.logprobs(batch)
    mine = learner.logprobs(batch.scored.rollouts)
    for ours, theirs in zip(mine, batch.ref_logprobs, strict=True):
        np.testing.assert_allclose(ray.get(ours), ray.get(theirs), atol=5e-5)  # other micro-batches, so other rounding of 10-nat values
    stats = learner.update(batch, loss="ppo_clip", kl_coef=0.1)
    assert stats["kl"] == pytest.approx(0, abs=1e-9)
    after = [
        float(np.mean(ray.get(a) - ray.get(b))) for a, b in zip(learner.logprobs(batch.scored.rollouts), batch.ref_logprobs, strict=True)
    ]
    assert max(abs(g) for g in after) > 1e-3  # the learner has moved, the reference has not
