"""Rollouts that are under way while the learner trains."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import ray
from killing import killed_while_sampling
from tiny_models import make_model

from rlkit import advantages, score
from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ConfigError, RolloutError, StaleBatchError
from rlkit.learner import Learner
from rlkit.sampler import Sampler

HF = {"engine": "hf", "cpus_per_engine": 0.1, "threads": 1, "max_model_len": 128}
TRAIN = {"zero_stage": 2, "lr": 1e-2, "cpus_per_rank": 0.1, "threads": 1}
ASK = {"n": 2, "max_tokens": 16, "min_tokens": 16}
PROMPTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model")))


def tokens(rollouts):
    return np.concatenate([shard.tokens for shard in ray.get(list(rollouts.shards))])


def spread(prompt, sample):
    return float(sample.tokens[0] % 5)


def batch_of(rollouts):
    return advantages(score(rollouts, spread), "grpo", drop_no_spread=False)


def until(true, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def test_engines_sample_with_the_old_weights_while_the_learner_makes_new_ones(model, owner):
    sampler = Sampler.start(model, EngineSpec.make(HF, engines=2), owner)
    learner = Learner.start(model, TrainSpec.make(TRAIN, max_lag=1), owner)
    sampler.sync(learner)
    ahead = sampler.submit(PROMPTS, seed=7, **ASK)
    versions = []
    for step in range(3):
        rollouts = ahead.result()
        assert ahead.result() is rollouts
        ahead = sampler.submit(PROMPTS, seed=8 + step, **ASK)
        assert "in flight" in repr(ahead)
        learner.update(batch_of(rollouts), tis_cap=2.0)
        versions.append((rollouts.policy_version, ahead.policy_version, learner.version))
        sampler.sync(learner)  # waits for what is under way, which is of one version therefore
        assert ahead.done
    assert versions == [(0, 0, 1), (0, 1, 2), (1, 2, 3)]
    assert ahead.result().policy_version == 2
    # The same samples as those of a call that waits, with the same weights and seed.
    now = sampler.generate(PROMPTS, seed=99, progress=False, **ASK)
    np.testing.assert_array_equal(tokens(sampler.submit(PROMPTS, seed=99, **ASK).result()), tokens(now))
    # Two updates behind: the learner refuses.
    old = sampler.submit(PROMPTS, **ASK).result()
    learner.update(batch_of(now))
    learner.update(batch_of(sampler.submit(PROMPTS, **ASK).result()))
    with pytest.raises(StaleBatchError, match="2 behind, max_lag allows 1"):
        learner.update(batch_of(old))


def test_what_is_cancelled_or_forgotten_ends_on_the_engine(model, owner):
    sampler = Sampler.start(model, EngineSpec.make(HF), owner)
    (engine,) = sampler.engines
    long = {"n": 8, "max_tokens": 100, "min_tokens": 100}

    def idle():
        return ray.get(engine.progress.remote())["call"] is None

    def busy():
        return not idle()

    pending = sampler.submit(PROMPTS * 10, **long)
    assert until(busy)
    assert not pending.done
    pending.cancel()
    assert until(idle)
    with pytest.raises(RolloutError, match="was cancelled"):
        pending.result()
    pending = sampler.submit(PROMPTS * 10, **long)
    assert until(busy)
    del pending
    gc.collect()
    assert until(idle)
    assert sampler.generate(PROMPTS, progress=False, **ASK).shape == (3, 2)
    pending = sampler.submit(PROMPTS * 10, **long)
    sampler.close()
    with pytest.raises(RolloutError, match="was cancelled"):
        pending.result()


def test_an_engine_that_dies_meanwhile_costs_no_sample(model, owner):
    sampler = Sampler.start(model, EngineSpec.make(HF, engines=2), owner)
    long = {"n": 4, "max_tokens": 60, "min_tokens": 60, "seed": 5}
    whole = tokens(sampler.generate(PROMPTS, progress=False, **long))
    with killed_while_sampling(sampler.engines[0], sampler.info[0]["pid"]):
        pending = sampler.submit(PROMPTS, **long)
    assert len(sampler.engines) == 2  # nobody has looked yet
    np.testing.assert_array_equal(tokens(pending.result()), whole)
    assert len(sampler.engines) == 1


def test_engines_that_take_turns_with_the_learner_are_not_for_it(model, owner):
    sampler = Sampler.start(model, EngineSpec.make(HF, sleep_level=1), owner)
    with pytest.raises(ConfigError, match=r"EngineSpec\.sleep_level makes them take turns"):
        sampler.submit(PROMPTS, **ASK)
