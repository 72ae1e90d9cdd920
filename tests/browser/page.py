"""A notebook in JupyterLab's page, as a person at the keyboard sees it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import ROOT, Lab
from playwright.sync_api import BrowserContext, Locator, Page, expect

DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"
SCREENSHOTS = ROOT / "runs" / "browser"
ANSWER_S = 60  # the longest that the page takes for anything by itself
CELL_S = 120  # the longest that one cell of a tiny notebook takes on a loaded machine


class Notebook:
    """One notebook, open in one page. Cells are numbered from 0, all kinds counted."""

    def __init__(self, context: BrowserContext, lab: Lab, path: Path, size: tuple[int, int] = (1200, 900)) -> None:
        self.lab, self.path = lab, path
        self.messages: list[str] = []  # errors and warnings of the page's console
        self.requests: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.on("console", lambda m: self.messages.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.messages.append(f"pageerror: {e.stack}"))
        self.page.on("request", lambda r: self.requests.append(r.url))
        name = path.relative_to(lab.notebooks).as_posix()
        self.page.goto(f"{lab.url}lab/tree/{name}?token={lab.token}&reset", wait_until="domcontentloaded")
        self.wait_open()

    def wait_open(self) -> None:
        """Until JupyterLab shows the notebook and its kernel is there."""
        expect(self.page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=90_000)
        self.app("await app.restored; await app.shell.currentWidget.context.ready; await app.shell.currentWidget.sessionContext.ready")
        if self.page.locator("#jp-left-stack").is_visible():
            self.app("await app.commands.execute('application:toggle-left-area')")

    def app(self, code: str) -> Any:
        """Run JavaScript with ``app``, JupyterLab's own object, and ``notebook``, the open one's content; for what has no fixed place."""
        late = f"new Promise((_, no) => setTimeout(() => no(new Error('no answer in {ANSWER_S} s')), {ANSWER_S} * 1000))"
        given = "const app = window.jupyterapp; const notebook = app.shell.currentWidget?.content;"
        return self.page.evaluate(f"() => Promise.race([{late}, (async () => {{ {given} {code} }})()])")

    def theme(self, name: str) -> None:
        self.app(f"await app.commands.execute('apputils:change-theme', {{theme: {name!r}}})")
        light = "true" if name == LIGHT else "false"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", light)

    # --- cells -----------------------------------------------------------------------------------------------------------------------

    def index(self, text: str) -> int:
        """The number of the first cell whose source has ``text``."""
        found = self.app("return notebook.widgets.map(w => w.model.sharedModel.source)")
        return next(i for i, source in enumerate(found) if text in source)

    def cell(self, text: str) -> Locator:
        """The cell whose source has ``text``, scrolled to."""
        self.front()
        at = self.index(text)
        self.app(f"notebook.activeCellIndex = {at}; await notebook.scrollToItem({at}, 'start')")
        found = self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{at}']")
        expect(found).to_be_visible()
        return found

    def front(self) -> None:
        """Bring the page to the front: Chromium draws no other."""
        self.page.bring_to_front()

    def menu(self, title: str, entry: str) -> None:
        self.front()
        self.page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{title}$")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^{entry}")).click()

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")

    def run_above(self, text: str) -> None:
        """Run every cell above the one whose source has ``text``."""
        self.cell(text)
        self.menu("Run", "Run All Above Selected Cell")

    def run(self, text: str) -> None:
        """Run the one cell whose source has ``text``; does not wait for its end."""
        self.cell(text)
        self.app(f"notebook.activeCellIndex = {self.index(text)}; void app.commands.execute('notebook:run-cell')")

    def counts(self) -> list[int | None]:
        """The execution count of each code cell, None for one that has not come to its end."""
        return list(
            self.app(
                "return notebook.widgets.filter(w => w.model.type === 'code').map(w => w.model.executionState === 'idle' ? "
                "w.model.executionCount : null)"
            )
        )

    def errors(self) -> list[str]:
        """The errors among the outputs of all cells."""
        return list(
            self.app(
                "return notebook.widgets.filter(w => w.model.type === 'code').flatMap(w => w.model.outputs.toJSON())"
                ".filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)"
            )
        )

    def wait_idle(self, seconds: float = CELL_S) -> None:
        """Until every cell that was asked for has run."""
        self.wait(lambda: self.errors() or (self.kernel_status() == "idle" and not self.running()), "the cells to end", seconds)
        assert self.errors() == []

    def running(self) -> int:
        return self.app("return notebook.widgets.filter(w => w.model.type === 'code' && w.model.executionState === 'running').length")

    def kernel_status(self) -> str:
        return str(self.app("return app.shell.currentWidget.sessionContext.session?.kernel?.status ?? 'none'"))

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 60) -> Any:
        """Until ``condition`` holds; returns what it gave. The page lives on meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            self.page.wait_for_timeout(200)
        raise AssertionError(f"waited {seconds:.0f} s for {what}; errors of cells: {self.errors()}; page: {self.messages[-5:]}")

    # --- the kernel ------------------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The menu's entry, and its question answered."""
        self.menu("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(self.page.locator(".jp-Dialog")).to_have_count(0)
        self.wait(lambda: self.kernel_status() == "idle", "the kernel to restart")

    def faults(self) -> list[str]:
        """What the page's console has of errors of a widget; JupyterLab's own warnings are none of ours."""
        return [text for text in self.messages if text.startswith("pageerror") or "rlkit" in text or "anywidget" in text]

    def save(self) -> None:
        self.app("await app.shell.currentWidget.context.save()")

    def close(self) -> None:
        """Close the page, as closing the browser's tab does: the kernel goes on."""
        self.page.close()


def picture(name: str) -> Path:
    """Where a screenshot goes."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS / f"{name}.png"
