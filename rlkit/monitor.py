"""The monitor: one small actor a node that looks at its GPUs, CPU, memory and object store once a second.

A sample is plain JSON:

    {"t": 1767225600.0,               seconds since the epoch, by the node's clock
     "node": "10.0.0.5", "cpu": 37.5,                         percent of all cores
     "memory": 9.1e9, "memory_total": 2.5e10,                 bytes, within the node's cgroup
     "object_store": 1.2e8, "object_store_total": 5.4e8,      bytes; None where Ray does not say
     "gpus": [{"index": 0, "uuid": "GPU-...", "name": "NVIDIA H200", "utilization": 93, "memory": 7.1e10, "memory_total": 1.5e11,
               "roles": {"engine": 6.9e10, "learner": 0, "other": 2e9}, "power": 512.0, "temperature": 61}],
     "note": ""}                                              why something is missing: "no NVML: no NVIDIA driver on this node"

The actor keeps the last `KEPT` samples. The monitors of a run also hand theirs to its recorder, which appends them to ``monitor.jsonl`` in
the run's folder: each one for the first hour of a run, then one for `LATER_EVERY`, so that a long run's file stays small.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from rlkit import actors, memory
from rlkit.errors import RunError
from rlkit.nvml import Gpus, NoGpus

EVERY_S = 1.0
KEPT = 600
FIRST = 3600  # samples that are handed on one by one
LATER_EVERY = 5  # then the means of so many
STORE_EVERY_S = 5.0  # between questions to Ray about the object store
GONE_S = 120.0  # a monitor whose run has had no recorder for so long ends itself
NAME = "monitor-"


class Monitor:
    """Samples its node. With ``space``, the namespace of a run, the run's recorder gets the samples; without, they are there to be read.

    A run's monitor is in one call that never returns: between two calls an actor's main thread wakes up a hundred times a second, which
    costs more than the sampling. It is a call from itself to itself, so that no kernel's end ends it.
    """

    def __init__(self, node: str, space: str | None, hand_every_s: float = EVERY_S) -> None:
        import ray

        self._node, self._hand_every = node, hand_every_s
        self._samples: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._hand = Hand(space) if space is not None else None
        if space is not None:
            ray.get_runtime_context().current_actor.sample_forever.remote()
        else:
            threading.Thread(target=self.sample_forever, name="rlkit-monitor", daemon=True).start()

    def read(self, after: int = -1) -> tuple[int, list[dict[str, Any]]]:
        """(number of the last sample, the samples after number ``after`` that are still kept)."""
        with self._lock:
            found = [s for n, s in self._samples if n > after]
            return (self._samples[-1][0] if self._samples else after), found

    def sample_forever(self) -> None:
        look = Look(self._node)
        due = handed = time.monotonic() + EVERY_S  # a percentage is one of the time since the sample before
        number = 0
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            sample = look()
            with self._lock:
                self._samples.append((number, sample))
            number += 1
            if self._hand is not None:
                self._hand.keep(sample)
                if time.monotonic() - handed >= self._hand_every - EVERY_S / 2:
                    handed = time.monotonic()
                    self._hand.over()
            due = max(due + EVERY_S, time.monotonic() - EVERY_S)  # after a pause of the machine it does not catch up


class Look:
    """One sample a call."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._gpus: Gpus | None = None
        self._note = ""
        try:
            self._gpus = Gpus()
        except NoGpus as why:
            self._note = str(why)
        self._store: tuple[float | None, float | None] = (None, None)
        self._store_at = -STORE_EVERY_S
        psutil.cpu_percent(None)  # the first call has nothing to compare with

    def __call__(self) -> dict[str, Any]:
        gpus, note = ([], "") if self._gpus is None else self._gpus.read()
        free, total = memory.host_memory()
        now = time.monotonic()
        if now - self._store_at >= STORE_EVERY_S:
            self._store, self._store_at = object_store(), now
        return {
            "t": round(time.time(), 3),
            "node": self.node,
            "cpu": psutil.cpu_percent(None),
            "memory": total - free,
            "memory_total": total,
            "object_store": self._store[0],
            "object_store_total": self._store[1],
            "gpus": gpus,
            "note": note or self._note,
        }


