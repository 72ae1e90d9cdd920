"""What a run is doing now and what was asked of its loop. The recorder keeps it in memory: it is no part of the event log.

A kernel that drives a run says which phase begins, in calls that it makes anyway. Any kernel may ask the loop for something with one of
`VERBS`; the loop learns of it at its next step boundary:

    run      "pause"  -> pausing -> paused       the loop waits at the boundary, and the kernel can be interrupted there
    paused   "step"   -> one step, then paused   while it runs, "step" is the same as "pause": the current step is the one
    paused   "resume" -> run
    any      "stop"   -> stopping -> stopped     the loop ends after the current step, as if it had been asked for fewer steps
    any      "checkpoint"                        one is written at the next boundary

What was asked for ends with the loop that it was asked of.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.errors import RunError

VERBS = ("stop", "pause", "resume", "step", "checkpoint")


class Live:
    """Phases in progress and the loop's controls. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._phases: list[dict[str, Any]] = []  # outermost first: {"phase", "step", "since"}
        self._progress: dict[str, Any] | None = None  # of the innermost phase: {"done", "total", "unit", "left_s"}
        self._loop: int | None = None  # lease epoch of the kernel whose loop runs
        self._total: int | None = None  # steps that the loop was asked for
        self._step: int | None = None
        self._wish = "run"  # "run" | "pause" | "stop"
        self._waiting_since: float | None = None  # the loop waits at a boundary, paused
        self._allowed = 0  # single steps that were asked for while it waited
        self._checkpoint = False
        self._stopped = False

    # --- from the kernel that drives ---------------------------------------------------------------------------------------------------

    def doing(self, phases: Sequence[Mapping[str, Any]]) -> None:
        """The phases that are in progress from now on, outermost first."""
        with self._lock:
            self._phases = [dict(p) for p in phases]
            self._progress = None

    def ended(self, since: float | None) -> None:
        """The innermost phase ended, if it is the one that began at ``since``; the news of it may come after that of the next one."""
        with self._lock:
            if self._phases and self._phases[-1]["since"] == since:
                self._phases.pop()
                self._progress = None

    def progress(self, since: float | None, facts: Mapping[str, Any]) -> None:
        """How far the innermost phase is."""
        with self._lock:
            if self._phases and self._phases[-1]["since"] == since:
                self._progress = dict(facts)

    def loop(self, epoch: int, total: int | None) -> None:
        """A loop over ``total`` steps begins; None: it ended."""
        with self._lock:
            if total is None and epoch != self._loop:
                return
            self._stopped = total is None and self._wish == "stop"
            self._loop, self._total = (None, None) if total is None else (epoch, total)
            self._wish, self._waiting_since, self._allowed, self._checkpoint, self._step = "run", None, 0, False, None
            self._phases, self._progress = [], None

    def step(self, step: int | None) -> None:
        """The step that is being worked on; None between two."""
        with self._lock:
            self._step = step

    def boundary(self, committed: int, now: float) -> dict[str, Any]:
        """What the loop is to do between two steps: ``act`` "go", "wait" or "stop", and whether to write a ``checkpoint`` first."""
        with self._lock:
            checkpoint = self._checkpoint and committed >= 0  # before the first step there is nothing to write
            self._checkpoint = self._checkpoint and not checkpoint
            if self._wish == "stop":
                act = "stop"
            elif self._wish == "pause" and self._allowed == 0:
                act = "wait"
            else:
                act, self._allowed = "go", 0
            self._waiting_since = (self._waiting_since or now) if act == "wait" else None
            return {"act": act, "checkpoint": checkpoint}

    # --- from any kernel -----------------------------------------------------------------------------------------------------------------

    def ask(self, verb: str, running: bool) -> str:
        """Ask the loop for something; returns the loop's state in a word.

        Raises:
            RunError: no such verb, or no loop is running.
        """
        if verb not in VERBS:
            raise RunError(f"There is no control {verb!r}; there are {', '.join(VERBS)}.")
        with self._lock:
            if self._loop is None or not running:
                raise RunError(
                    f"No loop over run {self.name!r} is running; nothing to {verb}. Controls act on a `for step in run.steps(n)`, "
                    f"an `async for` over it, or run.start(loop), between two steps."
                )
            if self._wish == "stop" and verb not in ("stop", "checkpoint"):
                raise RunError(f"The loop over run {self.name!r} was asked to stop and ends after its current step; it cannot {verb} now.")
            if verb == "checkpoint":
                self._checkpoint = True
            elif verb == "step":
                self._wish, self._allowed = "pause", int(self._waiting_since is not None)
            else:
                self._wish = {"stop": "stop", "pause": "pause", "resume": "run"}[verb]
                self._allowed = 0
            return self._word()

    def state(self, running: bool) -> dict[str, Any]:
        """Everything that a view shows. ``running``: whether the kernel that drives is there."""
        with self._lock:
            looping = running and self._loop is not None
            return {
                "phases": [dict(p) for p in self._phases] if running else [],
                "progress": dict(self._progress) if running and self._progress is not None else None,
                "step": self._step if running else None,
                "total": self._total if looping else None,
                "looping": looping,
                "waiting_since": self._waiting_since if looping else None,
                "checkpoint": looping and self._checkpoint,
                "control": self._word() if looping else ("stopped" if self._stopped else "run"),
            }

    def _word(self) -> str:
        if self._wish == "stop":
            return "stopping"
        if self._wish == "pause":
            return "paused" if self._waiting_since is not None and self._allowed == 0 else "pausing"
        return "run"
