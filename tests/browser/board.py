"""A dashboard in the page: what it shows, and its buttons. And the run's log on disk, which is what the page is checked against."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page import Notebook
from playwright.sync_api import Locator, expect


class Board:
    """A view of `rlkit.widgets`: the one below the cell whose source has ``text``."""

    def __init__(self, notebook: Notebook, text: str) -> None:
        self.notebook, self.text = notebook, text
        self.root: Locator = notebook.cell(text).locator(".rlkit-view")

    def show(self) -> None:
        """Scroll to it: a view that nobody can see is not drawn."""
        self.notebook.cell(self.text)
        expect(self.root).to_be_visible(timeout=60_000)  # in a page that was opened again the kernel is asked for it

    def look(self, code: str) -> Any:
        """What JavaScript finds in the view, named ``root``; None while there is no view. Waits for nothing."""
        found = self.root.element_handles()
        return found[0].evaluate(f"root => {{ {code} }}") if found else None

    def curve(self, title: str) -> list[float]:
        """The x values that plotly has drawn for the first curve of a chart, scrolled to; empty while there is none."""
        found = self.look(
            "const titles = [...root.querySelectorAll('.rlkit-chart-title')];"
            f"const plot = titles.find(t => t.textContent === {title!r})?.closest('.rlkit-chart').querySelector('.rlkit-plot');"
            "plot?.scrollIntoView({ block: 'nearest' });"
            "const lines = (plot?.data ?? []).filter(t => t.hoverinfo !== 'skip' && t.yaxis !== 'y2');"
            "return lines.length ? [...lines[0].x] : [];"
        )
        return [x for x in found or [] if x is not None]

    def chart(self, title: str) -> Locator:
        return self.root.locator(f".rlkit-chart:has(.rlkit-chart-title:text-is('{title}'))")

    def points(self) -> int:
        """How many steps the reward's curve has."""
        return len(self.curve("Reward"))

    def wait_points(self, n: int, seconds: float = 90) -> int:
        """Until the reward's curve has at least ``n`` points; returns how many."""
        self.show()
        self.notebook.wait(lambda: self.points() >= n, f"{n} points in the curve of {self.text!r}, state {self.state()!r}", seconds)
        return self.points()

    def state(self) -> str:
        """The run's state in words, from the head."""
        return str(self.look("return root.querySelector('.rlkit-state').textContent"))

    def wait_state(self, pattern: str, seconds: float = 60) -> str:
        self.notebook.wait(lambda: re.search(pattern, self.state()), f"the state {pattern!r}; it is {self.state()!r}", seconds)
        return self.state()

    def badges(self) -> str:
        return str(self.look("return root.querySelector('.rlkit-badges').textContent"))

    def button(self, name: str) -> Locator:
        return self.root.get_by_role("button", name=name, exact=True)

    def press(self, name: str, answer: str, whole: bool = True) -> None:
        """Click one of the run's buttons, and see its answer appear below them, or with ``whole`` False one that has this in it."""
        self.show()
        expect(self.button(name)).to_have_attribute("aria-disabled", "false", timeout=60_000)
        self.button(name).click()
        said = expect(self.root.locator("[data-kind='controls'] [role='status']"))
        (said.to_have_text if whole else said.to_contain_text)(answer, timeout=60_000)


class Log:
    """A run's ``events.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        raw = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, raw) if event["kind"] == kind]

    def steps(self) -> list[int]:
        """The steps that are complete."""
        return [event["step"] for event in self.events("step")]