class Hand:
    """Hands samples to the run's recorder, without ever waiting for it. What a recorder did not take is handed to the next one."""

    def __init__(self, space: str) -> None:
        self._space = space
        self._kept: deque[str] = deque(maxlen=KEPT)  # lines that were not handed over yet
        self._group: list[dict[str, Any]] = []
        self._seen = 0
        self._recorder: Any = None
        self._sent: tuple[Any, list[str]] | None = None  # a call on its way, and its lines
        self._last_answer = time.monotonic()

    def keep(self, sample: dict[str, Any]) -> None:
        self._seen += 1
        self._group.append(sample)
        if self._seen <= FIRST or len(self._group) >= LATER_EVERY:
            self._kept.append(json.dumps(merge(self._group), separators=(",", ":")) + "\n")
            self._group = []

    def over(self) -> None:
        """Hand over what is kept, once what was handed over before has arrived."""
        import ray
        from ray.exceptions import RayError

        try:
            if self._sent is not None:
                call, lines = self._sent
                if not ray.wait([call], timeout=0)[0]:
                    return
                self._sent = None
                try:
                    ray.get(call)
                except RayError:
                    self._kept.extendleft(reversed(lines))
                    raise
                self._last_answer = time.monotonic()
            if self._recorder is None:
                self._recorder = actors.find("recorder", self._space)
            if self._recorder is not None and self._kept:
                lines, self._kept = list(self._kept), deque(maxlen=KEPT)
                self._sent = self._recorder.observe.remote("".join(lines)), lines
        except RayError:
            self._recorder = None
        if time.monotonic() - self._last_answer > GONE_S:
            ray.kill(ray.get_runtime_context().current_actor)


def merge(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some samples of one node as one: the mean of rates, the most of memory, all else as it was last."""
    last = dict(samples[-1])
    if len(samples) == 1:
        return last
    last["cpu"] = _mean([s["cpu"] for s in samples])
    last["memory"] = max(s["memory"] for s in samples)
    gpus = []
    for gpu in last["gpus"]:
        same = [g for s in samples for g in s["gpus"] if g["uuid"] == gpu["uuid"]]
        fullest = max(same, key=lambda g: g["memory"])
        means = {key: _mean([g[key] for g in same]) for key in ("utilization", "power", "temperature")}
        gpus.append(gpu | {"memory": fullest["memory"], "roles": fullest["roles"]} | means)
    return last | {"gpus": gpus}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 1) if known else None


def object_store() -> tuple[float | None, float | None]:
    """(bytes in use, bytes in all) of this node's object store, as Ray's own books say; None where they do not."""
    import ray
    from ray._private import state

    node = ray.get_runtime_context().get_node_id()
    total = state.total_resources_per_node().get(node, {}).get("object_store_memory")
    free = state.available_resources_per_node().get(node, {}).get("object_store_memory")
    if total is None:
        return None, None
    return total - (free or 0.0), total  # a resource that is used up is not listed


def start(nodes: Sequence[Any], space: str) -> None:
    """A monitor on each of these nodes that has none yet, for the run whose namespace is ``space``. Does not wait for them."""
    there = set(actors.names(space))
    for node, label in zip(nodes, labels(nodes), strict=True):
        name = f"{NAME}{node.id[:12]}"
        if name not in there:
            with suppress(RunError):  # another kernel was faster
                actors.spawn(Monitor, name, space, label, space, max(EVERY_S, len(nodes) / 20), node_id=node.id, control_threads=0)


def start_for_kernel(nodes: Sequence[Any]) -> list[Any]:
    """Monitors of a cluster that belong to no run: they end with the handles, and with this kernel."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    made = ray.remote(num_cpus=0, max_restarts=0)(Monitor)
    return [
        made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(label, None)
        for node, label in zip(nodes, labels(nodes), strict=True)
    ]


def labels(nodes: Sequence[Any]) -> list[str]:
    """A name for each node: its host or address, with a part of its id where two have the same."""
    plain = [node.host or node.ip for node in nodes]
    return [f"{name} ({node.id[:6]})" if plain.count(name) > 1 else name for name, node in zip(plain, nodes, strict=True)]
