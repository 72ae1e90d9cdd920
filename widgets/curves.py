"""Curves of a run as one small SVG: it moves while the cells run and stays in the saved notebook, also on GitHub."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.reprs import number

if TYPE_CHECKING:
    from rlkit.run import Run

WIDTH, HEIGHT, PAD = 360, 170, 34
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


class Curves:
    """One small panel a metric, over the run's steps.

    ``Curves(run)`` as the last line of a cell shows the run as it is; `show` shows it and `update` redraws it in place, for a loop.
    Metrics are names of columns of ``run.metrics``.
    """

    def __init__(self, run: Run, metrics: Sequence[str] = ("reward/mean", "length/mean", "policy/entropy", "policy/logprob_gap")) -> None:
        self.run, self.metrics = run, tuple(metrics)
        self._display: Any = None
        self._svg = self.draw()

    def draw(self) -> str:
        """The SVG of the log as it is now."""
        frame = self.run.metrics
        steps = [float(s) for s in frame.index]
        panels = [
            panel(name, steps, [float(v) for v in frame[name]] if name in frame else [], COLORS[i % len(COLORS)])
            for i, name in enumerate(self.metrics)
        ]
        return "<div style='display:flex;flex-wrap:wrap;gap:8px'>" + "".join(panels) + "</div>"

    def show(self) -> Curves:
        """Put the curves below the cell; `update` then redraws them there."""
        from IPython.display import HTML, display

        self._display = display(HTML(self._svg), display_id=True)
        return self

    def update(self) -> None:
        """Redraw with what the log holds now."""
        from IPython.display import HTML

        self._svg = self.draw()
        if self._display is not None:
            self._display.update(HTML(self._svg))

    def _repr_html_(self) -> str:
        return self._svg

    def __repr__(self) -> str:
        return f"Curves({self.run.name!r}: {', '.join(self.metrics)})"


def panel(title: str, xs: Sequence[float], ys: Sequence[float], color: str) -> str:
    """One SVG line chart; points that are not finite leave a gap."""
    points = [(x, y) for x, y in zip(xs, ys, strict=False) if math.isfinite(y)]
    head = f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{html.escape(title, quote=True)}' style='background:#fff'>"
    name = f"<text x='{PAD}' y='14' font-size='12' font-family='sans-serif' fill='#333'>{html.escape(title)}</text>"
    if not points:
        empty = f"<text x='{PAD}' y='{HEIGHT / 2}' font-size='11' font-family='sans-serif' fill='#777'>nothing logged yet</text>"
        return head + name + empty + "</svg>"
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    y0, y1 = (y0 - 0.5, y1 + 0.5) if y0 == y1 else (y0, y1)
    x1 = x1 if x1 > x0 else x0 + 1

    def at(x: float, y: float) -> tuple[float, float]:
        return PAD + (x - x0) / (x1 - x0) * (WIDTH - 2 * PAD), HEIGHT - 24 - (y - y0) / (y1 - y0) * (HEIGHT - 50)

    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in points))
    last = points[-1]
    dot_x, dot_y = at(*last)
    label = "font-size='10' font-family='sans-serif' fill='#777'"
    return (
        head
        + name
        + f"<text x='{WIDTH - PAD}' y='14' text-anchor='end' font-size='12' font-family='sans-serif' fill='{color}'>"
        + f"{number(last[1])}</text>"
        + f"<line x1='{PAD}' y1='{HEIGHT - 24}' x2='{WIDTH - PAD}' y2='{HEIGHT - 24}' stroke='#ccc'/>"
        + f"<text x='2' y='{HEIGHT - 24}' {label}>{number(y0)}</text><text x='2' y='32' {label}>{number(y1)}</text>"
        + f"<text x='{PAD}' y='{HEIGHT - 8}' {label}>{x0:.0f}</text>"
        + f"<text x='{WIDTH - PAD}' y='{HEIGHT - 8}' text-anchor='end' {label}>{x1:.0f}</text>"
        + f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='1.5'/>"
        + f"<circle cx='{dot_x:.1f}' cy='{dot_y:.1f}' r='2.5' fill='{color}'/></svg>"
    )
