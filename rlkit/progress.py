"""Progress with the time that is left: in a notebook, in a terminal, and as plain lines in a log.

    notebook   one output below the cell, changed in place; what it says last is what a saved notebook shows
    terminal   one line on stderr, rewritten
    log        a line on stderr every `LOG_S` and one at the end

Nothing is shown of what ends within `SHOW_AFTER_S`, and no bar before there is something to show in it. What a loop over a run's steps goes
through is said on the loop's line. Beside that the run's recorder is told, for whoever watches.
"""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlkit import background
from rlkit.reprs import duration

if TYPE_CHECKING:
    from rlkit.context import Owner

SHOW_AFTER_S = 1.0
REDRAW_S = 0.3
LOG_S = 15.0
TELL_S = 1.0
ASK_S = 0.5
WIDTH = 100  # of a terminal's line


class Progress:
    """How far something is. ``total`` None: it cannot be counted, and the time left is guessed from how long it took last, ``usual_s``.

    Call it often; it shows what is due. `close` leaves a last line where anything was shown, or where ``lasting``.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        *,
        show: bool = True,
        lasting: bool = False,
        done: int = 0,
        usual_s: float | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self._first = self._done = done
        self._usual, self._owner, self._lasting = usual_s, owner, lasting
        self._begun = self._moved = time.monotonic()
        self._told = self._begun
        self._note = self._inside = ""
        self._outer = owner.shown if owner is not None and show else None
        self._line: Line | None = None if not show or self._outer is not None else line()

    def __call__(self, done: int | None = None, note: str = "") -> None:
        """``done`` of ``total`` are done; ``note`` is shown behind it."""
        now = time.monotonic()
        if done is not None and done != self._done:
            self._done, self._moved = done, now
        self._note = note or self._note
        self._inside = ""
        self._show(now)

    def count(self, counted: tuple[int, int] | None) -> None:
        """(done, total) as an actor counts them; None where it has nothing to count."""
        if counted is not None and counted[1]:
            self.total = counted[1]
        self(None if counted is None else min(counted))

    def _show(self, now: float) -> None:
        if self._owner is not None and self.usable and now - self._told >= TELL_S:
            self._told = now
            self._owner.report({"done": self._done, "total": self.total, "unit": self.unit, "left_s": self.left(now)})
        if now - self._begun < SHOW_AFTER_S:
            return
        if self._outer is not None:
            self._outer.inside(self.text(now))
        elif self._line is not None:
            self._line.show(self.text(now), self.share)

    @property
    def usable(self) -> bool:
        """Whether there is anything to say of it."""
        return self.total is not None or self._usual is not None

    @property
    def share(self) -> float | None:
        return None if not self.total else min(1.0, self._done / self.total)

    def inside(self, text: str) -> None:
        """What a part of it says of itself."""
        self._inside = text
        if self._line is not None:
            self._line.show(self.text(time.monotonic()), self.share)

    def left(self, now: float) -> float | None:
        """Seconds to go by the pace so far, else by how long it took last; None when neither is known."""
        if self.total is not None and self._done > self._first:
            pace = (self._moved - self._begun) / (self._done - self._first)
            return max(0.0, pace * (self.total - self._done) - (now - self._moved))
        return None if self._usual is None else max(0.0, self._usual - (now - self._begun))

    def text(self, now: float) -> str:
        took = duration(now - self._begun)
        known = self.total is not None and (self._done > self._first or self._first > 0)
        count = f"{self._done:,} of {self.total:,} {units(self.unit, self.total)}" if known else took
        left = self.left(now)
        ahead = f", about {duration(left)} left" if left else ""
        note = f" ({self._note})" if self._note else ""
        return f"{self.what}: {count}{ahead}{note}{'; ' if self._inside else ''}{self._inside}"

    def close(self, whole: bool = True) -> None:
        """It ended; ``whole`` False: before its end."""
        if self._outer is not None:
            self._outer.inside("")
            return
        if self._line is None:
            return
        now = time.monotonic()
        if whole and self.total is not None:
            self._done = self.total
        count = "" if self.total is None else f"{self._done:,} of {self.total:,} {units(self.unit, self.total)} "
        note = f" ({self._note})" if self._note else ""
        how = "in" if whole else "stopped after"
        self._line.end(f"{self.what}: {count}{how} {duration(now - self._begun)}{note}", self.share, self._lasting)


class Asker:
    """For ``on_tick`` of `rlkit.actors.wait`: asks for counts every `ASK_S` and hands the answers on, without ever waiting for them.
    ``first`` is called at every tick."""

    def __init__(self, ask: Callable[[], Any], tell: Callable[[Any], None], first: Callable[[list[Any]], None] | None = None) -> None:
        self._ask, self._tell, self._first = ask, tell, first
        self._asked: Any = None
        self._at = time.monotonic()

    def __call__(self, done: list[Any]) -> None:
        import ray
        from ray.exceptions import RayError

        if self._first is not None:
            self._first(done)

        if self._asked is None:
            if time.monotonic() - self._at >= ASK_S:
                self._asked, self._at = self._ask(), time.monotonic()
        elif ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                answer = ray.get(asked)
            except RayError:  # it died: whoever waits for its result deals with it
                return
            self._tell(answer)


# --- where it is shown -------------------------------------------------------------------------------------------------------------------


class Line:
    """A line of text that changes, in a log: some of what it says is written."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._any = False

    def show(self, text: str, share: float | None) -> None:
        """``share`` is how much of it is done, 0 to 1; None: not known."""
        if time.monotonic() - self._shown >= LOG_S:
            self._write(text)

    def end(self, text: str, share: float | None, always: bool) -> None:
        if always or self._any:
            self._write(text)

    def _write(self, text: str) -> None:
        self._shown, self._any = time.monotonic(), True
        print(text, file=sys.stderr, flush=True)


