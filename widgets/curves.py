"""`RewardCurves`: what a run logs at every step, as curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rlkit.errors import ConfigError, nearest
from rlkit.reprs import number
from rlkit.widgets.panel import Panel
from rlkit.widgets.picture import Curve, Drawing, chart, last_finite
from rlkit.widgets.watched import Watched

NOT_PARTS = ["reward/mean", "reward/std", "reward/no_spread_groups"]
# Each: id, title, the metrics in it (those that the log has), the metric that is a band around the first, whether it is shown at first.
PANELS: list[dict[str, Any]] = [
    {"id": "reward", "title": "Reward", "names": ["reward/mean"], "band": "reward/std", "shown": True},
    {"id": "parts", "title": "Reward parts", "names": [], "prefix": "reward/", "except": NOT_PARTS, "shown": False},
    {"id": "accuracy", "title": "Accuracy", "names": ["verdict/correct", "eval/accuracy", "accuracy"], "shown": True},
    {"id": "length", "title": "Response length", "names": ["length/mean", "length/max"], "shown": True},
    {"id": "entropy", "title": "Entropy", "names": ["policy/entropy"], "shown": True},
    {"id": "kl", "title": "KL", "names": ["policy/kl", "policy/approx_kl"], "shown": True},
    {"id": "clip", "title": "Clip fraction", "names": ["policy/clip_fraction"], "shown": False},
    {"id": "grad", "title": "Gradient norm", "names": ["policy/grad_norm"], "shown": True},
    {"id": "truncated", "title": "Truncated", "names": ["length/truncated"], "shown": False},
    {"id": "gap", "title": "Log-prob gap", "names": ["policy/logprob_gap"], "shown": True},
    {"id": "lr", "title": "Learning rate", "names": ["policy/lr"], "shown": False},
    {"id": "spread", "title": "Groups without spread", "names": ["reward/no_spread_groups"], "shown": False},
    {"id": "loss", "title": "Loss", "names": ["policy/loss"], "shown": False},
    {"id": "time", "title": "Seconds a phase", "names": ["time/rollout", "time/reward", "time/update", "time/sync"], "shown": False},
]


class RewardCurves(Panel):
    """Curves over the run's steps or over time; the reader chooses which, smooths them and takes a log scale.

    Args:
        run: see `Panel`.
        metrics: what is shown from the start: panels' ids (``"reward"``, ``"kl"``, ``"length"`` ...) or names of metrics; None: the usual.

    Raises:
        RunError: there is no such run.
        ConfigError: a metric that is neither a panel's id nor of the form ``group/name``.
    """

    kind: ClassVar[str] = "curves"
    title: ClassVar[str] = "Curves"

    def __init__(self, run: Any, metrics: Sequence[str] | None = None, *, others: Sequence[tuple[str, Watched]] = ()) -> None:
        self.panels = chosen(metrics)  # refused before anything is read
        super().__init__(run)
        self._others = list(others)  # further runs, for `compare`

    def sources(self) -> list[Watched]:
        return [self.watched, *(watched for _, watched in self._others)]

    def spec(self) -> dict[str, Any]:
        labels = [self.watched.name, *(label for label, _ in self._others)]
        named = [{"table": f"{i} steps", "label": label} for i, label in enumerate(labels)]
        return super().spec() | {"panels": self.panels, "sources": named}

    def drawings(self) -> list[Drawing]:
        out = []
        for panel in self.panels:
            if not panel["shown"]:
                continue
            curves = []
            for watched in self.sources():
                for name in self._names(panel, watched):
                    band = panel.get("band")
                    label = watched.name if self._others else name.rpartition("/")[2]
                    spread = watched.steps[band] if band and band in watched.steps.names and not self._others else None
                    curves.append(Curve(label, watched.steps["step"], watched.steps[name], spread))
            out.append(chart(panel["title"], curves))
        return out

    def text(self) -> str:
        steps = self.watched.steps
        if not len(steps):
            return f"RewardCurves({self.watched.name!r}: no step is complete yet)"
        lasts = [(name, last_finite(steps[name])) for panel in self.panels if panel["shown"] for name in self._names(panel, self.watched)]
        words = ", ".join(f"{name} {number(value)}" for name, value in lasts if value is not None)
        return f"RewardCurves({self.watched.name!r}, {len(steps)} steps: {words})"

    def _names(self, panel: dict[str, Any], watched: Watched) -> list[str]:
        there = watched.metric_names()
        found = [name for name in panel["names"] if name in there]
        if panel.get("prefix"):
            found += [name for name in there if name.startswith(panel["prefix"]) and name not in panel["except"] and name not in found]
        return found


def chosen(metrics: Sequence[str] | None) -> list[dict[str, Any]]:
    """The panels, with those that are asked for first and shown.

    Raises:
        ConfigError: see `RewardCurves`.
    """
    if metrics is None:
        return [dict(panel) for panel in PANELS]
    if isinstance(metrics, str):
        raise ConfigError(f"metrics={metrics!r} must be a list of names, such as [{metrics!r}].")
    if not all(isinstance(name, str) for name in metrics):
        raise ConfigError(f"metrics={metrics!r} must be a list of names, such as ['reward', 'policy/entropy'].")
    ids = {panel["id"]: panel for panel in PANELS}
    single = {panel["names"][0]: panel for panel in PANELS if panel["names"]}
    first: list[dict[str, Any]] = []
    for name in metrics:
        panel = ids.get(name) or single.get(name)
        if panel is None:
            if "/" not in name:
                raise ConfigError(
                    f"metrics: {name!r} is neither a panel{nearest(name, ids)} (there are {', '.join(ids)}) nor the name of a metric "
                    f"as the run logs them, such as 'policy/entropy'."
                )
            panel = {"id": name, "title": name, "names": [name]}
        first.append(panel | {"shown": True})
    known = {panel["id"] for panel in first}
    return first + [panel | {"shown": False} for panel in PANELS if panel["id"] not in known]
