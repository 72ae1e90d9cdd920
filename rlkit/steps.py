"""The iterator behind ``for step in run.steps(n)``, and what happens to a step that was left unfinished.

A step is complete when `Run.log` has recorded it. If a kernel was killed or a cell interrupted before that, the learner may or may not
have applied the step's update; it says which. Then one of three things is done before the next step begins:

- nothing was applied: the step is done again, with the same prompts and the same sampling seeds;
- the step's update was applied: the step is completed from what the event log and the learner know of it, the engines get the new weights;
- only some of its updates were applied (a loop with several updates a step), or some optimizer steps of one that failed: learner and run go
  back to the newest checkpoint; without one an error says what can be done, and changes nothing.

In all three the parameters afterwards are those of an uninterrupted run. Updates made by hand between two loops are kept and belong to
no step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.background import current, say
from rlkit.errors import DeadlineError, RunError
from rlkit.eventlog import is_number
from rlkit.progress import Progress
from rlkit.types import Scored, UpdateStats, require

if TYPE_CHECKING:
    from rlkit.run import Run

TAKEN = ("step", "t", "policy_version")  # columns of `Run.metrics` that are no metrics
IDLE_POLL_S = 0.1
PAUSE_POLL_S = 0.2


class Steps:
    """Iterates over the steps still to do. One loop over a run at a time; what `Run.stop`, `Run.pause` and so on ask for is done here."""

    def __init__(self, run: Run, n: int, progress: bool) -> None:
        self.run, self.n, self.progress = run, n, progress

    def __iter__(self) -> Iterator[int]:
        for step in self._walk(None):
            if step is None:
                time.sleep(PAUSE_POLL_S)
            else:
                yield step

    async def __aiter__(self) -> AsyncIterator[int]:
        for step in self._walk(asyncio.current_task()):
            if step is None:
                await asyncio.sleep(PAUSE_POLL_S)
            else:
                yield step
                await asyncio.sleep(0)  # lets the kernel handle what came in meanwhile, such as a button

    def __len__(self) -> int:
        return max(0, self.n - self.run.committed - 1)

    def _walk(self, task: asyncio.Task[Any] | None) -> Iterator[int | None]:
        """The steps to do; None while the loop is paused, after which the caller lets a moment pass."""
        run = self.run
        run.ledger.check()
        me = Loop(threading.current_thread(), task)
        if run._loop is not None and run._loop.goes_on(me):
            raise RunError(f"{run._loop.where(run.name)} Stop it first with run.stop(), or wait for its end.")
        run._loop, background = me, current()
        recover(run)
        run.start_monitors()
        first = min(run.committed + 1, self.n)
        shown = Progress(run.name, self.n, "step", show=self.progress, lasting=True, done=first)
        run.quiet, run.shown = not self.progress, shown if self.progress else None
        whole = False
        run.ledger.call("loop", run.ledger.epoch, self.n)
        try:
            while True:
                at = run.ledger.call("boundary", run.ledger.epoch)
                step = at["committed"] + 1
                if at["checkpoint"]:
                    run.checkpoint() if run.part("learner") is not None else run.note("There is no learner in this run to checkpoint.")
                if step >= self.n or at["act"] == "stop" or (background is not None and background.stopping):
                    whole = step >= self.n
                    break
                if at["act"] == "wait":
                    yield None
                    continue
                learner = run._parts.get("learner")
                run.begin(step, learner.version if learner is not None else None)
                yield step
                if run._loop is not me:
                    raise RunError(f"Another loop over run {run.name!r} was started inside this one, which ends here.")
                if run.committed < step:
                    # The cell did not call run.log: the step still counts, with what its phases measured.
                    run.commit(step, {})
                shown(step + 1, headline(run))
        finally:
            if run._loop is me:
                run.step = run._loop = None
                run.ledger.tell("loop", run.ledger.epoch, None)
                run.quiet, run.shown = False, None
            shown.close(whole=whole)


@dataclass(frozen=True)
class Loop:
    """Where a loop over a run's steps goes on in this process."""

    thread: threading.Thread
    task: asyncio.Task[Any] | None

    def goes_on(self, other: Loop) -> bool:
        """Whether this loop is surely still going on beside ``other``. A plain ``for`` that an error ended may be kept by a traceback, so
        one of the same thread gives way."""
        if self.task is not None:
            return not self.task.done() and self.task is not other.task
        return self.thread is not other.thread and self.thread.is_alive() and self.thread is not threading.main_thread()

    def where(self, name: str) -> str:
        place = "an async loop" if self.task is not None else f"a loop in thread {self.thread.name!r}"
        return f"Run {name!r} is driven by {place} of this kernel already."


