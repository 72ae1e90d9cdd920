"""What an update is made of: checked on the driver, split by the controller, carried out by the ranks. Plain values and references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.config import TrainSpec
from rlkit.context import derive_seed
from rlkit.errors import BatchError, LearnerError
from rlkit.losses import Objective, token_weights
from rlkit.types import Batch, Rollouts, require
from rlkit.zero import packing
from rlkit.zero.ds_config import packing_of
from rlkit.zero.packing import Rows


class Interrupted(LearnerError):
    """The update was stopped before its first optimizer step, and undone."""


@dataclass(frozen=True)
class Work:
    """The part of a `Batch` that the learner needs. P prompts x G samples."""

    shards: tuple[Any, ...]  # references to RolloutShard
    ref_logprobs: tuple[Any, ...] | None
    shard_sizes: tuple[int, ...]
    prompt_lengths: np.ndarray  # (P,)
    lengths: np.ndarray  # (P, G)
    advantages: np.ndarray  # (P, G) float32
    keep: np.ndarray  # (P,) bool
    temperature: float
    max_tokens: int
    comparable: bool  # the sampler's log-probs are of the plain distribution at the temperature, so the gap means something
    policy_version: int
    run: str | None
    recorded: bool = True  # the sampler's log-probs are there


def work_of(batch: Batch, objective: Objective) -> Work:
    """Check a batch and take what the learner needs of it.

    Raises:
        BatchError: not a `Batch`; nothing kept; an advantage that is not finite; greedy rollouts; a KL term without reference log-probs;
            ``tis_cap`` without the sampler's.
    """
    require(batch, Batch, "learner.update", "rl.advantages(scored, ...)")
    rollouts = batch.scored.rollouts
    sampling = rollouts.sampling
    if batch.n_samples == 0 or not rollouts.lengths[batch.keep].any():
        raise BatchError(
            f"Nothing to train on: {batch!r}. Every group was dropped; take more prompts, a larger group or another temperature, "
            "or keep groups without spread (drop_no_spread=False)."
        )
    if sampling.temperature == 0:
        raise BatchError(
            "These rollouts are greedy (temperature 0): their tokens were not drawn from the policy, so there is no gradient. "
            "Sample with a temperature above 0 to train."
        )
    bad = ~np.isfinite(batch.advantages[batch.keep])
    if bad.any():
        raise BatchError(f"{int(bad.sum())} of {bad.size} advantages are not finite. Look at batch.advantages and at the rewards.")
    if objective.kl_coef and batch.ref_logprobs is None:
        raise BatchError(
            f"kl_coef is {objective.kl_coef:g} but the batch has no reference log-probs: call reference.logprobs(batch) first."
        )
    if (objective.options or {}).get("tis_cap") and not sampling.logprobs:
        raise BatchError("tis_cap weighs samples by the sampler's log-probs, and these rollouts have none: sample with logprobs=True.")
    plain = sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_tokens == 0
    return Work(
        rollouts.shards,
        batch.ref_logprobs,
        rollouts.shard_sizes,
        rollouts.prompt_lengths,
        rollouts.lengths,
        np.asarray(batch.advantages, np.float32),
        np.asarray(batch.keep, bool),
        sampling.temperature,
        sampling.max_tokens,
        plain and sampling.logprobs,
        batch.policy_version,
        rollouts.run,
        sampling.logprobs,
    )


def work_of_rollouts(rollouts: Rollouts) -> Work:
    """For log-probs alone: every sample, at the sampling temperature (greedy ones at 1).

    Raises:
        BatchError: not `Rollouts`.
    """
    require(rollouts, Rollouts, "learner.logprobs", "sampler.generate(...)")
    p, g = rollouts.shape
    temperature = rollouts.sampling.temperature or 1.0
    zeros, keep = np.zeros((p, g), np.float32), np.ones(p, bool)
    return Work(
        rollouts.shards,
        None,
        rollouts.shard_sizes,
        rollouts.prompt_lengths,
        rollouts.lengths,
        zeros,
        keep,
        temperature,
        rollouts.sampling.max_tokens,
        False,
        rollouts.policy_version,
        rollouts.run,
    )


@dataclass(frozen=True)
class Share:
    """One rank's part of one mini-batch: s samples in micro-batches."""

    rows: Rows  # s
    advantages: np.ndarray  # (s,) float32
    weights: np.ndarray  # (s,) float64, of each token of a sample in the loss of the whole mini-batch
    micro: tuple[np.ndarray, ...]  # indices into the rows
    rounds: int  # micro-batches of the rank that has most; a rank with fewer runs empty ones


