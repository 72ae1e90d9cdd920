"""The widget in the browser: one comm a view, a thread that reads the run, and messages that carry only what is new.

State that is synced (and may be saved) is the program and the panels' titles; data never is. It goes as custom messages:

    browser -> kernel   hello (a page shows the view, and may lack plotly.js), alive, bye, ask
    kernel -> browser   library (plotly.js, once a page), start (every column, packed), tick (new rows, changed facts), reply

The thread runs while somebody looks: it ends when the last page said bye, or was silent for a minute in which no cell kept the kernel from
hearing it. Another hello starts it again, so that a page can be closed and opened while the run goes on.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from rlkit.errors import RlkitError
from rlkit.widgets import showing
from rlkit.widgets.series import Table, pack

if TYPE_CHECKING:
    from rlkit.widgets.panel import Panel

FRONT = Path(__file__).parent / "front"
PROGRAM = ("base.js", "store.js", "chart.js", "curves.js", "machines.js", "words.js", "rollouts.js", "view.js")
TICK_S = 0.5  # between two reads of the run
PICTURE_S = 15.0  # at most so often is the static picture drawn while the widget lives
SILENT_S = 60.0  # a page that looks says so every 15 s
LEFT_S = 3.0  # after the last page said bye: a cell that is moved shows its view again at once
PACK_ROWS = 2000  # more new rows than this go packed
JOIN_S = 5.0
UNHEARD_S = 3.0  # a page that has said nothing by then probably cannot be heard: the cell that runs keeps the kernel busy
EXACT = frozenset(("step", "t", "start"))
VIEW_MIME = "application/vnd.jupyter.widget-view+json"


@functools.cache
def program() -> str:
    """The JavaScript of the view: the files of ``front/`` one after the other."""
    return "\n".join((FRONT / name).read_text(encoding="utf-8") for name in PROGRAM)


@functools.cache
def plotly_js() -> bytes:
    """plotly.js as the installed plotly package brings it, deflated."""
    import plotly

    return zlib.compress((Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_bytes(), 6)


class View(anywidget.AnyWidget):
    """One widget, with the panels of one `Panel`. Made by `View.of`."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    spec = traitlets.Dict().tag(sync=True)

    _library_told = False  # by this process, to a page that could not be heard

    @classmethod
    def of(cls, panel: Panel) -> View:
        spec = {
            "names": [watched.name for watched in panel.sources()],
            "parts": [part.spec() for part in panel.parts()],
            "run": panel.watched.source.folder is not None,  # not a cluster, whose machines alone are watched
        }
        view = cls(_esm=program(), _css=(FRONT / "style.css").read_text(encoding="utf-8"), spec=spec)
        view._begin(panel)
        return view

    def _begin(self, panel: Panel) -> None:
        self.panel = panel
        self.feeding = False
        self._change = threading.RLock()  # messages come on the kernel's threads, ticks from ours
        self._pages: dict[str, float] = {}  # page -> when it was last heard, by time.monotonic
        self._generation = 0  # of the tables that the browser has
        self._facts: dict[str, Any] = {}  # what the browser was told last
        self._columns: dict[str, list[str]] = {}
        self._restarts: list[int] = []
        self._first: str | None = None  # the page in which the cell was run
        self._answered: list[Any] = []  # hellos come more than once
        self._wake = threading.Event()
        self._over = False
        self._heard = False
        self._made = time.monotonic()
        self._free = self._made  # when a cell was last seen to run
        self._alone: float | None = None  # since when no page shows the view
        self._thread: threading.Thread | None = None
        self._unread = False  # the run went on since the picture was drawn
        self._drawn = time.monotonic()
        self._left: float | None = None  # when the last page took the view out of a living notebook
        self.on_msg(self._message)
        if self.comm is not None:
            # JupyterLab asks for comms on a subshell, a thread that is free while a cell runs. ipykernel 7.4 would send them to where
            # the comm last spoke, which is the cell's own thread.
            self.comm._reply_subshell_for = None
        self._feed()

    def bundle(self) -> dict[str, Any]:
        return {VIEW_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}, "text/plain": ""}

    def end(self) -> None:
        """Close the comm and end the thread."""
        with self._change:
            self._over = True
            self._wake.set()
            self.on_msg(self._message, remove=True)
            self.close()
            self.layout.close()  # a comm of its own
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # --- what the browser says -----------------------------------------------------------------------------------------------------------

    def _message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        page, what = str(content.get("page")), content.get("kind")
        with self._change:
            if self._over:
                return
            self._heard = True
            self._left = None
            if what == "bye":
                self._pages.pop(page, None)
                if not self._pages and content.get("removed"):
                    self._left = time.monotonic()
                self._wake.set()
                return
            self._pages[page] = time.monotonic()
            self._first = self._first or page
            self._unread |= what == "hello" and page != self._first
            self._feed()
            if what == "hello":
                nonce = content.get("nonce")
                if nonce is not None and nonce in self._answered:
                    return
                self._answered = [*self._answered[-20:], nonce]
                if content.get("library"):
                    self.send({"kind": "library"}, buffers=[plotly_js()])
                self._start()
            elif what == "alive":
                self.send({"kind": "alive", "page": page})
            elif what == "ask":
                self.send({"kind": "reply", "id": content.get("id")} | self._answer(content))

    def _answer(self, content: dict[str, Any]) -> dict[str, Any]:
        parts = self.panel.parts()
        at = content.get("part")
        if not isinstance(at, int) or not 0 <= at < len(parts):
            return {"error": f"There is no part {at!r}."}
        try:
            return parts[at].answer(content)
        except RlkitError as error:
            return {"error": str(error)}

    # --- what the kernel says ------------------------------------------------------------------------------------------------------------

    def _tables(self) -> dict[str, Table]:
        return {f"{i} {name}": table for i, watched in enumerate(self.panel.sources()) for name, table in watched.tables().items()}

    def _all_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for i, watched in enumerate(self.panel.sources()):
            facts[f"{i} state"] = watched.state
            facts[f"{i} machines"] = {"gpus": watched.gpus, "notes": watched.notes}
            facts[f"{i} clock"] = watched.clock_back
        return facts | {f"part {i}": part.news() for i, part in enumerate(self.panel.parts())}

    def _start(self) -> None:
        """Tell everything, packed."""
        self._generation += 1
        about: dict[str, Any] = {}
        buffers = []
        with self.panel.reading():
            self._restarts = [watched.restarts for watched in self.panel.sources()]
            for name, table in self._tables().items():
                about[name] = {"columns": table.names, "exact": [c in EXACT for c in table.names], "n": table.n, "labels": table.labels}
                buffers += [pack(table[column], column in EXACT) for column in table.names]
                self._columns[name] = table.names
                table.tell()
            self._facts = copy.deepcopy(self._all_facts())
        self.send({"kind": "start", "generation": self._generation, "tables": about, "facts": self._facts}, buffers=buffers)

    def _tick(self) -> None:
        """Tell what is new, if anything is."""
        about: dict[str, Any] = {}
        buffers = []
        with self.panel.reading():
            news = {name: table for name, table in self._tables().items() if table.news}
            restarts = [watched.restarts for watched in self.panel.sources()]
            if restarts != self._restarts or any(table.n - table.told > PACK_ROWS for table in news.values()):
                self._start()
                return
            for name, table in news.items():
                about[name] = {"from": table.told, "n": table.n}
                if self._columns.get(name) != table.names:
                    about[name] |= {"columns": table.names, "labels": table.labels}
                buffers.append(table.rows(table.told))
                self._columns[name] = table.names
                table.tell()
            facts = self._all_facts()
        changed = {key: value for key, value in facts.items() if self._facts.get(key) != value}
        if about or changed:
            self._facts |= copy.deepcopy(changed)
            self.send({"kind": "tick", "generation": self._generation, "tables": about, "facts": changed}, buffers=buffers)

    # --- the thread ----------------------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Have the thread running."""
        with self._change:
            if self.feeding or self._over:
                return
            self.feeding, self._alone, self._free = True, None, time.monotonic()
            self._thread = threading.Thread(target=self._feed_forever, name=f"rlkit-view-{self.panel.watched.name}", daemon=True)
            self._thread.start()

    def _feed_forever(self) -> None:
        try:
            self._feed_until_over()
        finally:
            self.feeding = False  # after an error too: the next question of the page starts it again

    def _feed_until_over(self) -> None:
        while True:
            self._wake.wait(TICK_S)
            asked = self._wake.is_set()
            self._wake.clear()
            with self._change:
                if self._over:
                    self.feeding = False
                    return
                self._unread |= self.panel.read()
                if self._pages or self._unheard():
                    self._tick()
                gone = self._nobody_looks()
                self.feeding = not gone
                redraw = self._unread and (gone or asked or time.monotonic() - self._drawn > PICTURE_S)
                if redraw:
                    self._unread, self._drawn = False, time.monotonic()
            if redraw:
                self.panel.redraw()
            if gone:
                break
        if self._left is not None:
            self.panel.close()

    def redraw_soon(self) -> None:
        """Read the run and draw the static picture again, without waiting for it."""
        self._wake.set()

    def picture(self) -> None:
        """Give the static picture to a page that was opened later: Jupyter does not know there which output it belongs to."""
        with self._change:
            if not self._over and self._pages.keys() - {self._first}:
                self.send({"kind": "picture", "mark": self.panel.mark, "data": self.panel.static_bundle()})

    def _unheard(self) -> bool:
        """The page cannot be heard while a cell keeps the kernel busy: it is told everything unasked, plotly.js once a process."""
        if self._heard or not showing.running.is_set() or time.monotonic() - self._made < UNHEARD_S:
            return False
        if not self._generation:
            if not View._library_told:
                View._library_told = True
                self.send({"kind": "library"}, buffers=[plotly_js()])
            self._start()
        return True

    def _nobody_looks(self) -> bool:
        now = time.monotonic()
        if self._left is not None:
            return now - self._left > LEFT_S
        if showing.running.is_set():
            self._free = now  # a busy kernel may hear nobody: silence counts from its end
        self._pages = {page: heard for page, heard in self._pages.items() if now - max(heard, self._free) < SILENT_S}
        if self._pages:
            self._alone = None
            return False
        self._alone = self._alone or now
        return now - self._alone > LEFT_S if self._heard else now - self._free > SILENT_S
