"""`Run.start`: a loop in a thread, which leaves the kernel free for buttons and other cells.

Nothing of rlkit prints from such a thread: what it has to say goes into the event log, and to `Background.notes`. Output from threads lands
below whatever cell happens to run.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlkit.errors import DeadlineError, RunError
from rlkit.reprs import Shown

if TYPE_CHECKING:
    from rlkit.progress import Line
    from rlkit.run import Run

_here = threading.local()


class Background(Shown):
    """A loop in a thread of this kernel. The thread ends with the kernel; the step that it was in is then finished or done again by the
    next one, as always."""

    def __init__(self, run: Run, loop: Callable[[Run], Any], line: Line | None = None) -> None:
        self.run = run
        self.notes: list[str] = []
        self.stopping = False
        self.line = line  # below the cell that starts it
        self._loop = loop
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"rlkit-loop-{run.name}", daemon=True)

    def _work(self) -> None:
        _here.background = self
        try:
            self._value = self._loop(self.run)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `result` raises it
            self._error = error
        finally:
            self._loop = _ended
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether the loop has ended, well or not."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, when that was an error."""
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the loop; returns its value. An interrupt ends the waiting only.

        Raises:
            DeadlineError: it goes on after ``timeout`` seconds.
            BaseException: whatever ended the loop, with its own traceback.
        """
        try:
            ended = self._ended.wait(timeout)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"The loop over run {self.run.name!r} goes on in its thread; .stop() ends it after the current step.")
            raise
        if not ended:
            raise DeadlineError(
                f"The loop over run {self.run.name!r} was still going on after {timeout:g} s. Wait longer with .result(timeout), "
                "or end it after the current step with .stop()."
            )
        if self._error is not None:
            raise self._error
        return self._value

    def stop(self) -> None:
        """Ask the loop to end after the current step, or before its first; `result` waits for that. Nothing happens when it has ended."""
        self.stopping = True
        if not self.done:
            with suppress(RunError):  # it has not come to its first step, which it will not begin, or is past its last
                self.run.stop()

    def __repr__(self) -> str:
        how = "running" if not self.done else "done" if self._error is None else f"ended by {type(self._error).__name__}: {self._error}"
        return f"Background(run {self.run.name!r}, {how})"


def start(run: Run, loop: Callable[[Run], Any]) -> Background:
    """See `Run.start`."""
    if not callable(loop) or inspect.iscoroutinefunction(loop):
        raise RunError(
            f"run.start({loop!r}): it takes a plain function of the run, with the loop in it: def loop(run): for step in run.steps(n): ..."
        )
    if run._background is not None and not run._background.done:
        raise RunError(f"A loop over run {run.name!r} goes on in a thread already: end it with .stop() and .result(), or wait for it.")
    run.ledger.check()
    from rlkit.progress import NotebookLine, in_notebook

    line = NotebookLine() if in_notebook() else None
    if line is not None:
        line.begin(f"{run.name}: in the background")  # here: an output made in the loop's thread would lie below another cell
    made = run._background = Background(run, loop, line)
    made.thread.start()
    return made


def current() -> Background | None:
    """The background loop whose thread this is."""
    found: Background | None = getattr(_here, "background", None)
    return found


def say(text: str) -> None:
    """Print for the reader, or keep it in the background loop's notes."""
    loop = current()
    if loop is None:
        print(text, flush=True)
    else:
        loop.notes.append(text)


def _ended(run: Run) -> None:
    """In place of a loop that has ended, so that what it refers to can be freed."""
