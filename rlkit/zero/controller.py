"""The actor that leads the ranks. The driver talks to it alone, so a kernel that dies never leaves ranks half called.

Its methods run one at a time. ``state``, ``info`` and ``stop`` are answered meanwhile.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from rlkit import actors, memory, transfer
from rlkit.config import TrainSpec, as_plain
from rlkit.errors import (
    ActorDiedError,
    BatchError,
    DeadlineError,
    LearnerError,
    ModelError,
    OutOfMemoryError,
    RlkitError,
    StaleBatchError,
)
from rlkit.losses import Objective
from rlkit.seats import Seat
from rlkit.types import UpdateStats
from rlkit.weights import WeightManifest
from rlkit.zero import packing, rank, work
from rlkit.zero.rank import Rank
from rlkit.zero.work import Job, Share, Work

SETTING = "TrainSpec.update_timeout_s"
MEASURED = ("update", "forward_backward", "optim_step", "logprobs", "publish_weights")  # calls whose memory the ranks measure


class Controller:
    """Policy version, optimizer steps and the ranks of one learner."""

    def __init__(self, model: str, spec: TrainSpec, run: str, seats: Sequence[Seat | None]) -> None:
        self.model, self.spec, self.run, self._seats = {"asked": model}, spec, run, seats
        self._ranks: list[Any] = []
        self._facts: dict[str, Any] = {}
        self._version = 0
        self._steps = 0  # optimizer steps
        self._busy: tuple[str, float] | None = None
        self._last: dict[str, Any] | None = None
        self._in_tag: tuple[int | None, int] = (None, 0)
        self._torn: int | None = None  # the step in which only some optimizer steps of an update were applied
        self._pending = False  # gradients wait for optim_step
        self._broken: str | None = None
        self._stopped: str | None = None
        self._memory: dict[str, float] = {}

    # ---- answered at any time

    @ray.method(concurrency_group="control")
    def state(self) -> dict[str, Any]:
        """Where the learner stands; see `Learner.state`."""
        busy = self._busy
        return {
            "version": self._version,
            "busy": busy[0] if busy else None,
            "busy_since": busy[1] if busy else None,
            "last_update": self._last,
            "updates_in_tag": self._in_tag[1],
            "tag": self._in_tag[0],
            "torn": self._torn,
            "broken": self._broken,
            "pending": self._pending,
        }

    @ray.method(concurrency_group="control")
    def info(self) -> dict[str, Any]:
        """The model and settings that it was started with."""
        return {"model": self.model, "spec": self.spec, "run": self.run, **self._facts}

    @ray.method(concurrency_group="control")
    def memory(self) -> dict[str, float]:
        """``memory/rank-0/allocated_gib`` ... of the last call that was measured."""
        return self._memory

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int] | None:
        """(micro-batches that rank 0 has begun, micro-batches in all) of the call in progress; None when there is none."""
        if self._busy is None or not self._ranks:
            return None
        found: tuple[int, int] = self._wait("rank 0's progress", [self._ranks[0].progress.remote()], 10.0, SETTING)[0]
        return found

    @ray.method(concurrency_group="control")
    def stop(self, call: str) -> None:
        """Stop the update with this id before its first optimizer step; later it runs to its end."""
        self._stopped = call
        for handle in self._ranks:
            handle.stop.remote(call)

    # ---- one at a time

    def start(self) -> dict[str, Any]:
        """Start the ranks, join them and load the model. Returns facts about it."""
        spec, start = self.spec, time.monotonic()
        with self._doing("start"):
            self._ranks = [
                actors.spawn(
                    Rank,
                    f"rank-{i}",
                    actors.namespace(self.run),
                    i,
                    self.model["asked"],
                    spec,
                    cpus=spec.cpus_per_rank,
                    gpus=spec.gpus_per_rank,
                    seat=seat,
                    env=rank.environment(spec),
                )
                for i, seat in enumerate(self._seats)
            ]
            places = self._wait(
                "the ranks to start", [h.where.remote() for h in self._ranks], spec.start_timeout_s, "TrainSpec.start_timeout_s"
            )
            alone = len({node for node, _, _ in places} | {ray.get_runtime_context().get_node_id()}) == 1
            self._meeting = tempfile.TemporaryDirectory(prefix="rlkit-ranks-")  # NCCL's watchdog reads the ranks' file as long as they live
            address = os.path.join(self._meeting.name, "ranks") if alone else places[0][1:]
            calls = [h.connect.remote(address) for h in self._ranks]
            facts = self._wait("the ranks to load the model", calls, spec.start_timeout_s, "TrainSpec.start_timeout_s")
        files = {f["fingerprint"] for f in facts}
        if len(files) > 1:
            raise ModelError(f"The ranks' nodes hold different files under {self.model['asked']!r}: {', '.join(sorted(files))}.")
        self.model |= {"name": facts[0]["name"], "fingerprint": facts[0]["fingerprint"]}
        gpus = [f["gpu"] for f in facts if f["gpu"] is not None]
        nodes = [node for node, _, _ in places]
        self._facts = facts[0] | {
            "nodes": nodes,
            "gpus": gpus,
            "start_id": uuid.uuid4().hex,
            "start_seconds": time.monotonic() - start,
        }
        return self.info()

    def place(self, where: str) -> None:
        """Bring the ranks' states "on" their devices, the "parameters" only, or "off"; see `Rank.place`."""
        if self._broken is None:
            with self._doing("place"):
                self._call("place", lambda: [h.place.remote(where) for h in self._ranks])

    def update(self, call: str, job: Work, objective: Objective, tag: int | None) -> UpdateStats:
        """One update of the policy; see `Learner.update`."""
        start = time.monotonic()
        with self._doing("update", whole=True):
            if self._pending:
                raise LearnerError("Gradients of forward_backward are waiting: call optim_step() first, or discard() to drop them.")
            self._check_batch(job)
            jobs, facts = work.plan(job, objective, self._planned(), self._version)
            version = self._version
            try:
                parts = self._call("update", lambda: [h.update.remote(call, j) for h, j in zip(self._ranks, jobs, strict=True)], call)
            except RlkitError:
                if self._version != version:
                    self._torn = tag
                raise
            metrics = self._metrics(parts, facts, start)
            metrics["policy/grad_norm"] = float(np.mean(parts[0]["norms"]))
            metrics["update/skipped_steps"] = len(jobs[0].order) - parts[0]["steps"]
            return self._applied(metrics, start, tag, parts[0]["steps"])

    def forward_backward(self, call: str, job: Work, objective: Objective) -> dict[str, float]:
        """Add a batch's gradient to what is accumulated; see `Learner.forward_backward`."""
        start = time.monotonic()
        with self._doing("forward_backward", whole=True):
            self._check_batch(job)
            jobs, facts = work.plan(job, objective, self._planned(), self._version, steps=False)
            self._pending = False  # an error below drops what is accumulated
            parts = self._call(
                "forward_backward", lambda: [h.forward_backward.remote(call, j) for h, j in zip(self._ranks, jobs, strict=True)], call
            )
            self._pending = True
            return self._metrics(parts, facts, start)

    def optim_step(self, tag: int | None) -> UpdateStats:
        """Apply what is accumulated."""
        start = time.monotonic()
        with self._doing("optim_step", whole=True):
            if not self._pending:
                raise LearnerError("There is no gradient to apply: call forward_backward(batch) first.")
            self._pending = False
            parts = self._call("optim_step", lambda: [h.optim_step.remote() for h in self._ranks])
            metrics = work.combine(parts) | {"policy/grad_norm": float(np.mean(parts[0]["norms"]))}
            return self._applied(metrics, start, tag, 1)

    def discard(self) -> None:
        """Drop accumulated gradients."""
        with self._doing("discard", whole=True):
            self._call("discard", lambda: [h.discard.remote() for h in self._ranks])
            self._pending = False

    def logprobs(self, job: Work) -> list[Any]:
        """One reference to (N,) float32 a shard."""
        with self._doing("logprobs", whole=True):
            rows = packing.rows_of(job.shard_sizes, job.prompt_lengths, job.lengths)
            tokens_shard = np.bincount(rows.shard, weights=rows.totals, minlength=len(job.shards)).astype(np.int64)
            owned = packing.partition(tokens_shard, self.spec.world)  # whole shards, so that each rank writes whole arrays
            mine_R = [rows.take(np.flatnonzero(np.isin(rows.shard, own) & (rows.lengths > 0))) for own in owned]
            varlen = self._planned().packing == "varlen"
            micro_R = [packing.group(r.totals, self.spec.micro_batch_tokens, varlen) for r in mine_R]
            rounds = max(len(m) for m in micro_R)
            calls = []
            for handle, r, own, micro in zip(self._ranks, mine_R, owned, micro_R, strict=True):
                share = Share(r, np.zeros(len(r), np.float32), np.zeros(len(r)), tuple(micro), rounds)
                one = Job(job.shards, None, (share,), (0,), Objective(), job.temperature, False, job.policy_version, 0)
                calls.append((handle, one, own.tolist()))
            parts = self._call("logprobs", lambda: [h.logprobs.remote(j, own) for h, j, own in calls])
            found = {s: ref for part in parts for s, ref in part.items()}
            return [found[s] for s in range(len(job.shards))]

    def publish(self, dtype: str, transport: str = transfer.OBJECT_STORE) -> WeightManifest:
        """Put the weights where engines can take them."""
        with self._doing("publish", whole=True, place="parameters"):
            made = self._call("publish_weights", lambda: [h.publish.remote(self._version, dtype, transport) for h in self._ranks])
            manifest: WeightManifest = transfer.merge(made) if transport == transfer.IPC else made[0]
            return manifest

    @ray.method(concurrency_group="control")
    def endpoint(self) -> tuple[str, int]:
        """Where the NCCL group of rank 0 and the engines meets: an address and a free port on rank 0's node."""
        _, host, port = self._wait("rank 0's address", [self._ranks[0].where.remote()], 60.0, SETTING)[0]
        return str(host), int(port)

    def link(self, host: str, port: int, members: int) -> None:
        """Rank 0 forms an NCCL group with the engines' workers, which join at the same time."""
        with self._doing("link"):
            self._call("link", lambda: [self._ranks[0].link.remote(host, port, members)])

    def broadcast(self) -> None:
        """Rank 0 sends what was published to the group, while the engines load."""
        with self._doing("broadcast"):
            self._call("broadcast", lambda: [self._ranks[0].broadcast.remote()])

    def release(self) -> None:
        """Free published buckets that lie on GPUs."""
        with self._doing("release"):
            self._call("release", lambda: [h.release.remote() for h in self._ranks])

    def save(self, target: str) -> None:
        """Write a checkpoint."""
        with self._doing("save", whole=True):
            facts = {
                "version": self._version,
                "tag": self._in_tag[0],
                "updates_in_tag": self._in_tag[1],
                "model": {k: v for k, v in self.model.items() if k != "asked"},
                "spec": as_plain(self.spec),
                "run": self.run,
            }
            self._call("save", lambda: [h.save.remote(target, facts) for h in self._ranks])

    def load(self, source: str) -> int:
        """Read a checkpoint; returns the policy version."""
        with self._doing("load", whole=True):
            facts = self._call("load", lambda: [h.load.remote(source) for h in self._ranks])[0]
            self._version, self._steps = int(facts["version"]), int(facts["steps"])
            self._last, self._pending, self._torn = None, False, None
            self._in_tag = (facts["tag"], int(facts["updates_in_tag"]))
            return self._version

    def save_hf(self, target: str) -> None:
        """Write a directory that transformers loads."""
        with self._doing("save_hf", whole=True):
            self._call("save_hf", lambda: [h.save_hf.remote(target) for h in self._ranks])

    def parameters(self) -> dict[str, np.ndarray]:
        """Trained parameters in fp32, whole."""
        with self._doing("parameters", whole=True):
            out: dict[str, np.ndarray] = self._call("parameters", lambda: [h.parameters.remote() for h in self._ranks])[0]
            return out

    def end(self) -> None:
        """End the ranks."""
        actors.end(self._ranks)
        self._ranks = []

    # ---- inside

    @contextmanager
    def _doing(self, phase: str, whole: bool = False, place: str = "on") -> Iterator[None]:
        """Around a call. With ``whole`` the learner must be well, and its states are brought to ``place`` first."""
        if whole and self._broken is not None:
            raise LearnerError(
                f"The learner stopped after an error: {self._broken} Running the run.learner(...) cell again starts new ranks from "
                "the last checkpoint."
            )
        self._busy = (phase, time.time())
        try:
            if whole and self.spec.offload_between_turns:
                self._call("place", lambda: [h.place.remote(place) for h in self._ranks])
            yield
        finally:
            self._busy = None

    def _check_batch(self, job: Work) -> None:
        if job.run is not None and job.run != self.run:
            raise BatchError(f"The batch was sampled in run {job.run!r}; this learner belongs to run {self.run!r}.")
        lag = self._version - job.policy_version
        if lag < 0:
            raise BatchError(
                f"The batch was sampled by policy version {job.policy_version}, the learner is at {self._version}: it comes from before a "
                "checkpoint was loaded. Run sampler.sync(learner) and roll out again."
            )
        if lag > self.spec.max_lag:
            raise StaleBatchError(
                f"The batch was sampled by policy version {job.policy_version} and the learner is at {self._version}: {lag} behind, "
                f"max_lag allows {self.spec.max_lag}. Run sampler.sync(learner) and roll out again, or raise max_lag to train off-policy."
            )

    def _call(self, what: str, calls: Callable[[], Sequence[Any]], call: str | None = None) -> list[Any]:
        """Call every rank. Errors that the ranks agreed on leave the learner usable; anything else ends it."""
        refs = calls()
        if call is not None and self._stopped == call:
            self.stop(call)  # the interrupt came before the ranks knew the call
        try:
            found = self._wait(f"learner.{what}", refs, self.spec.update_timeout_s, SETTING)
            if what in MEASURED:
                held = self._wait("the ranks' memory", [h.memory.remote() for h in self._ranks], 60.0, SETTING)
                self._memory = {k: v for i, one in enumerate(held) for k, v in memory.named(f"rank-{i}", one).items()}
            return found
        except OutOfMemoryError as error:
            if self.spec.world == 1 or what == "place":
                self._count_partial()
                raise
            self._break(f"OutOfMemoryError: {error}")  # the others may be waiting for this rank in a collective
            raise OutOfMemoryError(
                f"{error} The ranks were ended, since they cannot go on without each other; running the run.learner(...) cell again starts "
                "new ones from the last checkpoint."
            ) from error
        except (DeadlineError, ActorDiedError) as error:
            self._break(f"{type(error).__name__}: {error}")
            raise
        except RlkitError as error:
            # A loss may fail in a later optimizer step of an update: then the parameters are no longer those of this version.
            applied = self._count_partial()
            if applied == 0:
                raise
            raise type(error)(
                f"{error}\n{applied} optimizer step{'s' * (applied > 1)} of it had been applied before: the learner is at policy version "
                f"{self._version}. Go on from there after sampler.sync(learner), or back to a checkpoint with learner.load."
            ) from error
        except ray.exceptions.RayTaskError as error:
            self._break(f"{type(error.cause).__name__ if error.cause else 'error'}: {error.cause}")
            raise LearnerError(f"learner.{what} failed and the ranks were ended: {self._broken}") from error

    def _count_partial(self) -> int:
        """After an error: how many optimizer steps of the call were applied. Any makes another policy version."""
        steps = int(self._wait("the ranks' steps", [self._ranks[0].steps.remote()], 60.0, SETTING)[0])
        applied, self._steps = steps - self._steps, steps
        self._version += applied > 0
        return applied

    def _break(self, why: str) -> None:
        self._broken = why
        actors.end(self._ranks)

    def _wait(self, what: str, refs: Sequence[Any], timeout_s: float, setting: str) -> list[Any]:
        return actors.wait(refs, what=what, timeout_s=timeout_s, setting=setting)

    def _planned(self) -> TrainSpec:
        """The settings that micro-batches are made by: with the packing that the model takes."""
        return self.spec.but(packing=self._facts["packing"])

    def _metrics(self, parts: list[dict[str, Any]], facts: dict[str, float], start: float) -> dict[str, float]:
        metrics = work.combine(parts) | facts
        metrics["update/tokens_per_second"] = facts["update/tokens"] / max(1e-9, time.monotonic() - start)
        return metrics

    def _applied(self, metrics: dict[str, float], start: float, tag: int | None, steps: int) -> UpdateStats:
        """Count the update. Only assignments: nothing here can fail half-way."""
        stats = UpdateStats(self._version + 1, metrics, time.monotonic() - start)
        if tag is not None:  # an update made by hand, outside of a step, is none of the step's
            self._in_tag = (tag, self._in_tag[1] + 1 if self._in_tag[0] == tag else 1)
        self._version, self._steps = self._version + 1, self._steps + steps
        self._last = {"tag": tag, "version": self._version, "stats": stats}
        return stats