@dataclass(frozen=True)
class Job:
    """All that one rank needs for one update."""

    shards: tuple[Any, ...]
    ref_logprobs: tuple[Any, ...] | None
    shares: tuple[Share, ...]  # one a mini-batch
    order: tuple[int, ...]  # which mini-batch each optimizer step takes; one entry an optimizer step
    objective: Objective
    temperature: float
    comparable: bool
    policy_version: int
    tokens: int  # response tokens of all ranks in one pass
    recorded: bool = True  # the sampler's log-probs are there


def plan(work: Work, objective: Objective, spec: TrainSpec, version: int, steps: bool = True) -> tuple[list[Job], dict[str, float]]:
    """One `Job` a rank, and the metrics that are known before anything runs.

    Mini-batches are whole samples, shuffled by the seed and the policy version and the same in every epoch (later epochs take them in
    another order), and do not depend on the number of ranks. Each is split over ranks by tokens. With ``steps`` False the batch is one
    mini-batch.

    Raises:
        BatchError: fewer samples than mini-batches.
    """
    rows = packing.rows_of(work.shard_sizes, work.prompt_lengths, work.lengths, work.keep)
    advantages = work.advantages[work.keep].reshape(-1)
    count, epochs = (spec.minibatches, spec.epochs) if steps else (1, 1)
    shares_R: list[list[Share]] = [[] for _ in range(spec.world)]
    unpadded = packing_of(spec) == "varlen"
    rounds = real = padded = 0
    for part in packing.minibatches(len(rows), count, derive_seed(spec.seed, version)):
        part_rows, part_adv = rows.take(part), advantages[part]
        weights = token_weights(part_rows.lengths, objective.aggregate, work.max_tokens)
        # A sample without a token counts in the normaliser and has nothing to compute.
        filled = np.flatnonzero(part_rows.lengths > 0)
        split = [filled[s] for s in packing.partition(part_rows.totals[filled], spec.world)]
        micro_R = [packing.group(part_rows.totals[s], spec.micro_batch_tokens, unpadded) for s in split]
        most = max(len(m) for m in micro_R)
        rounds += most
        for rank, (s, micro) in enumerate(zip(split, micro_R, strict=True)):
            mine = part_rows.take(s)
            shares_R[rank].append(Share(mine, part_adv[s], weights[s], tuple(micro), most))
            real += int(mine.totals.sum())
            padded += sum(int(mine.totals[m].sum()) if unpadded else len(m) * int(mine.totals[m].max()) for m in micro)
    order = [int(m) for epoch in range(epochs) for m in _order(count, epoch, derive_seed(spec.seed, version, epoch))]
    jobs = [
        Job(
            work.shards,
            work.ref_logprobs,
            tuple(shares),
            tuple(order),
            objective,
            work.temperature,
            work.comparable and work.policy_version == version,  # an older policy's log-probs are others
            work.policy_version,
            int(rows.lengths.sum()),
            work.recorded,
        )
        for shares in shares_R
    ]
    facts = {
        "update/micro_batches": float(rounds * epochs),
        "update/padding": 1.0 - real / padded,
        "update/tokens": float(real * epochs),
        "update/samples": float(len(rows)),
        "update/optimizer_steps": float(len(order)),
        "update/policy_lag": float(version - work.policy_version),
    }
    return jobs, facts


def _order(count: int, epoch: int, seed: int) -> Sequence[int]:
    return range(count) if epoch == 0 else [int(i) for i in np.random.default_rng(seed).permutation(count)]


def combine(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of all ranks as one: token means of the sums, maxima of what ends in ``_max``, sums of the loss, the slowest rank's times."""
    tokens = sum(p["tokens"] for p in parts)
    steps = max(1, max(p["steps"] for p in parts))
    out = {"policy/loss": sum(p["loss"] for p in parts) / steps}
    for name in sorted({n for p in parts for n in p["sums"]}):
        out[f"policy/{name}"] = sum(p["sums"].get(name, 0.0) for p in parts) / max(1, tokens)
    for name in sorted({n for p in parts for n in p["maxima"]}):
        out[f"policy/{name}"] = max(p["maxima"][name] for p in parts if name in p["maxima"])
    for name in parts[0]["seconds"]:
        out[f"time/{name}"] = max(p["seconds"][name] for p in parts)
    return out
