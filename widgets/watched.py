"""What a view has read of a run so far, as tables: steps, phases, and one of samples for each node.

`Watched.poll` reads what is new in a `rlkit.watch` source. Nothing else in `rlkit.widgets` reads a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from rlkit.eventlog import is_number
from rlkit.widgets.series import Table, finite

PHASES = ("rollout", "reward", "update", "sync", "reference", "checkpoint", "other")
MAX_SAMPLES = 40_000  # rows of monitor samples over all nodes; older ones are thinned
MAX_PHASES = 20_000  # the newest that are kept
NO_STATE: dict[str, Any] = {"live": False, "phase": None, "committed": -1, "control": "stopped", "stale_since": None}


class Watched:
    """Reads a source; see `rlkit.watch.source` for what ``run`` may be.

    Raises:
        RunError: there is no such run.
    """

    def __init__(self, run: Any) -> None:
        from rlkit import watch

        self.source = watch.source(run) if not hasattr(run, "poll") else run
        self.name: str = self.source.name
        self.steps = Table(("step", "t"))
        self.phases = Table(("start", "seconds", "phase", "step"), PHASES)
        self.nodes: dict[str, Table] = {}
        self.gpus: dict[str, list[str]] = {}  # node -> names of its GPUs
        self.notes: dict[str, str] = {}  # node -> what the monitor says of it
        self.parts: dict[str, dict[str, Any]] = {}  # the sampler's, the learner's ... newest event
        self.seed: int | None = None
        self.versions: dict[str, int] = {}  # policy versions: of the last rollout, update and sync
        self.lag = 0  # how many versions the last step's rollout was behind the learner
        self.state: dict[str, Any] = dict(NO_STATE)
        self.clock_back = 0.0  # seconds that the clock of the log went back, at most
        self.damaged = 0  # lines of the log that were left out
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # of the whole run; `phases` has the newest
        self.restarts = 0
        self.lock = threading.RLock()  # held while the tables are read or changed
        self._begun: int | None = None
        self._lag_told = False  # by the updates themselves; else it is guessed from the rollout of the same step

    def poll(self) -> bool:
        """Read what is new; True when there was something. Never raises for a run that went away."""
        with self.lock:
            return self._poll()

    def _poll(self) -> bool:
        changes = self.source.poll()
        if changes.restarted:
            self._forget()
        for event in changes.events:
            self._take(event)
        for sample in changes.monitor:
            self._sample(sample)
        if len(self.phases) > 2 * MAX_PHASES:
            self._forget_phases()
        state = state_dict(changes.state)
        state["stale_since"] = None if changes.stale is None else round(time.time() - changes.stale)
        state["damaged"] = self.damaged
        new = bool(changes.events or changes.monitor)
        changed = new or {**state, "now": 0} != {**self.state, "now": 0}
        self.state = state
        return changed

    def tables(self) -> dict[str, Table]:
        return {"steps": self.steps, "phases": self.phases} | {f"node {name}": table for name, table in self.nodes.items()}

    @property
    def stale(self) -> float | None:
        """Seconds since a live run could last be read; None when it can be, or has ended."""
        since = self.state["stale_since"]
        return None if since is None else max(0.0, time.time() - since)

    def metric_names(self) -> list[str]:
        return [name for name in self.steps.names if name not in ("step", "t")]

    def close(self) -> None:
        self.source.close()

    def _forget(self) -> None:
        """Another run has taken this one's name."""
        self.restarts += 1
        self.steps, self.phases = Table(self.steps.names[:2]), Table(self.phases.names, PHASES)
        self.nodes, self.gpus, self.notes, self.parts, self.versions = {}, {}, {}, {}, {}
        self.lag, self.clock_back, self.damaged = 0, 0.0, 0
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)

    # --- events ------------------------------------------------------------------------------------------------------------------------

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            self._step(event)
        elif kind == "phase":
            self._phase(event)
        elif kind == "begin":
            self._begun = event.get("version")
        elif kind == "rewind":
            self._cut_after(event["step"])
        elif kind == "part":
            self.parts[event["name"]] = dict(event)
        elif kind == "open":
            self.seed = event.get("seed")
        elif kind == "note":
            self.damaged += bool(event.get("damaged"))

    def _step(self, event: Mapping[str, Any]) -> None:
        self._cut_after(event["step"] - 1)
        t = float(event["t"])
        if len(self.steps):
            before = float(self.steps["t"][-1])
            self.clock_back = max(self.clock_back, before - t)
            t = max(t, before)  # a curve over time must not fold back on itself
        lag = event.get("metrics", {}).get("update/policy_lag")
        if lag is not None and math.isfinite(lag):
            self.lag, self._lag_told = int(lag), True
        self.steps.append({"step": event["step"], "t": t} | {name: finite(value) for name, value in event.get("metrics", {}).items()})

    def _cut_after(self, step: int) -> None:
        steps = self.steps["step"]
        self.steps.cut(int(steps.searchsorted(step, side="right")))

    def _phase(self, event: Mapping[str, Any]) -> None:
        name = str(event["phase"]).rpartition("/")[2]  # an evaluation's rollouts are rollouts
        version = event.get("policy_version")
        if isinstance(version, int):
            if name == "rollout" and event.get("step") is not None and self._begun is not None and not self._lag_told:
                self.lag = self._begun - version
            self.versions[name] = version
        start, seconds = event.get("t_start"), event.get("seconds")
        if start is None or seconds is None:
            return
        step = event.get("step")
        code = PHASES.index(name) if name in PHASES else PHASES.index("other")
        self.phase_seconds[PHASES[code]] += seconds
        self.phases.append({"start": start, "seconds": seconds, "phase": code, "step": math.nan if step is None else step})

    def _forget_phases(self) -> None:
        old, kept = self.phases, self.phases.n - MAX_PHASES
        self.phases = Table(old.names, old.labels)
        columns = [old[name][kept:] for name in old.names]
        for row in zip(*columns, strict=True):
            self.phases.append(dict(zip(old.names, row, strict=True)))

    # --- monitor samples ---------------------------------------------------------------------------------------------------------------

    def _sample(self, sample: Mapping[str, Any]) -> None:
        node = str(sample["node"])
        table = self.nodes.setdefault(node, Table(("t",)))
        t = float(sample["t"])
        if len(table):
            before = float(table["t"][-1])
            self.clock_back = max(self.clock_back, before - t)
            t = max(t, before)
        row: dict[str, float] = {"t": t}
        for key in ("cpu", "memory", "memory_total", "object_store", "object_store_total"):
            row[key] = number(sample.get(key))
        names = []
        for i, gpu in enumerate(sample.get("gpus") or ()):
            names.append(f"{gpu.get('index', i)} {gpu.get('name', '')}".strip())
            for key in ("utilization", "memory", "memory_total", "power", "temperature"):
                row[f"gpu{i}/{key}"] = number(gpu.get(key))
            for role, value in (gpu.get("roles") or {}).items():
                row[f"gpu{i}/{role}"] = number(value)
        table.append(row)
        self.gpus[node] = names
        self.notes[node] = str(sample.get("note") or "")
        table.thin(max(600, MAX_SAMPLES // len(self.nodes)))


def number(value: object) -> float:
    """A monitor's value; None, which it could not read, is a gap."""
    return float(value) if is_number(value) and math.isfinite(value) else math.nan  # type: ignore[arg-type]


def state_dict(state: Any) -> dict[str, Any]:
    """A RunState as JSON that a browser reads."""
    values = dataclasses.asdict(state) if dataclasses.is_dataclass(state) and not isinstance(state, type) else dict(state)
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
