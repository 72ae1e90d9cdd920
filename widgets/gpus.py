"""`GpuMonitor`: what the machines do, GPU by GPU and node by node, and `PhaseTimeline`: what the run did with them."""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np

from rlkit.widgets.panel import Panel
from rlkit.widgets.picture import COLORS, PHASE_COLORS, Curve, Drawing, Span, chart, duration, lanes, last_finite
from rlkit.widgets.series import Table
from rlkit.widgets.watched import PHASES, Watched

SPANS = 240  # in a picture
PICTURE_S = 1800.0  # of the newest time that a picture shows


class GpuMonitor(Panel):
    """Utilisation, memory by role, power and temperature of every GPU; CPU, memory and object store of every node.

    Args:
        run: as in `Panel`, or a `Cluster`. Over a run's curves lie the spans of its phases.

    Without a GPU it shows the CPU side and says so.
    """

    kind: ClassVar[str] = "machines"
    title: ClassVar[str] = "GPUs and nodes"

    def drawings(self) -> list[Drawing]:
        nodes = self.watched.nodes
        if not nodes:
            return []
        since = max(float(table["t"][-1]) for table in nodes.values()) - PICTURE_S
        spans = [Span(a, b, PHASE_COLORS.get(name, COLORS[6])) for name, a, b in recent(self.watched, since)]
        recents = {node: int(table["t"].searchsorted(since)) for node, table in nodes.items()}
        # A node that left long ago has no sample in the picture's time.
        first = min(float(table["t"][recents[node]]) for node, table in nodes.items() if recents[node] < len(table["t"]))
        labels = (clock(first), clock(since + PICTURE_S))
        many = len(nodes) > 1

        def curves(key: str, scale: float = 1.0) -> list[Curve]:
            return [Curve(node if many else key, t["t"][recents[node] :], t[key][recents[node] :] * scale) for node, t in nodes.items()]

        def gpu_curves(key: str, scale: float = 1.0) -> list[Curve]:
            return [
                Curve(
                    f"{node} {name}" if many else name,
                    nodes[node]["t"][recents[node] :],
                    nodes[node][f"gpu{i}/{key}"][recents[node] :] * scale,
                )
                for node, names in self.watched.gpus.items()
                for i, name in enumerate(names)
            ]

        def drawn(title: str, lines: list[Curve], unit: str, y_range: tuple[float, float] | None = None) -> Drawing:
            return chart(title, lines, spans=spans, unit=unit, y_range=y_range, x_labels=labels)

        out = []
        if self.has_gpu:
            out = [
                drawn("GPU utilisation", gpu_curves("utilization"), " %", (0, 100)),
                drawn("GPU memory", gpu_curves("memory", 2**-30), " GiB"),
                drawn("Power", gpu_curves("power"), " W"),
                drawn("Temperature", gpu_curves("temperature"), " °C"),
            ]
            if sum(map(len, self.watched.gpus.values())) == 1:
                roles = [Curve(role, c.x, c.y) for role in ("engine", "learner", "other") for c in gpu_curves(role, 2**-30)]
                out[1] = drawn("GPU memory", roles, " GiB")
        out += [drawn("CPU", curves("cpu"), " %", (0, 100)), drawn("Memory of the node", curves("memory", 2**-30), " GiB")]
        if any(last_finite(t["object_store"]) is not None for t in nodes.values()):
            out.append(drawn("Object store", curves("object_store", 2**-30), " GiB"))
        return out

    @property
    def has_gpu(self) -> bool:
        return any(self.watched.gpus.values())

    def text(self) -> str:
        head = f"GpuMonitor({self.watched.name!r}"
        if not self.watched.nodes:
            return f"{head}: no sample of the machines yet)"
        words = []
        for node, table in self.watched.nodes.items():
            facts = [said(table, "cpu", 1, "% CPU"), said(table, "memory", 2**-30, "GiB")]
            for i, name in enumerate(self.watched.gpus[node]):
                facts += [f"GPU {name}", said(table, f"gpu{i}/utilization", 1, "%"), said(table, f"gpu{i}/memory", 2**-30, "GiB")]
            words.append(f"{node}: {', '.join(filter(None, [*facts, self.watched.notes[node]]))}")
        return f"{head}{'' if self.has_gpu else ', no GPU: the CPU side'}; {'; '.join(words)})"


class PhaseTimeline(Panel):
    """When the run rolled out, graded, updated and synced, one lane a phase."""

    kind: ClassVar[str] = "phases"
    title: ClassVar[str] = "Phases"

    def drawings(self) -> list[Drawing]:
        phases = self.watched.phases
        if not len(phases):
            return [lanes("Phases", [], ("", ""))]
        end = float((phases["start"] + phases["seconds"]).max())
        begin = max(float(phases["start"].min()), end - PICTURE_S)
        found = recent(self.watched, begin)
        rows = [(name, PHASE_COLORS.get(name, COLORS[6]), [(a, b) for n, a, b in found if n == name]) for name in PHASES]
        return [lanes(f"Phases of {duration(end - begin)}", [row for row in rows if row[2]], (clock(begin), clock(end)))]

    def text(self) -> str:
        words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.watched.phase_seconds.items() if seconds)
        return f"PhaseTimeline({self.watched.name!r}: {words or 'no phase has ended yet'})"


def recent(watched: Watched, since: float, most: int = SPANS) -> list[tuple[str, float, float]]:
    """The newest spans of phases from ``since`` on: (name, start, end). Those that touch are joined, to be at most ``most``."""
    phases = watched.phases
    start, end = phases["start"], phases["start"] + phases["seconds"]
    at = np.flatnonzero(end >= since)
    if not len(at):
        return []
    least = float(end[at].max() - max(start[at].min(), since)) / 300
    out: list[tuple[str, float, float]] = []
    last: dict[int, int] = {}  # phase -> where its newest span is in `out`
    for i in at:
        code, a, b = int(phases["phase"][i]), max(float(start[i]), since), float(end[i])
        k = last.get(code)
        if k is not None and a - out[k][2] < least:
            out[k] = (out[k][0], out[k][1], max(out[k][2], b))
            continue
        last[code] = len(out)
        out.append((PHASES[code], a, b))
    return out[-most:]


def said(table: Table, key: str, scale: float, unit: str) -> str:
    value = last_finite(table[key])
    return "" if value is None else f"{value * scale:.3g} {unit}"


def clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))
