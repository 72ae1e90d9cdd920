"""One rank's work in an update: old log-probs, micro-batches forward and backward, the gate, the optimizer steps.

Every rank makes the same sequence of collectives: it runs as many micro-batches as the rank that has most, empty ones when it has fewer,
and holds its errors (`Guard`) until all have reached a point where they agree to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlkit.context import derive_seed
from rlkit.errors import LearnerError, LogprobGapError
from rlkit.losses import TokenInputs
from rlkit.types import RolloutShard, fetch
from rlkit.zero import layout, packing
from rlkit.zero.ds_config import allowed_gap
from rlkit.zero.engine import Engine
from rlkit.zero.packing import Rows
from rlkit.zero.peers import Guard, Peers, timed
from rlkit.zero.schedule import lr_at
from rlkit.zero.work import Interrupted, Job, Share

GAP, GAP_MAX = "/gap", "/gap_max"  # among the metrics, whose names are others


@dataclass
class Tally:
    """Sums over the tokens that this rank has seen.

    What micro-batches add stays on the device until `settle`, so that the host runs ahead of the device: one wait an optimizer step.
    """

    loss: float = 0.0
    tokens: int = 0
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("fetch", "old_logprobs", "forward_backward", "optimizer"), 0.0)
    )
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_tokens: int = 0
    norms: list[float] = field(default_factory=list)
    _losses: list[torch.Tensor] = field(default_factory=list)  # () float64 each
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)  # () float64 each

    def add(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        self._losses.append(loss.detach().double())
        for name, values in metrics.items():
            self._keep(name, values.to(loss.device))

    def gap(self, learner: torch.Tensor, sampler: torch.Tensor) -> None:
        difference = (learner.detach() - sampler).abs()
        self._keep(GAP, difference)
        self._keep(GAP_MAX, difference)
        self.gap_tokens += difference.numel()

    def _keep(self, name: str, values: torch.Tensor) -> None:
        known = self._pending.get(name)
        if name.endswith("_max"):
            new = values.max().double()
            self._pending[name] = new if known is None else torch.maximum(known, new)
        else:
            new = values.sum(dtype=torch.float64)
            self._pending[name] = new if known is None else known + new

    def settle(self) -> list[float]:
        """Read what is pending, in one copy. Returns the losses of the micro-batches since the last time."""
        names = list(self._pending)
        if not self._losses and not names:
            return []
        found = torch.stack([*self._losses, *self._pending.values()]).tolist()
        losses, values = found[: len(self._losses)], dict(zip(names, found[len(self._losses) :], strict=True))
        self._losses, self._pending = [], {}
        self.loss += sum(losses)
        self.gap_sum += values.pop(GAP, 0.0)
        self.gap_max = max(self.gap_max, values.pop(GAP_MAX, 0.0))
        for name, value in values.items():
            if name.endswith("_max"):
                self.maxima[name] = max(self.maxima.get(name, -np.inf), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value
        return losses

    def as_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "steps": self.steps,
            "sums": self.sums,
            "maxima": self.maxima,
            "seconds": self.seconds,
            "norms": self.norms,
        }


@dataclass
class Held:
    """One rank's view of a job: fetched shards, and old log-probs once they are known."""

    job: Job
    shards: list[RolloutShard | None]
    refs: list[np.ndarray | None] | None
    old: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # mini-batch -> one (M,) a micro-batch


