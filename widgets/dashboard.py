"""`Dashboard`: everything about a run in one widget, and `compare`: two runs over each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.reprs import html_table
from rlkit.widgets.controls import RunControls
from rlkit.widgets.curves import RewardCurves
from rlkit.widgets.gpus import GpuMonitor, PhaseTimeline
from rlkit.widgets.health import Health
from rlkit.widgets.panel import Panel
from rlkit.widgets.rollouts import RolloutBrowser
from rlkit.widgets.watched import Watched

UNTOLD = frozenset(("kind", "t", "name", "seconds", "step", "asked"))  # of a part's event: no settings


class Dashboard(Panel):
    """Controls, health, curves, machines, phases and rollouts of a run, over one comm.

        Dashboard(run)                     # the last line of a cell
        board = Dashboard("runs/sums")     # a run that has ended; board.close() ends what it keeps

    Args:
        run: a `Run`, a run's folder, or the name of a live run of this or another kernel.
        metrics: as in `RewardCurves`.

    Raises:
        RunError: there is no such run.
    """

    kind: ClassVar[str] = "dashboard"
    title: ClassVar[str] = "Dashboard"

    def __init__(self, run: Any, metrics: Any = None) -> None:
        super().__init__(run)
        self._parts: list[Panel] = [
            RunControls(self.watched),
            Health(self.watched),
            RewardCurves(self.watched, metrics),
            GpuMonitor(self.watched),
            PhaseTimeline(self.watched),
            RolloutBrowser(self.watched),
        ]

    def parts(self) -> list[Panel]:
        return self._parts

    def text(self) -> str:
        return "\n".join([f"Dashboard({self.watched.name!r})", *(f"  {part.text()}" for part in self._parts)])


class Comparison(Panel):
    """What `compare` returns."""

    kind: ClassVar[str] = "comparison"
    title: ClassVar[str] = "Comparison"

    def __init__(self, first: Watched, second: Watched, metrics: Any = None) -> None:
        super().__init__(first)
        self._owns = True  # both were made for it
        self._second = second
        names = [first.name, second.name] if first.name != second.name else [f"{first.name} (1)", f"{second.name} (2)"]
        self._curves = RewardCurves(first, metrics, others=[(names[1], second)])
        self._differences = Differences(first, second, names)

    def sources(self) -> list[Watched]:
        return [self.watched, self._second]

    def parts(self) -> list[Panel]:
        return [self._curves, self._differences]

    def text(self) -> str:
        return f"compare({self.watched.name!r}, {self._second.name!r})\n  {self._differences.text()}"


class Differences(Panel):
    """The settings in which two runs differ."""

    kind: ClassVar[str] = "differences"
    title: ClassVar[str] = "Differences of their configurations"

    def __init__(self, first: Watched, second: Watched, names: list[str]) -> None:
        super().__init__(first)
        self.names = names
        self.rows = differences(settings(first), settings(second))

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"labels": self.names, "rows": self.rows}

    def static_html(self) -> str:
        return self.framed(html_table(("setting", *self.names), self.rows) if self.rows else "<p>Their configurations are the same.</p>")

    def text(self) -> str:
        words = "; ".join(f"{name} {a} | {b}" for name, a, b in self.rows)
        return f"configurations: {words or 'the same'}"


def compare(run_a: Any, run_b: Any, metrics: Any = None) -> Comparison:
    """The curves of two runs over each other, and the settings in which they differ. Each is what `Dashboard` takes.

    Raises:
        RunError: there is no such run.
    """
    first = Watched(run_a)
    second = Watched(run_b)
    first.poll()
    second.poll()
    return Comparison(first, second, metrics)


def settings(watched: Watched) -> dict[str, Any]:
    """A run's settings as its log has them: ``learner.lr`` and so on, and its seed."""
    out: dict[str, Any] = {"seed": watched.seed}
    for name, event in watched.parts.items():
        for key, value in event.items():
            if key == "spec" and isinstance(value, Mapping):
                out |= {f"{name}.{setting}": v for setting, v in value.items()}
            elif key not in UNTOLD:
                out[f"{name}.{key}"] = value
    return out


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, in the first, in the second) where the two differ; "–" where one has no such setting."""

    def words(values: Mapping[str, Any], key: str) -> str:
        return "–" if key not in values else json.dumps(values[key]) if not isinstance(values[key], str) else values[key]

    return [(key, words(first, key), words(second, key)) for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
