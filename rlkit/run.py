"""A run: its parts on the cluster, its event log, its steps, its checkpoints.

    run = rl.Run("quickstart", cluster, seed=0)      # resumes when it exists
    sampler, learner = run.sampler("tiny"), run.learner("tiny", zero_stage=2, lr=1e-4)
    for step in run.steps(40):
        ...
        run.log(step, scored, stats)

Parts are detached actors, so they outlive the kernel; `attach` finds a live run from a fresh one. `Run.close` ends them all.
"""

from __future__ import annotations

import atexit
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import actors, checkpoints, memory, seats
from rlkit.context import Stateful
from rlkit.errors import ConfigError, RunError, SpecChangedError
from rlkit.eventlog import samples_file
from rlkit.ledger import Ledger
from rlkit.parts import Parts
from rlkit.placement import Placement, measured_of
from rlkit.reprs import Shown
from rlkit.types import Batch, Scored, UpdateStats

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.background import Background
    from rlkit.cluster import Cluster
    from rlkit.steps import Loop, Steps

_open: dict[str, Run] = {}


class Run(Shown, Parts):
    """A named run on a cluster. Making the same run twice in one kernel gives the same object.

    Args:
        name: letters, digits, ``-``, ``_`` and ``.``; the folder under the cluster's ``storage`` and the Ray namespace.
        cluster: from `rlkit.connect`.
        seed: of everything random in the run.
        resume: True goes on with an existing run of this name; False sets its folder aside under a new name and starts afresh.
        checkpoint_every: steps between checkpoints; 0 writes none.
        keep: how many checkpoints stay on disk.
        takeover: drive the run even though another kernel still does; that kernel's next step fails.
        drive: False only looks at first, and takes the lease when something is to be changed.
        monitor: False starts no monitors (one small actor a node); the run then has no curves of GPUs and nodes.

    Raises:
        ConfigError: an argument of the wrong kind.
        RunBusyError: another kernel drives this run.
        SpecChangedError: the run exists with another seed.
    """

    def __new__(cls, name: str, cluster: Any = None, **options: Any) -> Run:
        found = _open.get(name)
        return found if found is not None and options.get("resume", True) and found._is_on(cluster) else super().__new__(cls)

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        *,
        seed: int = 0,
        resume: bool = True,
        checkpoint_every: int = 0,
        keep: int = 3,
        takeover: bool = False,
        drive: bool = True,
        monitor: bool = True,
    ) -> None:
        checkpoints.check_name(name)
        _check_arguments(cluster, seed, checkpoint_every, keep)
        if not hasattr(self, "ledger"):
            super().__init__(name, seed, cluster)
            self._stateful: dict[str, Stateful] = {}
            self._phases: list[dict[str, Any]] = []
            self._background: Background | None = None
            self._loop: Loop | None = None  # the loop over `steps` in this process
            self._doing: list[dict[str, Any]] = []  # the phases in progress, outermost first
            self._samples_pending: list[Any] = []
            self._events: list[dict[str, Any]] = []
            self._reading = threading.Lock()
            self._start_positions: dict[str, Any] = {}
            self._closed = True
        self.checkpoint_every, self.keep, self.monitor = checkpoint_every, keep, monitor
        if self._closed or not self._alive():
            self.ledger = Ledger(name, self.namespace, cluster, seed, fresh=not resume)
            self._closed = False
        status = self.ledger.status()
        if status["seed"] != seed:
            raise SpecChangedError(
                f"Run {name!r} exists with seed {status['seed']}, not {seed}. Ask for that seed, choose another name, or start afresh "
                f"with resume=False (the old run's folder is kept under a new name)."
            )
        self.folder = Path(status["folder"])
        if drive or takeover:
            self.ledger.acquire(takeover)
        _open[name] = self

    # --- the loop --------------------------------------------------------------------------------------------------------------------

    def steps(self, n: int, *, checkpoint_every: int | None = None, progress: bool = True) -> Steps:
        """Iterate until ``n`` steps of the run are complete in all (a finished run yields nothing). Also ``async for``.

        A step that an interrupt or a killed kernel left unfinished is first finished, or undone and done again; see `rlkit.steps`.
        """
        from rlkit.steps import Steps

        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise RunError(f"run.steps({n!r}): the number of steps must be a whole number, 0 or more.")
        if checkpoint_every is not None:
            self.checkpoint_every = checkpoint_every
        return Steps(self, n, progress)

    def start(self, loop: Callable[[Run], Any]) -> Background:
        """Run ``loop(run)`` in a thread, which keeps the kernel free for buttons and other cells. rlkit prints nothing from there.

        ``loop`` is a function with the `for step in run.steps(n)` in it. The handle says how it went: ``.done``, ``.result(timeout)``
        (its value, or its error raised), ``.stop()``.

        Raises:
            RunError: ``loop`` is not a function of the run, or a loop over this run goes on already.
        """
        from rlkit.background import start

        return start(self, loop)

    # --- from any kernel: the loop acts between two steps; see `rlkit.live`. All raise RunError when no loop is running ---------------

    def stop(self) -> str:
        """End the loop after its current step. Returns its state in a word, as the others do."""
        return self.control("stop")

    def pause(self) -> str:
        """Let the loop wait after its current step, until `resume` or `stop`."""
        return self.control("pause")

    def resume(self) -> str:
        return self.control("resume")

    def single_step(self) -> str:
        """Let a paused loop do one step and pause again; one that runs pauses after the current step."""
        return self.control("step")

    def checkpoint_soon(self) -> str:
        """Let the loop write a checkpoint after its current step."""
        return self.control("checkpoint")

    def control(self, verb: str) -> str:
        """Ask the loop for one of `rlkit.live.VERBS`."""
        if self._closed:
            raise RunError(f"Run {self.name!r} was closed: there is no loop to {verb}.")
        answer: str = self.ledger.call("control", verb)
        return answer

    def log(self, step: int, scored: Scored | Batch | None = None, stats: UpdateStats | None = None, **extra: float) -> None:
        """Complete ``step``: its metrics go into the event log, its samples to Parquet, and a due checkpoint is written.

        Raises:
            RunError: ``step`` was logged already or is out of order; ``extra`` has a name that is taken, or a value that is no number.
            BatchError: ``scored`` or ``stats`` are of another stage of the loop.
        """
        from rlkit.steps import check_extra, check_logged

        if not isinstance(step, int) or isinstance(step, bool):
            raise RunError(f"run.log({step!r}, ...): the first argument is the step, as run.steps(...) gives it.")
        batch = scored if isinstance(scored, Batch) else None
        scored = scored.scored if isinstance(scored, Batch) else scored
        check_logged(scored, stats)
        check_extra(extra)
        metrics: dict[str, float] = {}
        for part in (scored, batch):
            metrics |= part.summary() if part is not None else {}
        metrics |= dict(stats.metrics) if stats is not None else {}
        self.commit(step, metrics | extra, scored, batch)

    def commit(
        self,
        step: int,
        metrics: Mapping[str, float],
        scored: Scored | None = None,
        batch: Batch | None = None,
        recovered: Mapping[str, Any] | None = None,
        updates: int | None = None,
    ) -> None:
        """Record that ``step`` is complete. `log` is the call for a notebook; this one takes bare metrics.

        ``recovered`` holds the data positions of a step that another kernel worked on, ``updates`` how many updates it made.
        """
        self.ledger.check()
        learner = self._parts.get("learner")
        version = learner.version if learner is not None else None
        status = self.ledger.status()
        begun = status["begun"]
        times: dict[str, float] = {}
        for phase in self._phases:
            if phase.get("step") == step:
                times[f"time/{phase['phase']}"] = times.get(f"time/{phase['phase']}", 0.0) + phase["seconds"]
        event = {
            "step": step,
            "version": version,
            "updates": updates if updates is not None or version is None or begun is None else version - begun,
            "metrics": dict(metrics) | times | memory.step_metrics(p for p in self._phases if p.get("step") == step),
            "positions": self._positions() if recovered is None else recovered,
            "recovered": recovered is not None,
        }
        self._phases = []
        self.ledger.call("commit", self.ledger.epoch, event)
        if scored is not None:
            self._write_samples(step, scored, batch)
        if learner is not None and self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            self.checkpoint()
        if self.step == step:
            self.step = None

    def _positions(self) -> dict[str, Any]:
        return {key: thing.state() for key, thing in self._stateful.items()}

    def _write_samples(self, step: int, scored: Scored, batch: Batch | None) -> None:
        """Start writing in the recorder; a failure of an earlier write is raised here."""
        import ray

        done, self._samples_pending = (
            ray.wait(self._samples_pending, num_returns=len(self._samples_pending), timeout=0) if (self._samples_pending) else ([], [])
        )
        for ref in done:
            actors.get(ref, "writing samples")
        ref = self.ledger.recorder.write_samples.remote(
            step, list(scored.rollouts.shards), list(scored.shards), None if batch is None else batch.advantages
        )
        self._samples_pending.append(ref)

    # --- what the run knows ----------------------------------------------------------------------------------------------------------

    @property
    def events(self) -> list[dict[str, Any]]:
        """The whole event log, fetched incrementally."""
        with self._reading:
            self._events += self.ledger.call("read", len(self._events))
        return self._events

    def placement(self, model: str | None = None) -> Placement:
        return replace(super().placement(model), measured=measured_of(self.events))

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a complete step, one column a metric, indexed by step. A value that was not finite is NaN."""
        import pandas as pd

        from rlkit.eventlog import History

        history = History()
        for event in self.events:
            history.add(event)
        rows = [
            {"step": step, "policy_version": event["version"], "t": event["t"]}
            | {name: math.nan if value is None else value for name, value in event["metrics"].items()}
            for step, event in sorted(history.steps.items())
        ]
        return pd.DataFrame(rows or None, columns=None if rows else ["step"]).set_index("step")

    def samples(self, step: int) -> pd.DataFrame:
        """The samples of a step, from its Parquet file (which must be readable from here)."""
        import pandas as pd

        self._flush_samples()
        path = samples_file(self.folder, step)
        if not path.exists():
            raise RunError(f"No samples of step {step} at {path}: it was not logged with scored rollouts, or lies on another machine.")
        return pd.read_parquet(path)

    # --- the owner's hooks -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        name, before = f"{self._within}{name}", self._doing
        now: dict[str, Any] = {"phase": name, "step": self.step, "since": time.time()}
        self.ledger.check([*before, now])
        self._doing = [*before, now]
        try:
            with super().phase(name) as facts:
                facts["t_start"] = now["since"]
                yield facts
        except BaseException:
            self.ledger.tell("renew", self.ledger.epoch, before)
            raise
        finally:
            self._doing = before
        event = {"kind": "phase", "phase": name, "step": self.step} | facts
        if self.step is not None:
            event["positions"] = self._positions()
        self._phases.append(event)
        self.ledger.send(event)

    def report(self, progress: dict[str, Any]) -> None:
        if self._doing:
            self.ledger.tell("progress", self.ledger.epoch, self._doing[-1]["since"], progress)

    def register_stateful(self, key: str, thing: Stateful) -> None:
        if self._stateful.get(key) is thing:
            return
        self._stateful[key] = thing
        saved = self.ledger.call("positions", self.committed).get(key)
        if saved is not None:
            thing.load_state(saved)
        self._start_positions[key] = thing.state()

    def begin(self, step: int, version: int | None) -> None:
        """Start ``step``: seeds and data positions are set to what they were at the end of the step before."""
        positions = self.ledger.call("positions", step - 1) if step else {}
        for key, thing in self._stateful.items():
            saved = positions.get(key, self._start_positions.get(key))
            if saved is not None:
                thing.load_state(saved)
        self._phases = []
        self.ledger.call("begin", self.ledger.epoch, step, version)
        self.step = step
        self._calls = itertools.count()

    # --- the end ---------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every actor of the run. Logs, samples and checkpoints stay on disk; the run can be resumed from its last checkpoint.

        Raises:
            RunError: a loop of `start` goes on, or, once all has ended, the last of the run could not be written.
        """
        if self._background is not None and not self._background.done and self._background.thread is not threading.current_thread():
            raise RunError(
                f"A loop over run {self.name!r} goes on in a thread: end it with run.stop() and its .result() before run.close()."
            )
        if alive := self._alive():
            self.ledger.check()
        try:
            if alive:
                self._flush_samples()
                self.ledger.append({"kind": "close"})
                self.ledger.call("flush")
        finally:
            self.ledger.stop()
            self._closed = True
            self._end("")
            seats.release(self.namespace)
            self._parts.clear()
            self.step = None
            _open.pop(self.name, None)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {handle!r}" for name, handle in self._parts.items()) or "no parts yet"
        return f"Run({self.name!r}, seed {self.seed}, {parts}, {self.folder})"

    def _alive(self) -> bool:
        return actors.find("recorder", self.namespace) is not None

    def _is_on(self, cluster: Any) -> bool:
        return cluster is None or self.cluster is cluster

    def _flush_samples(self) -> None:
        pending, self._samples_pending = self._samples_pending, []
        actors.wait(pending, what="samples to be written", timeout_s=600, setting="nothing: this limit is fixed")


def _check_arguments(cluster: Any, seed: Any, checkpoint_every: Any, keep: Any) -> None:
    """Raises:
    ConfigError: see `Run`.
    """
    from rlkit.cluster import Cluster

    if not isinstance(cluster, Cluster):
        raise ConfigError(f"rlkit.Run(name, cluster): the cluster is {cluster!r}; it must be what rlkit.connect(...) returned.")
    for what, value, least in (("seed", seed, 0), ("checkpoint_every", checkpoint_every, 0), ("keep", keep, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"rlkit.Run(..., {what}={value!r}): it must be a whole number of at least {least}.")


@atexit.register
def _release_all() -> None:
    """A kernel that ends in good order gives its leases back, so that the next one need not wait for them to run out."""
    import sys

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    for run in list(_open.values()):
        with suppress(ray.exceptions.RayError):  # the cluster may be gone already, and then so is the lease
            run.ledger.release()
