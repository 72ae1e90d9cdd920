"""Static pictures as SVG, for readers without a kernel, a browser or scripts.

A picture goes into HTML as an image with its data in the address: nothing in it can run, no style sheet reaches it, and JupyterLab shows it
in notebooks that it does not trust too.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlkit.reprs import number

# Okabe and Ito's colours, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color/
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
PHASE_COLORS = {
    "rollout": COLORS[0], "reward": COLORS[4], "update": COLORS[2], "sync": COLORS[3], "reference": COLORS[5], "checkpoint": COLORS[1],
}  # fmt: skip
DASHES = ("", "6 3", "2 2", "6 2 2 2")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 150, 40, 22, 18
POINTS = 240  # of a curve: its pixels


@dataclass(frozen=True)
class Drawing:
    """An SVG and what it says in words."""

    svg: str
    alt: str

    def img(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        return f"<img alt='{html.escape(self.alt, quote=True)}' style='max-width:100%;margin:2px' src='data:image/svg+xml;base64,{data}'>"


@dataclass(frozen=True)
class Curve:
    """A line of a chart. Values that are not finite are gaps; infinite ones are flagged as not finite."""

    name: str
    x: np.ndarray  # (n,)
    y: np.ndarray  # (n,)
    spread: np.ndarray | None = None  # (n,) half the height of a band around it


@dataclass(frozen=True)
class Span:
    """A stretch of a chart's ground, in units of x."""

    start: float
    end: float
    color: str


def decimate(y: np.ndarray, pixels: int = POINTS) -> np.ndarray:
    """Indices of at most ``2 * pixels`` points that look like all of them: the lowest and the highest of each pixel, in order."""
    n = len(y)
    if n <= 2 * pixels:
        return np.arange(n)
    edges = np.linspace(0, n, pixels + 1).astype(int)
    kept: list[int] = []
    for a, b in itertools.pairwise(edges):
        part = y[a:b]
        good = np.flatnonzero(np.isfinite(part))
        if not len(good):
            kept.append(int(a))
            continue
        low, high = good[part[good].argmin()], good[part[good].argmax()]
        kept += sorted({int(a + low), int(a + high)})
    return np.asarray(kept)


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    spans: Sequence[Span] = (),
    y_range: tuple[float, float] | None = None,
    unit: str = "",
    x_labels: tuple[str, str] | None = None,
    width: int = WIDTH,
) -> Drawing:
    """A small line chart: a title, the last values, the lines, their range."""
    curves = [c for c in curves if len(c.y)]
    kept = [decimate(c.y) for c in curves]
    seen = [(c.x[k], c.y[k], None if c.spread is None else c.spread[k]) for c, k in zip(curves, kept, strict=True)]
    good = [np.isfinite(y) for _, y, _ in seen]
    flagged = sum(int(np.isposinf(c.y).sum()) for c in curves)
    words = ", ".join(f"{c.name} {number(last)}{unit}" for c in curves if (last := last_finite(c.y)) is not None)
    alt = f"{title}: {words or 'nothing logged yet'}" + (f"; {flagged} values not finite" if flagged else "")
    out = [text(6, 14, title, weight="bold")]
    if not any(g.any() for g in good):
        return frame([*out, text(LEFT, HEIGHT / 2, "nothing logged yet" if not flagged else f"{flagged} values, none finite")], alt, width)
    x0 = float(min(x.min() for x, _, _ in seen))
    x1 = max(float(max(x.max() for x, _, _ in seen)), x0 + least(x0))
    lows = [
        float((y - (0 if s is None else np.nan_to_num(s, posinf=0)))[g].min()) for (_, y, s), g in zip(seen, good, strict=True) if g.any()
    ]
    highs = [
        float((y + (0 if s is None else np.nan_to_num(s, posinf=0)))[g].max()) for (_, y, s), g in zip(seen, good, strict=True) if g.any()
    ]
    y0, y1 = y_range or (min(lows), max(highs))
    if y0 == y1:
        y0, y1 = y0 - (abs(y0) or 1) / 2, y1 + (abs(y1) or 1) / 2
    right, floor = width - 8, HEIGHT - BOTTOM

    def px(x: np.ndarray | float) -> np.ndarray:
        return LEFT + (np.asarray(x, float) - x0) / (x1 - x0) * (right - LEFT)

    def py(y: np.ndarray | float) -> np.ndarray:
        return floor - (np.clip(np.asarray(y, float), y0, y1) - y0) / (y1 - y0) * (floor - TOP - 4)

    ground: dict[str, list[str]] = {}
    for span in spans:
        a, b = float(px(max(span.start, x0))), float(px(min(span.end, x1)))
        if b > a:
            ground.setdefault(span.color, []).append(f"M{a:.1f} {TOP}H{b:.1f}V{floor}H{a:.1f}z")
    out += [f"<path d='{''.join(path)}' fill='{color}' fill-opacity='.18'/>" for color, path in ground.items()]
    out.append(f"<path d='M{LEFT} {floor}H{right}' stroke='#bbb'/>")
    for i, ((x, y, spread), g) in enumerate(zip(seen, good, strict=True)):
        color, dash = COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]
        for a, b in runs(g):
            xs, ys = px(x[a:b]), y[a:b]
            if spread is not None and np.isfinite(spread[a:b]).all():
                edge = points(np.concatenate([xs, xs[::-1]]), np.concatenate([py(ys + spread[a:b]), py((ys - spread[a:b])[::-1])]))
                out.append(f"<polygon points='{edge}' fill='{color}' fill-opacity='.16'/>")
            if b - a == 1:
                out.append(f"<circle cx='{xs[0]:.1f}' cy='{py(ys)[0]:.1f}' r='1.8' fill='{color}'/>")
                continue
            dashed = f" stroke-dasharray='{dash}'" if dash else ""
            out.append(f"<polyline points='{points(xs, py(ys))}' fill='none' stroke='{color}' stroke-width='1.4'{dashed}/>")
    out += [text(2, floor, number(y0), size=9), text(2, TOP + 9, number(y1), size=9)]
    first, last_label = x_labels or (f"{x0:.0f}", f"{x1:.0f}")
    out += [text(LEFT, HEIGHT - 5, first, size=9), text(right, HEIGHT - 5, last_label, size=9, anchor="end")]
    at = right
    for i, curve in reversed(list(enumerate(curves[:3]))):
        last = last_finite(curve.y)
        label = ("" if len(curves) == 1 else f"{curve.name} ") + ("–" if last is None else number(last) + unit)
        out.append(text(at, 14, label, size=10, anchor="end", color=COLORS[i % len(COLORS)]))
        at -= int(6.0 * len(label)) + 8
    if flagged:
        out.append(text(right, TOP + 9, f"{flagged} not finite", size=9, anchor="end", color="#b00020"))
    return frame(out, alt, width)


