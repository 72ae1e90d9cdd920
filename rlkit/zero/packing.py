"""Which sample goes to which optimizer step, which rank and which micro-batch. Plain numpy, no state, no torch.

A *row* is one sample as the model reads it: prompt and response. Rows are never split, so a loss may use whole samples.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlkit.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlkit.types import RolloutShard


@dataclass(frozen=True)
class Rows:
    """S samples and where they are found."""

    shard: np.ndarray  # (S,) int64, which shard
    index: np.ndarray  # (S,) int64, which sample of that shard (prompt-major)
    prompt_lens: np.ndarray  # (S,) int64, tokens
    lengths: np.ndarray  # (S,) int64, response tokens

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def totals(self) -> np.ndarray:
        """(S,) int64: tokens of prompt and response."""
        return self.prompt_lens + self.lengths

    def take(self, which: np.ndarray) -> Rows:
        return Rows(self.shard[which], self.index[which], self.prompt_lens[which], self.lengths[which])


def rows_of(shard_sizes: Sequence[int], prompt_lengths: np.ndarray, lengths: np.ndarray, keep: np.ndarray | None = None) -> Rows:
    """All samples of P prompts x G, in order; with ``keep`` (P,) bool only those of the kept prompts.

    ``shard_sizes`` are prompts a shard, ``prompt_lengths`` (P,), ``lengths`` (P, G).
    """
    p, g = lengths.shape
    shard_P = np.repeat(np.arange(len(shard_sizes)), shard_sizes)
    first_P = np.repeat(np.concatenate([[0], np.cumsum(shard_sizes)[:-1]]).astype(np.int64), shard_sizes)
    local_P = np.arange(p) - first_P
    rows = Rows(
        np.repeat(shard_P, g).astype(np.int64),
        (local_P[:, None] * g + np.arange(g)[None, :]).reshape(-1).astype(np.int64),
        np.repeat(prompt_lengths, g).astype(np.int64),
        lengths.reshape(-1).astype(np.int64),
    )
    return rows if keep is None else rows.take(np.flatnonzero(np.repeat(keep, g)))


def minibatches(samples: int, count: int, seed: int) -> list[np.ndarray]:
    """Split ``samples`` into ``count`` optimizer steps of nearly equal size: shuffled by ``seed``, in order when ``count`` is 1.

    Raises:
        BatchError: fewer samples than mini-batches.
    """
    if samples < count:
        raise BatchError(f"{samples} samples cannot fill {count} mini-batches; set minibatches to at most {samples}.")
    if count == 1:
        return [np.arange(samples)]
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(samples), count)]


def partition(tokens: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Give each of the items (tokens each) to one of ``ranks``, so that the sums are close: longest first, to the rank with least.

    Returns one sorted index array a rank; some are empty when there are fewer items than ranks. Deterministic.
    """
    if ranks == 1:
        return [np.arange(len(tokens))]
    heap = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-tokens, kind="stable"):
        load, rank = heapq.heappop(heap)
        parts[rank].append(int(item))
        heapq.heappush(heap, (load + int(tokens[item]), rank))
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def group(lengths: np.ndarray, budget: int, varlen: bool) -> list[np.ndarray]:
    """Micro-batches of rows of ``lengths``: `full_microbatches` when they are computed without padding, else `microbatches`."""
    return full_microbatches(lengths, budget) if varlen else microbatches(lengths, budget)


def microbatches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Group rows of ``lengths`` (total tokens each) so that rows x longest row stays within ``budget`` padded tokens.

    Rows are taken longest first, so that neighbours have nearly equal length and little is padded. A row longer than the budget is
    alone in its micro-batch: it cannot be cut.
    """
    order = np.argsort(-lengths, kind="stable")
    out: list[np.ndarray] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, int(lengths[order[start]])))
        out.append(order[start : start + rows])
        start += rows
    return out


def full_microbatches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Group rows of ``lengths`` (total tokens each) so that each group has at most ``budget`` tokens: few groups, of even size.

    First-fit decreasing (Johnson 1973) bounds how many groups are needed; in that many or fewer, the longest rows go first, each into
    the group with least, where that keeps the budget. A row longer than the budget is alone in its group. Deterministic.
    """
    alone = [np.array([i], dtype=np.int64) for i in np.flatnonzero(lengths > budget)]
    fit = np.flatnonzero(lengths <= budget)
    if not len(fit):
        return alone
    tokens = lengths[fit]
    least = -(-int(tokens.sum()) // budget)
    first: list[list[int]] | None = None
    count = max(1, least)
    while first is None or count <= len(first):
        even = [part for part in partition(tokens, count) if len(part)]
        if max(int(tokens[part].sum()) for part in even) <= budget:
            return alone + [fit[part] for part in even]
        first = _first_fit(tokens, budget) if first is None else first
        count += 1
    return alone + [fit[np.array(sorted(part), dtype=np.int64)] for part in first]


def _first_fit(tokens: np.ndarray, budget: int) -> list[list[int]]:
    """Each item, longest first, into the first group that has room for it."""
    room = np.zeros(len(tokens), dtype=np.int64)
    groups: list[list[int]] = []
    for item in np.argsort(-tokens, kind="stable"):
        fits = np.flatnonzero(room[: len(groups)] >= tokens[item])
        if len(fits):
            group = int(fits[0])
        else:
            group = len(groups)
            groups.append([])
            room[group] = budget
        groups[group].append(int(item))
        room[group] -= tokens[item]
    return groups


def padding(lengths: np.ndarray, parts: Sequence[np.ndarray]) -> float:
    """Share of the padded tokens of these micro-batches that are padding, 0 to 1."""
    padded = sum(len(part) * int(lengths[part].max()) for part in parts)
    return 1.0 - float(sum(int(lengths[part].sum()) for part in parts)) / padded if padded else 0.0


def token_rows(shards: Sequence[RolloutShard | None], rows: Rows) -> list[np.ndarray]:
    """(n,) int64 for each row: its prompt and response."""
    offsets = {int(s): _shard(shards, int(s)).offsets() for s in np.unique(rows.shard)}
    out = []
    for s, i, n in zip(rows.shard.tolist(), rows.index.tolist(), rows.lengths.tolist(), strict=True):
        shard, start = _shard(shards, s), int(offsets[s][i])
        out.append(np.concatenate([shard.prompt_tokens[i // shard.group_size], shard.tokens[start : start + n]]).astype(np.int64))
    return out


def per_token(shards: Sequence[RolloutShard | None], values: Sequence[np.ndarray | None], rows: Rows) -> np.ndarray:
    """(M,) float32: the entries of ``values`` (one (N,) array a shard) that belong to the response tokens of ``rows``, row by row."""
    offsets = {int(s): _shard(shards, int(s)).offsets() for s in np.unique(rows.shard)}
    spans = []
    for r in range(len(rows)):
        s, i, n = int(rows.shard[r]), int(rows.index[r]), int(rows.lengths[r])
        array = values[s]
        assert array is not None
        spans.append(array[offsets[s][i] : offsets[s][i] + n])
    return np.concatenate(spans).astype(np.float32, copy=False) if spans else np.zeros(0, np.float32)


def _shard(shards: Sequence[RolloutShard | None], s: int) -> RolloutShard:
    shard = shards[s]
    assert shard is not None, f"shard {s} was not fetched"
    return shard
