"""Putting a view into a notebook: a picture that any reader of the notebook shows, and in front of a live front end the widget over it.

They are two outputs of the cell. The first is the static picture: text and HTML, updated in place, so that the saved notebook has
the run as it was at the end. The second is the widget, only when a browser is there. The picture's style sheet hides the picture while the
widget is alive, and a widget's output that nothing brings to life (a notebook that is opened without its kernel).

A live front end is one that says so: JupyterLab (and Notebook 7, which is made of it) names the cell in the request to execute it, nbclient
(papermill, ``nbconvert --execute``, ``jupyter execute``) does not. ``RLKIT_WIDGETS=1`` or ``0`` decides where that is wrong; `rlkit run`
sets it to 0.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkit.widgets.panel import Panel

WIDGETS = "RLKIT_WIDGETS"
STYLE = (
    "<style>"
    ".jp-OutputArea-child:has(.rlkit-picture):has(+ .jp-OutputArea-child .rlkit-view),"
    ".jp-OutputArea-child:has(.rlkit-picture)+.jp-OutputArea-child:has(.jupyter-widgets):not(:has(.rlkit-view)){display:none}"
    "</style>"
)

_shown: list[Shown] = []
_lock = threading.Lock()


class Shown:
    """A panel in the notebook, and which cell it is in."""

    def __init__(self, panel: Panel, handle: Any, cell: str | None, request: str | None) -> None:
        self.panel, self.handle, self.cell, self.request = panel, handle, cell, request

    def redraw(self) -> None:
        """Replace the picture by one of what was read so far."""
        if self.handle is not None:
            self.handle.update(self.panel.static_bundle(), raw=True)


def kernel() -> Any | None:
    """This process's IPython kernel, or None outside one."""
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None)


def request() -> dict[str, Any]:
    """The message that the kernel works on; empty outside a kernel."""
    here = kernel()
    return {} if here is None else (here.get_parent() or {})


def cell_id() -> str | None:
    """The notebook's id of the cell that is being executed, when the front end tells it."""
    found = (request().get("metadata") or {}).get("cellId")
    return str(found) if found else None


def live_front_end() -> bool:
    """Whether a browser shows what this cell displays; see the module's docstring."""
    wish = os.environ.get(WIDGETS, "")
    if wish in ("0", "1"):
        return wish == "1" and kernel() is not None
    return cell_id() is not None


def show(panel: Panel) -> None:
    """Display a panel. What an earlier execution of the same cell showed is closed: its outputs are gone from the notebook."""
    from IPython.display import display

    live = live_front_end()
    cell, of = cell_id(), (request().get("header") or {}).get("msg_id")
    if cell is not None:
        for old in [s for s in _shown if s.cell == cell and s.request != of]:
            old.panel.close()
    if kernel() is None:
        display(panel.static_bundle(), raw=True)
        return
    panel.read()
    handle = display(panel.static_bundle(), raw=True, display_id=True)
    shown = Shown(panel, handle, cell, of)
    with _lock:
        _shown.append(shown)
    panel.shown.append(shown)
    _follow_cells()
    if live:
        display(panel.open_view().bundle(), raw=True)


def forget(panel: Panel) -> None:
    """The panel is closed: it is no longer followed."""
    with _lock:
        _shown[:] = [s for s in _shown if s.panel is not panel]
    panel.shown.clear()


def _follow_cells() -> None:
    """After every cell, pictures of runs that went on are drawn again."""
    from IPython import get_ipython

    events = get_ipython().events
    for name, callback in (("pre_run_cell", _cell_begins), ("post_run_cell", _cell_ends)):
        if callback not in events.callbacks[name]:
            events.register(name, callback)


running = threading.Event()  # a cell is being executed


def _cell_begins(_info: Any = None) -> None:
    running.set()


def _cell_ends(_result: Any = None) -> None:
    running.clear()
    with _lock:
        shown = list(_shown)
    for panel in dict.fromkeys(s.panel for s in shown):
        panel.cell_ended()
