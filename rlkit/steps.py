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
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlkit.errors import DeadlineError
from rlkit.types import Scored, UpdateStats, require

if TYPE_CHECKING:
    from rlkit.run import Run

IDLE_POLL_S = 0.1


class Steps:
    """Iterates over the steps still to do. One loop over a run at a time."""

    def __init__(self, run: Run, n: int, progress: bool) -> None:
        self.run, self.n, self.progress = run, n, progress

    def __iter__(self) -> Iterator[int]:
        run = self.run
        run.ledger.check()
        recover(run)
        bar = tqdm(total=self.n, initial=min(run.committed + 1, self.n), disable=not self.progress, file=sys.stdout, mininterval=1.0,
                   desc=run.name, unit="step", ncols=100)  # fmt: skip
        try:
            while (step := run.committed + 1) < self.n:
                learner = run._parts.get("learner")
                run.begin(step, learner.version if learner is not None else None)
                yield step
                if run.committed < step:
                    # The cell did not call run.log: the step still counts, with what its phases measured.
                    run.commit(step, {})
                bar.set_postfix_str(headline(run), refresh=False)
                bar.update(1)
        finally:
            run.step = None
            bar.close()

    async def __aiter__(self) -> AsyncIterator[int]:
        for step in self:
            yield step
            await asyncio.sleep(0)  # lets the kernel handle what came in meanwhile, such as a button

    def __len__(self) -> int:
        return max(0, self.n - self.run.committed - 1)


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
            print(f"Waiting for the learner of run {name!r}, which is still busy with {state['busy']} from before.", flush=True)
            told = True
        time.sleep(IDLE_POLL_S)


def check_logged(scored: Any, stats: Any) -> None:
    """Refuse values of another stage in `Run.log`.

    Raises:
        BatchError: ``scored`` is not a Scored, or ``stats`` not an UpdateStats.
    """
    if scored is not None:
        require(scored, Scored, "run.log(step, scored, stats)", "rlkit.score(rollouts, reward)")
    if stats is not None:
        require(stats, UpdateStats, "run.log(step, scored, stats)", "learner.update(batch)")