def headline(run: Run) -> str:
    """The last step's reward and length, for the progress bar."""
    last = run.ledger.status()["last"]
    shown = {"reward/mean": "reward", "length/mean": "length"}
    return ", ".join(f"{label} {last['metrics'][key]:.2f}" for key, label in shown.items() if key in last["metrics"]) if last else ""


def recover(run: Run) -> None:
    """Bring the run to the boundary between two steps; see the module's docstring."""
    learner = run._parts.get("learner")
    run.step = None
    if learner is None:
        return
    state = idle(learner, run.name)
    if state["pending"]:
        learner.discard()  # gradients of a step that did not come to its optim_step
    status = run.ledger.status()
    step, begun, last = status["committed"] + 1, status["begun"], status["last"]
    # Updates made by hand since then carry another tag: they are kept, and are none of the step's.
    applied = state["updates_in_tag"] if begun is not None and state["version"] > begun and state["tag"] == step else 0
    torn = begun is not None and state["torn"] == step  # an update failed after some of its optimizer steps
    if applied > 0 or torn:
        # How many updates make a step: as many as the step before had; the first step is taken to have one.
        expected = last["updates"] if last is not None and last["updates"] else 1
        update = state["last_update"]
        if applied == expected and update is not None and not torn:
            metrics: dict[str, float] = {}
            positions: dict[str, Any] = {}
            for phase in run.ledger.call("phases", step):
                metrics |= phase.get("metrics", {}) | {f"time/{phase['phase']}": phase["seconds"]}
                positions = phase["positions"]
            stats = update["stats"].metrics if update["tag"] == step else {}
            run.commit(step, metrics | dict(stats), recovered=positions, updates=applied)
            run.note(f"Step {step} had been applied before it was interrupted; it is complete, its samples were not kept.")
        else:
            left = "an update applied in part" if torn else f"{applied} of {expected} updates"
            run.note(f"Step {step} was left with {left}; going back to the last checkpoint.")
            run.restore()
    run._align()


def idle(learner: Any, name: str) -> dict[str, Any]:
    """The learner's state once it works on nothing; says what is waited for.

    Raises:
        DeadlineError: it was still busy after ``update_timeout_s``.
    """
    start, told = time.monotonic(), False
    while True:
        state: dict[str, Any] = learner.state()
        if not state["busy"]:
            return state
        waited = time.monotonic() - start
        if waited > learner.spec.update_timeout_s:
            raise DeadlineError(
                f"The learner of run {name!r} was still busy with {state['busy']} after {waited:.0f} s; raise update_timeout_s, or end the "
                f"run with rlkit kill {name}."
            )
        if not told and waited > 1.0:
            say(f"Waiting for the learner of run {name!r}, which is still busy with {state['busy']} from before.")
            told = True
        time.sleep(IDLE_POLL_S)


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse metrics of one's own that the log cannot take.

    Raises:
        RunError: a name that `Run.metrics` has for something else, or a value that is no number.
    """
    for name, value in extra.items():
        if name in TAKEN:
            raise RunError(f"run.log(..., {name}=...): {name!r} is a column that every step has; give the metric another name.")
        number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        if not is_number(number):
            raise RunError(f"run.log(..., {name}={str(value)[:60]!r}): a metric is a number that a float holds.")


def check_logged(scored: Any, stats: Any) -> None:
    """Refuse values of another stage in `Run.log`.

    Raises:
        BatchError: ``scored`` is not a Scored, or ``stats`` not an UpdateStats.
    """
    if scored is not None:
        require(scored, Scored, "run.log(step, scored, stats)", "rlkit.score(rollouts, reward)")
    if stats is not None:
        require(stats, UpdateStats, "run.log(step, scored, stats)", "learner.update(batch)")
