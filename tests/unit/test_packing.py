import numpy as np
import pytest

from rlkit.errors import BatchError
from rlkit.types import Prompt, RolloutShard
from rlkit.zero import packing


def shard(prompts: list[list[int]], responses: list[list[list[int]]], start: float = 0.0) -> RolloutShard:
    """Responses per prompt; log-probs count up from ``start`` so that each token's is unique."""
    flat = [t for group in responses for sample in group for t in sample]
    return RolloutShard(
        prompts=tuple(Prompt(str(i), ({"role": "user", "content": "?"},)) for i in range(len(prompts))),
        prompt_tokens=tuple(np.array(p, np.int32) for p in prompts),
        tokens=np.array(flat, np.int32),
        lengths=np.array([[len(s) for s in group] for group in responses], np.int32),
        logprobs=(np.arange(len(flat)) + start).astype(np.float32),
        texts=tuple("" for group in responses for _ in group),
        finish_reasons=tuple("stop" for group in responses for _ in group),
    )


A = shard([[1, 2], [3]], [[[10], [11, 12]], [[13, 14, 15], [16]]])
B = shard([[4, 5, 6]], [[[17, 18], [19]]], start=100)


def rows(keep=None):
    return packing.rows_of((2, 1), np.array([2, 1, 3]), np.concatenate([A.lengths, B.lengths]), keep)


def test_rows_say_where_each_sample_is():
    r = rows()
    assert r.shard.tolist() == [0, 0, 0, 0, 1, 1]
    assert r.index.tolist() == [0, 1, 2, 3, 0, 1]
    assert r.prompt_lens.tolist() == [2, 2, 1, 1, 3, 3]
    assert r.lengths.tolist() == [1, 2, 3, 1, 2, 1]
    assert r.totals.tolist() == [3, 4, 4, 2, 5, 4]


def test_dropped_groups_leave_no_rows():
    r = rows(np.array([True, False, True]))
    assert r.shard.tolist() == [0, 0, 1, 1]
    assert r.index.tolist() == [0, 1, 0, 1]


def test_token_rows_are_prompt_then_response():
    r = rows().take(np.array([4, 2, 0]))
    assert [row.tolist() for row in packing.token_rows([A, B], r)] == [[4, 5, 6, 17, 18], [3, 13, 14, 15], [1, 2, 10]]


def test_per_token_follows_the_rows():
    r = rows().take(np.array([4, 2, 0]))
    assert packing.per_token([A, B], [A.logprobs, B.logprobs], r).tolist() == [100, 101, 3, 4, 5, 0]
    assert packing.per_token([A, B], [A.logprobs, B.logprobs], r.take(np.array([], int))).shape == (0,)


def test_microbatches_stay_within_the_budget_and_cover_every_row_once():
    lengths = np.array([3, 9, 2, 5, 5, 8, 1, 30])
    parts = packing.microbatches(lengths, 16)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert parts[0].tolist() == [7]  # longer than the budget: alone
    for part in parts[1:]:
        assert len(part) * lengths[part].max() <= 16
    assert packing.microbatches(np.array([], int), 16) == []


def test_packed_microbatches_are_few_and_even():
    lengths = np.array([3, 9, 2, 5, 5, 8, 1, 30])
    parts = packing.full_microbatches(lengths, 16)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert parts[0].tolist() == [7]  # longer than the budget: alone
    assert sorted(int(lengths[p].sum()) for p in parts[1:]) == [11, 11, 11]  # 33 tokens need three groups of 16
    assert packing.full_microbatches(np.array([], int), 16) == []
    assert [p.tolist() for p in packing.full_microbatches(np.array([20]), 16)] == [[0]]


def test_packed_microbatches_are_never_more_than_first_fit_decreasing_needs():
    # Evened out, 6 + 4 | 5 + 4 + 3 (+ 2) cannot keep 12; first-fit decreasing finds 6 5 | 4 4 3 by hand: 11 and 11, and 2 in a third.
    tight = np.array([6, 5, 4, 4, 3, 2])
    assert [sorted(tight[g].tolist()) for g in packing._first_fit(tight, 12)] == [[5, 6], [3, 4, 4], [2]]
    assert [int(tight[p].sum()) for p in packing.full_microbatches(tight, 12)] == [12, 12]
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 40, rng.integers(1, 60))
        parts = packing.full_microbatches(lengths, 48)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
        assert max(int(lengths[p].sum()) for p in parts) <= 48
        assert len(parts) <= len(packing._first_fit(lengths, 48))


def test_padding_is_the_share_of_padded_tokens():
    assert packing.padding(np.array([4, 2]), [np.array([0, 1])]) == pytest.approx(2 / 8)
    assert packing.padding(np.array([4, 2]), []) == 0.0


def test_partition_balances_tokens():
    tokens = np.array([10, 1, 1, 1, 7, 2, 2, 2])
    parts = packing.partition(tokens, 2)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert [int(tokens[p].sum()) for p in parts] == [13, 13]
    few = packing.partition(np.array([5]), 4)
    assert sorted(len(p) for p in few) == [0, 0, 0, 1]


def test_minibatches_are_seeded_and_disjoint():
    parts = packing.minibatches(10, 3, seed=5)
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert {len(p) for p in parts} == {3, 4}
    again, other = packing.minibatches(10, 3, seed=5), packing.minibatches(10, 3, seed=6)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    assert packing.minibatches(4, 1, seed=5)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(BatchError, match="at most 2"):
        packing.minibatches(2, 3, seed=0)