class Trainer:
    """Runs jobs on an engine. ``steps`` counts optimizer steps since the run began."""

    def __init__(self, engine: Engine, peers: Peers) -> None:
        self.engine, self.peers = engine, peers
        self.steps = 0
        self.done = self.total = 0  # micro-batches of the call in progress

    def update(self, job: Job, stopped: Callable[[], bool]) -> dict[str, Any]:
        """All optimizer steps of a job. Collective.

        Raises:
            Interrupted: ``stopped`` on some rank before the first optimizer step; nothing has changed.
            LogprobGapError: the gate; nothing has changed.
            LearnerError: the loss failed, or no gradient was finite; nothing has changed.
        """
        tally = Tally()
        held = self._fetch(job, tally)
        once = len(job.order) == 1
        rounds = [share.rounds for share in job.shares]
        self.done, self.total = 0, sum(rounds[m] for m in job.order) + (0 if once else sum(rounds))
        if not once:
            with timed(tally.seconds, "old_logprobs"):
                self._old_logprobs(held, tally, stopped)
            self._gate(job, tally)
        for number, minibatch in enumerate(job.order):
            first = number == 0
            self._forward_backward(held, minibatch, tally, stopped if first else None, measure=once)
            if once:
                self._gate(job, tally)
            self._step(tally, last_chance=number == len(job.order) - 1)
        return tally.as_dict()

    def forward_backward(self, job: Job, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Add the gradient of a one-mini-batch job to what is accumulated. Collective. Raises as `update`; then *all* of it is dropped."""
        tally = Tally()
        held = self._fetch(job, tally)
        self.done, self.total = 0, job.shares[0].rounds
        self._forward_backward(held, 0, tally, stopped, measure=True)
        self._gate(job, tally)
        tally.steps = 1
        return tally.as_dict()

    def step(self) -> dict[str, Any]:
        """Apply what is accumulated. Collective.

        Raises:
            LearnerError: the gradient is not finite; nothing was applied.
        """
        tally = Tally()
        self._step(tally, last_chance=True)
        return tally.as_dict()

    @torch.no_grad()
    def logprobs(self, job: Job, owned: list[int]) -> dict[int, np.ndarray]:
        """shard -> (N,) float32 log-probs of all its response tokens, for the shards that this rank owns. Collective."""
        held = self._fetch(job, Tally())
        share = job.shares[0]
        self.done, self.total = 0, share.rounds
        out: dict[int, np.ndarray] = {}
        for s in owned:
            shard = held.shards[s]
            assert shard is not None
            out[s] = np.zeros(len(shard.tokens), np.float32)
        for round_ in range(share.rounds):
            rows = _rows(share, round_)
            logprobs, _ = self._forward(held, rows, job.temperature)
            if rows is None:
                continue
            values, start = logprobs.cpu().numpy(), 0
            for s, i, n in zip(rows.shard.tolist(), rows.index.tolist(), rows.lengths.tolist(), strict=True):
                shard = held.shards[s]
                assert shard is not None
                at = int(shard.offsets()[i])
                out[s][at : at + n] = values[start : start + n]
                start += n
        return out

    # ---- parts

    def _fetch(self, job: Job, tally: Tally) -> Held:
        """Bring the shards that this rank's rows are in."""
        guard = Guard("Fetching the batch")
        shards: list[RolloutShard | None] = [None] * len(job.shards)
        refs: list[np.ndarray | None] | None = None if job.ref_logprobs is None else [None] * len(job.shards)
        with timed(tally.seconds, "fetch"), guard:
            for s in sorted({int(s) for share in job.shares for s in np.unique(share.rows.shard)}):
                shards[s] = fetch(job.shards[s])
                if refs is not None and job.ref_logprobs is not None:
                    refs[s] = np.asarray(fetch(job.ref_logprobs[s]))
        self.peers.agree(guard, self.engine.discard)
        return Held(job, shards, refs)

    @torch.no_grad()
    def _old_logprobs(self, held: Held, tally: Tally, stopped: Callable[[], bool]) -> None:
        for m, share in enumerate(held.job.shares):
            held.old[m] = []
            for round_ in range(share.rounds):
                self._check(Guard("The update"), stopped)
                rows = _rows(share, round_)
                logprobs, _ = self._forward(held, rows, held.job.temperature)
                if rows is not None:
                    held.old[m].append(logprobs)
                    tally.gap(logprobs, self._sampler(held, rows))

    def _forward_backward(self, held: Held, minibatch: int, tally: Tally, stopped: Callable[[], bool] | None, measure: bool) -> None:
        """One mini-batch. With ``measure`` the forward's own log-probs are the old ones, and are compared with the sampler's."""
        job, share = held.job, held.job.shares[minibatch]
        guard = Guard(f"Loss {job.objective.name!r}")
        torch.manual_seed(derive_seed(self.engine.spec.seed, self.steps, self.peers.rank))  # for losses that draw numbers
        with timed(tally.seconds, "forward_backward"):
            for round_ in range(share.rounds):
                self._check(guard, stopped)
                rows = _rows(share, round_)
                logprobs, entropy = self._forward(held, rows, job.temperature)
                nothing = loss = logprobs.sum() * 0.0  # keeps the graph, so that every rank runs the same backward
                if rows is not None:
                    old = logprobs.detach() if measure else held.old[minibatch][round_]
                    inputs = self._inputs(held, rows, share.advantages[share.micro[round_]], logprobs, old, entropy)
                    if measure:
                        tally.gap(old, inputs.sampler_logprobs)
                    with guard:
                        weights = np.repeat(share.weights[share.micro[round_]], rows.lengths)
                        loss, metrics = job.objective(inputs, self._tensor(weights.astype(np.float32)), check=False)
                        tally.add(loss, metrics)
                        loss = loss + nothing
                        tally.tokens += len(weights)
                self.engine.backward(loss)
            with guard:
                _finite(tally.settle())
            self._check(guard, stopped)

    def _step(self, tally: Tally, last_chance: bool) -> None:
        rate = lr_at(self.steps, self.engine.spec)
        with timed(tally.seconds, "optimizer"):
            applied = self.engine.step(rate)
        if applied:
            self.steps += 1
            tally.steps += 1
            tally.norms.append(self.engine.norm)
            tally.maxima["lr"] = rate
        else:
            self.engine.discard()
        if last_chance and tally.steps == 0:
            raise LearnerError(
                f"The gradient is not finite (norm {self.engine.norm}); nothing was applied. Look at the batch's advantages and log-probs, "
                "or lower the learning rate."
            )

    def _check(self, guard: Guard, stopped: Callable[[], bool] | None) -> None:
        """Stop on all ranks when one was told to stop or holds an error."""
        stop = stopped is not None and stopped()
        if self.peers.world == 1:
            flags = np.array([[stop, guard.error is not None]])
        else:
            flags = self.peers.share([float(stop), float(guard.error is not None)])
        if flags[:, 1].any():
            self.peers.fail(guard, self.engine.discard)
        if flags[:, 0].any():
            self.engine.discard()
            raise Interrupted("The update was interrupted before its first optimizer step and undone; nothing has changed.")

    def _gate(self, job: Job, tally: Tally) -> None:
        """Compare learner and sampler before anything is applied."""
        tally.settle()
        sums = self.peers.share([tally.gap_sum, tally.gap_tokens, tally.gap_max])
        gap = float(sums[:, 0].sum() / max(1.0, sums[:, 1].sum()))
        limit = allowed_gap(self.engine.spec)
        if job.recorded:  # else the sampler's are zeros, and the difference is no gap
            tally.maxima |= {"logprob_gap": gap, "logprob_gap_max": float(sums[:, 2].max())}
        if job.comparable and not gap <= limit:
            self.engine.discard()
            raise LogprobGapError(
                f"Sampler and learner disagree about the same tokens: mean |difference of log-probs| is {gap:.3g} nats, allowed is "
                f"{limit:.3g} (max_logprob_gap). The batch says policy version {job.policy_version}. The engines probably hold other "
                "weights: run sampler.sync(learner) and roll out again. Nothing was applied."
            )

    def _forward(self, held: Held, rows: Rows | None, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.done += 1
        arrange = layout.varlen if self.engine.varlen else layout.padded
        if rows is None:  # an empty micro-batch: one row whose loss counts nothing, through the same modules as any other
            return self.engine(arrange([np.zeros(3, np.int64)], np.array([2])), temperature)
        return self.engine(arrange(packing.token_rows(held.shards, rows), rows.prompt_lens), temperature)

    def _inputs(
        self, held: Held, rows: Rows, advantages: np.ndarray, logprobs: torch.Tensor, old: torch.Tensor, entropy: torch.Tensor
    ) -> TokenInputs:
        sample = np.repeat(np.arange(len(rows)), rows.lengths)
        ref = None if held.refs is None else self._tensor(packing.per_token(held.shards, held.refs, rows))
        per_token = self._tensor(advantages[sample])
        return TokenInputs(
            logprobs, old, self._sampler(held, rows), ref, per_token, entropy, self._tensor(sample), self._tensor(rows.lengths)
        )

    def _sampler(self, held: Held, rows: Rows) -> torch.Tensor:
        return self._tensor(packing.per_token(held.shards, [None if s is None else s.logprobs for s in held.shards], rows))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return layout.send(array, self.engine.device)


def _finite(losses: list[float]) -> None:
    """Raises ValueError for a micro-batch whose loss is not finite."""
    for number, value in enumerate(losses):
        if not np.isfinite(value):
            raise ValueError(f"it is {value} on micro-batch {number + 1} of {len(losses)}")


def _rows(share: Share, round_: int) -> Rows | None:
    return share.rows.take(share.micro[round_]) if round_ < len(share.micro) else None
