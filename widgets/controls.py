"""`RunControls`: stop, pause, single step and checkpoint a run that loops, here or in another kernel; and what it is doing."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rlkit.widgets.panel import Panel
from rlkit.widgets.picture import Drawing, duration, frame, text

SAID = {
    "stop": "The loop ends after this step.",
    "pause": "The loop pauses after this step.",
    "resume": "The loop goes on.",
    "step": "One step, then a pause.",
    "checkpoint": "A checkpoint will be written after this step.",
}


class RunControls(Panel):
    """Buttons that act at the loop's next step boundary, and the run's state in words."""

    kind: ClassVar[str] = "controls"
    title: ClassVar[str] = "Controls"

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Do what a button asks for.

        Raises:
            RunError: the run is not alive, or no loop of it is running.
        """
        verb = ask.get("verb")
        if not isinstance(verb, str) or verb not in SAID:
            return {"error": f"There is no control {verb!r}."}
        self.watched.source.control(verb)
        return {"said": SAID[verb]}

    def drawings(self) -> list[Drawing]:
        words = self.words()
        return [frame([text(8, 17, f"{self.watched.name}: {words}", size=11)], f"{self.watched.name}: {words}", 600, 26)]

    def words(self) -> str:
        """The run's state, as it was when it was last read."""
        state, stale = self.watched.state, self.watched.stale
        done = f"{max(state['committed'], int(self.watched.steps['step'][-1]) if len(self.watched.steps) else -1) + 1} steps complete"
        if stale is not None:
            return f"{done}, cannot be read; last read {duration(stale)} ago"
        if not state["live"]:
            unknown = state["control"] == "unknown"
            return f"{done}, {'read from its folder, which does not say whether it runs' if unknown else 'not running'}"
        words = [done, state["control"] if state.get("looping") or state["control"] == "stopped" else "no loop is running"]
        if state["phase"]:
            since = state.get("phase_since")
            words.append(state["phase"] + (f" for {duration((state.get('now') or time.time()) - since)}" if since else ""))
        if state.get("waiting_for"):
            words.append(f"waiting for {state['waiting_for']}")
        return ", ".join(words)

    def text(self) -> str:
        return f"RunControls({self.watched.name!r}: {self.words()})"
