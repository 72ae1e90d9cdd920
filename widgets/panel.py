"""What every view has in common: it reads a run, has a static picture and, in a live notebook, a widget."""

from __future__ import annotations

import contextlib
import html
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlkit.widgets import showing
from rlkit.widgets.picture import Drawing
from rlkit.widgets.watched import Watched

if TYPE_CHECKING:
    from rlkit.widgets.view import View


class Panel:
    """A view over a run. As the last line of a cell it shows itself; `close` ends whatever it keeps.

    Args:
        run: a `Run`, a run's folder, the name of a live run, or a `rlkit.watch` source. A `Watched` is shared with another panel.

    Raises:
        RunError: there is no such run.
    """

    kind: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, run: Any) -> None:
        self.watched = run if isinstance(run, Watched) else Watched(run)
        self._owns = not isinstance(run, Watched)
        self._view: View | None = None
        self.closed = False
        self.mark = f"rlkit {uuid.uuid4().hex}"  # by which a page finds the picture
        self.shown: list[Any] = []
        if self._owns:
            self.watched.poll()

    # --- what a panel is made of: subclasses say -----------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """What the browser needs to know once, as JSON. ``kind`` names the function in ``front/`` that draws it, ``source`` is the number
        of the run that it reads, among those of its widget."""
        return {"kind": self.kind, "title": self.title, "source": 0}

    def drawings(self) -> Sequence[Drawing]:
        """The static pictures, of what was read so far."""
        return ()

    def text(self) -> str:
        """The panel in words, of what was read so far."""
        return f"{type(self).__name__}({self.watched.name!r})"

    def news(self) -> dict[str, Any]:
        """Small facts that change, sent to the browser when they do."""
        return {}

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Answer a question of the browser.

        Raises:
            RlkitError: shown to the reader.
        """
        return {"error": f"{self.kind} has no answer to {ask.get('what')!r}."}

    def sources(self) -> list[Watched]:
        return [self.watched]

    def parts(self) -> list[Panel]:
        """The panels that the widget has, from top to bottom."""
        return [self]

    # --- static --------------------------------------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read what is new; True when there was something."""
        return sum(watched.poll() for watched in self.sources()) > 0

    def static_html(self) -> str:
        """The picture as HTML."""
        parts = self.parts()
        if parts != [self]:
            return self.framed("".join(part.static_html() for part in parts))
        return self.framed("".join(drawing.img() for drawing in self.drawings()) or f"<p>{html.escape(self.text())}</p>")

    def framed(self, inner: str) -> str:
        """HTML that gives way to the widget where there is one; see `rlkit.widgets.showing`."""
        return f"<div class='rlkit-picture'>{inner}</div>"

    def static_bundle(self) -> dict[str, str]:
        """The static picture and the text, of what was read so far."""
        with self.reading():
            return {"text/html": f"<!--{self.mark}-->{showing.STYLE}{self.static_html()}", "text/plain": self.text()}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What was read does not change within."""
        with contextlib.ExitStack() as stack:
            for watched in self.sources():
                stack.enter_context(watched.lock)
            yield

    def _read_anew(self) -> None:
        """Read before something is shown, where no thread of the view does."""
        if not self.closed and (self._view is None or not self._view.feeding):
            self.read()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        self._read_anew()
        bundle: dict[str, Any] = self.static_bundle()
        if not self.closed and showing.live_front_end():
            bundle |= self.open_view().bundle()
        return bundle

    def _repr_html_(self) -> str:
        self._read_anew()
        return self.static_bundle()["text/html"]

    def _ipython_display_(self) -> None:
        showing.show(self)

    def __repr__(self) -> str:
        self._read_anew()
        return self.text()

    # --- live ----------------------------------------------------------------------------------------------------------------------------

    def open_view(self) -> View:
        """The widget, made when first asked for."""
        from rlkit.widgets.view import View

        if self._view is None:
            self._view = View.of(self)
        return self._view

    def cell_ended(self) -> None:
        """A cell of the notebook has ended: bring the picture up to date."""
        if self._view is not None and self._view.feeding:
            self._view.redraw_soon()
        elif self.read():
            self.redraw()

    def redraw(self) -> None:
        """Draw the picture in the notebook again, of what was read so far."""
        for shown in list(self.shown):
            shown.redraw()
        if self._view is not None and self.shown:
            self._view.picture()

    def close(self) -> None:
        """End the widget, its thread and its comm, and stop reading. The picture stays, as it is at the end."""
        if self.closed:
            return
        self.closed = True
        if self.shown:
            self.read()
            self.redraw()
        if self._view is not None:
            self._view.end()
        showing.forget(self)
        if self._owns:
            for watched in self.sources():
                watched.close()
