"""Shares and intervals against numbers worked out by hand, or by another way of counting."""

import itertools
import math

import numpy as np
import pytest

from rlkit.eval import intervals


def test_wilson_by_hand():
    # p = 0.5, n = 4, z = 2: middle (0.5 + 0.5) / 2 = 0.5, half = 2 / 2 * sqrt(0.25 / 4 + 4 / 64) = sqrt(0.125)
    low, high = intervals.wilson(2, 4, z=2)
    assert (low, high) == pytest.approx((0.5 - math.sqrt(0.125), 0.5 + math.sqrt(0.125)))
    assert intervals.wilson(0, 10)[0] == 0
    assert intervals.wilson(10, 10) == pytest.approx((1 - 1.959964**2 / (10 + 1.959964**2), 1))
    assert intervals.wilson(0, 0) == (0, 1)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample():
    rng = np.random.default_rng(0)
    correct = rng.random((7, 6)) < 0.4
    for k in range(1, 7):
        counted = np.mean([any(row[list(s)]) for row in correct for s in itertools.combinations(range(6), k)])
        assert intervals.pass_at_k(correct, k) == pytest.approx(counted)
    with pytest.raises(ValueError, match="k must be from 1 to 6"):
        intervals.pass_at_k(correct, 7)


def test_samples_that_agree_count_as_one():
    one = np.array([[True], [False], [True], [True]] * 10)
    same = np.repeat(one, 16, axis=1)
    assert intervals.accuracy_interval(same) == pytest.approx(intervals.accuracy_interval(one), rel=0.03)


def test_samples_that_are_independent_count_each():
    rng = np.random.default_rng(1)
    correct = rng.random((500, 8)) < 0.5
    low, high = intervals.accuracy_interval(correct)
    every = intervals.wilson(int(correct.sum()), correct.size)
    assert high - low == pytest.approx(every[1] - every[0], rel=0.1)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    """Problems of different difficulty, 40 of them with 8 samples each: coverage over 2,000 draws of problems and samples."""
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(2000):
        difficulty = rng.beta(0.5, 0.5, 40)  # mean 0.5
        low, high = intervals.accuracy_interval(rng.random((40, 8)) < difficulty[:, None])
        hits += low <= 0.5 <= high
    assert 0.93 <= hits / 2000 <= 0.97


def test_powers_of_two():
    assert intervals.powers_of_two(1) == [1]
    assert intervals.powers_of_two(6) == [1, 2, 4, 6]
    assert intervals.powers_of_two(8) == [1, 2, 4, 8]


def same(a, b):
    return float(a) == float(b)


@pytest.mark.parametrize(
    ("answers", "correct", "value"),
    [
        (["1", "1", "2"], [True, True, False], 1.0),
        (["1", "2", "2"], [True, False, False], 0.0),
        (["1", "1.0", "2"], [True, True, False], 1.0),  # one answer, written in two ways
        (["1", "2"], [True, False], 0.5),  # a tie
        ([None, None, "2"], [False, False, True], 1.0),  # what has no answer does not vote
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority(answers, correct, value):
    assert intervals.majority(answers, correct, same) == value


def test_paired_difference_by_hand():
    # differences 1, 0, 0, 1: mean 0.5, standard deviation sqrt(1/3), standard error sqrt(1/12)
    mean, low, high = intervals.paired(np.array([0, 1, 0, 0]), np.array([1, 1, 0, 1]), z=1)
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12)))


def test_sign_test_by_hand():
    assert intervals.sign_test(0, 0) == 1
    assert intervals.sign_test(5, 0) == pytest.approx(2 / 32)
    assert intervals.sign_test(4, 1) == pytest.approx(2 * 6 / 32)
    assert intervals.sign_test(3, 3) == 1
