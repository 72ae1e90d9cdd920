"""Advantages, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scored import make_rollouts

from rlkit.errors import BatchError, ConfigError
from rlkit.estimators import ESTIMATORS, advantages, dr_grpo, grpo, register, rloo
from rlkit.scoring import score
from rlkit.types import Scored


def scored_with(rewards) -> Scored:
    rewards = np.array(rewards, dtype=np.float32)
    rollouts = make_rollouts([["x"] * rewards.shape[1]] * rewards.shape[0], ["x"] * rewards.shape[0])
    return Scored(rollouts, rewards, {}, {}, {}, (), 0.0)


def test_grpo_by_hand():
    # mean 0.5, population standard deviation 0.5
    np.testing.assert_allclose(grpo(np.array([[1.0, 0, 0, 1]]), eps=0), [[1, -1, -1, 1]])
    # mean 2, deviations -1 -1 2, variance (1 + 1 + 4) / 3 = 2
    np.testing.assert_allclose(grpo(np.array([[1.0, 1, 4]]), eps=0), [[-(0.5**0.5), -(0.5**0.5), 2**0.5]])
    # eps is added to the standard deviation: 0.5 / (0.5 + 0.5)
    np.testing.assert_allclose(grpo(np.array([[1.0, 0]]), eps=0.5), [[0.5, -0.5]])


def test_grpo_without_spread_is_zero():
    np.testing.assert_array_equal(grpo(np.full((2, 4), 0.3)), np.zeros((2, 4)))


def test_dr_grpo_by_hand():
    np.testing.assert_allclose(dr_grpo(np.array([[1.0, 0, 0, 0], [2, 4, 6, 8]])), [[0.75, -0.25, -0.25, -0.25], [-3, -1, 1, 3]])


def test_rloo_by_hand():
    # 1 - mean(0, 0) = 1; 0 - mean(1, 0) = -0.5
    np.testing.assert_allclose(rloo(np.array([[1.0, 0, 0]])), [[1, -0.5, -0.5]])
    # the same as the centred reward times G / (G - 1)
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    np.testing.assert_allclose(rloo(rewards), dr_grpo(rewards) * 7 / 6)


def test_batch_counts_and_drops_groups_without_spread():
    scored = scored_with([[1, 0], [1, 1], [0, 0], [0, 1]])
    batch = advantages(scored, "dr_grpo")
    assert batch.no_spread_groups == 2
    assert batch.keep.tolist() == [True] * 4
    assert batch.advantages.dtype == np.float32
    np.testing.assert_allclose(batch.advantages, [[0.5, -0.5], [0, 0], [0, 0], [-0.5, 0.5]])
    dropped = advantages(scored, "dr_grpo", drop_no_spread=True)
    assert dropped.no_spread_groups == 2
    assert dropped.keep.tolist() == [True, False, False, True]
    assert dropped.n_samples == 4


def test_settings_reach_the_estimator():
    assert advantages(scored_with([[1, 0]]), "grpo", eps=0.5).advantages.tolist() == [[0.5, -0.5]]
    with pytest.raises(ConfigError, match=r"'esp', did you mean 'eps'"):
        advantages(scored_with([[1, 0]]), "grpo", esp=0.5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_of_one_is_refused(name):
    with pytest.raises(BatchError, match=rf"{name} compares the samples of a group and needs at least 2.*there is 1.*n=8"):
        advantages(scored_with([[1], [0]]), name)


def test_rollouts_instead_of_scores():
    with pytest.raises(BatchError, match=r"takes Scored, which rl.score\(rollouts, reward\) returns; it was given Rollouts"):
        advantages(make_rollouts([["x"]], ["x"]))


def test_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no estimator 'gropo', did you mean 'grpo'"):
        advantages(scored_with([[1, 0]]), "gropo")


def test_callable_estimator():
    batch = advantages(scored_with([[1, 0], [3, 5]]), lambda rewards, scale=2.0: rewards * scale, scale=3.0)
    assert batch.advantages.tolist() == [[3, 0], [9, 15]]
    assert batch.estimator == "lambda"
    assert advantages(scored_with([[2]]), lambda r: r).advantages.tolist() == [[2]]  # a group of one is its own business


def test_callable_estimator_with_bad_results():
    with pytest.raises(BatchError, match=r"returned shape \(2,\); it must return \(P, G\) = \(2, 2\)"):
        advantages(scored_with([[1, 0], [3, 5]]), lambda r: r[:, 0])
    with pytest.raises(BatchError, match="returned nan for prompt 'p1'"):
        advantages(scored_with([[1, 0], [3, 3]]), lambda r: np.where(r == 3, np.nan, r))


def test_registered_estimator():
    register("best_of", lambda r: r - r.max(axis=1, keepdims=True), needs=3)
    try:
        assert advantages(scored_with([[1, 0, 2]]), "best_of").advantages.tolist() == [[-1, -2, 0]]
        with pytest.raises(BatchError, match="needs at least 3"):
            advantages(scored_with([[1, 0]]), "best_of")
    finally:
        del ESTIMATORS["best_of"]


def test_a_value_is_not_changed():
    scored = scored_with([[1, 0]])
    advantages(scored, lambda r: np.multiply(r, 0, out=r))
    assert scored.rewards.tolist() == [[1, 0]]


def test_estimators_of_real_scores():
    rollouts = make_rollouts([["#### 3", "#### 4"], ["#### 7", "#### 7"]], ["3", "7"])
    batch = advantages(score(rollouts, lambda prompt, sample: float(sample.text.endswith(prompt.answer))), "rloo", drop_no_spread=True)
    assert batch.advantages.tolist() == [[1, -1], [0, 0]]
    assert batch.keep.tolist() == [True, False]