Lane = tuple[str, str, Sequence[tuple[float, float]]]


def least(x: float) -> float:
    """The least width of an axis that begins at ``x``: one that a float still tells apart, also of seconds since 1970."""
    return max(1e-9, abs(x) * 1e-9)


def lanes(title: str, rows: Sequence[Lane], x_labels: tuple[str, str], width: int = 2 * WIDTH) -> Drawing:
    """Spans in lanes: ``rows`` are (name, colour, [(start, end), ...])."""
    alt = f"{title}: " + (", ".join(name for name, _, _ in rows) or "nothing yet")
    out, height = [text(6, 14, title, weight="bold")], TOP + 16 * max(1, len(rows)) + BOTTOM
    every = [edge for _, _, spans in rows for span in spans for edge in span]
    if not every:
        return frame([*out, text(90, TOP + 12, "no phase has ended yet")], alt, width, height)
    x0, x1 = min(every), max(max(every), min(every) + least(min(every)))

    def at(x: float) -> float:
        return 88 + (x - x0) / (x1 - x0) * (width - 96)

    for i, (name, color, spans) in enumerate(rows):
        y = TOP + 16 * i
        out.append(text(80, y + 11, name, size=10, anchor="end"))
        path = "".join(f"M{at(a):.1f} {y}h{max(0.4, at(b) - at(a)):.1f}v12H{at(a):.1f}z" for a, b in spans)
        out.append(f"<path d='{path}' fill='{color}'/>")
    out += [text(88, height - 5, x_labels[0], size=9), text(width - 8, height - 5, x_labels[1], size=9, anchor="end")]
    return frame(out, alt, width, height)


def chips(items: Sequence[tuple[str, str, str]], width: int = 2 * WIDTH) -> Drawing:
    """Words in coloured frames: ``items`` are (label, value, level), level "good", "warn", "bad" or "none"."""
    colors = {"good": "#009E73", "warn": "#E69F00", "bad": "#D55E00", "none": "#999999"}
    marks = {"good": "✓", "warn": "!", "bad": "✕", "none": "·"}
    x, y, out = 4.0, 4.0, []
    for label, value, level in items:
        words = f"{marks[level]} {label} {value}"
        size = 6.1 * len(words) + 16
        if x + size > width:
            x, y = 4.0, y + 26
        color, fill = colors[level], 0.3 if level == "bad" else 0.12
        place = f"x='{x:.0f}' y='{y:.0f}' width='{size:.0f}' height='21' rx='10'"
        out.append(f"<rect {place} fill='{color}' fill-opacity='{fill}' stroke='{color}'/>")
        out.append(text(x + 8, y + 15, words, size=11))
        x += size + 6
    alt = "Health: " + ", ".join(f"{label} {value} ({level})" for label, value, level in items)
    return frame(out, alt, width, int(y + 26))


def frame(parts: Sequence[str], alt: str, width: int = WIDTH, height: int = HEIGHT) -> Drawing:
    """The parts on a white card, so that they can be read on any ground."""
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif'>"
    card = f"<rect x='.5' y='.5' width='{width - 1}' height='{height - 1}' rx='4' fill='#fff' stroke='#ddd'/>"
    return Drawing(f"{head}<title>{html.escape(alt)}</title>{card}{''.join(parts)}</svg>", alt)


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", color: str = "#333", weight: str = "normal") -> str:
    style = "" if anchor == "start" else f" text-anchor='{anchor}'"
    style += "" if weight == "normal" else f" font-weight='{weight}'"
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='{color}'{style}>{html.escape(words)}</text>"


def points(xs: np.ndarray, ys: np.ndarray) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def runs(good: np.ndarray) -> list[tuple[int, int]]:
    """Where ``good`` is true without a break: (start, end) pairs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def last_finite(values: np.ndarray) -> float | None:
    good = np.flatnonzero(np.isfinite(values))
    return float(values[good[-1]]) if len(good) else None


def duration(seconds: float) -> str:
    """Seconds for people: ``75 s``, ``12 min 5 s``, ``3 h 20 min``."""
    whole = max(0, round(seconds)) if math.isfinite(seconds) else 0
    if whole < 90:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 5400 else f"{whole // 3600} h {whole % 3600 // 60} min"