class TerminalLine(Line):
    def show(self, text: str, share: float | None) -> None:
        if time.monotonic() - self._shown >= REDRAW_S:
            self._shown, self._any = time.monotonic(), True
            sys.stderr.write("\r" + text[: WIDTH - 1].ljust(WIDTH - 1))
            sys.stderr.flush()

    def end(self, text: str, share: float | None, always: bool) -> None:
        if always or self._any:
            sys.stderr.write("\r" + text.ljust(WIDTH - 1) + "\n")
            sys.stderr.flush()


class NotebookLine(Line):
    """An output of the cell that made it; it may be changed from a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def begin(self, text: str) -> None:
        """Make the output where this is called."""
        self._put(text, None)

    def show(self, text: str, share: float | None) -> None:
        if self._handle is None or time.monotonic() - self._shown >= REDRAW_S:
            self._put(text, share)

    def end(self, text: str, share: float | None, always: bool) -> None:
        if always or self._any:
            self._put(text, None)

    def _put(self, text: str, share: float | None) -> None:
        from IPython.display import display

        self._shown, self._any = time.monotonic(), True
        bundle = {"text/plain": text, "text/html": as_html(text, share)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def as_html(text: str, share: float | None) -> str:
    """The text, with a bar in front of it once something is done."""
    bar = f"<progress value='{share:.3f}' max='1' style='width:12em;vertical-align:middle'></progress> " if share else ""
    return f"<div style='font-family:monospace'>{bar}{html.escape(text)}</div>"


def units(unit: str, count: int | None) -> str:
    """``step``, ``steps``, ``micro-batches``."""
    return unit if count == 1 else f"{unit}es" if unit.endswith("ch") else f"{unit}s"


def line() -> Line | None:
    """A line where this process shows such things. In the thread of `Run.start` it is the one of the cell that started it, or none."""
    loop = background.current()
    if loop is not None:
        return loop.line
    if in_notebook():
        return NotebookLine()
    return TerminalLine() if sys.stderr.isatty() else Line()


def in_notebook() -> bool:
    """Whether outputs of this process can be changed in place: a Jupyter kernel, but not one whose output goes to a batch job's log."""
    if "IPython" not in sys.modules or os.environ.get(NO_WIDGETS) == "0":
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


NO_WIDGETS = "RLKIT_WIDGETS"  # "0" in the kernels of `rlkit run`


def facts_of(progress: Mapping[str, Any] | None) -> str:
    """What a recorder was told of a phase, in words: ``96 of 128 samples, about 3 s left``."""
    if progress is None:
        return ""
    total, left = progress["total"], progress["left_s"]
    count = f"{progress['done']:,} of {total:,} {units(progress['unit'], total)}" if total is not None else ""
    ahead = f"about {duration(left)} left" if left else ""
    return ", ".join(part for part in (count, ahead) if part)
