"""Where a `rlkit.watch.Source` reads: the recorder of a live run, a run's folder, the monitors of a cluster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlkit import actors, monitor
from rlkit.errors import ActorDiedError, DeadlineError, RlkitError, RunError
from rlkit.eventlog import EVENTS_FILE, MONITOR_FILE, is_event, is_sample
from rlkit.preflight import answers
from rlkit.tail import parse, read_whole_lines

CHUNK = 4 * 2**20  # bytes of log a call
ANSWER_S = 0.2  # a poll waits so long for an answer; one that comes later is taken by a later poll
OVERDUE_S = 3.0  # without an answer for so long, what is shown is stale
LOOK_AGAIN_S = 2.0  # between looks for a recorder that is gone
CONTROL_S = 10.0


@dataclass
class Read:
    """What one read found."""

    events: list[dict[str, Any]] = field(default_factory=list)
    monitor: list[dict[str, Any]] = field(default_factory=list)
    live: dict[str, Any] | None = None  # the recorder's answer; None when there is none yet
    gone: bool = False  # nobody is there to answer
    stale: float | None = None
    restarted: bool = False


class Feed(Protocol):
    name: str
    folder: Path | None

    def read(self) -> Read: ...

    def fetch(self, method: str, *args: Any) -> bytes | None:
        """What a ``read_`` method of the recorder returns; None where no recorder is reached through this feed."""
        ...

    def control(self, verb: str) -> str: ...

    def close(self) -> None: ...


class Places:
    """How far the log and the monitor's file were read, in bytes."""

    def __init__(self) -> None:
        self.events = self.monitor = 0

    def take(self, raw_events: bytes, raw_monitor: bytes, into: Read) -> bool:
        """Parse what follows; returns whether there may be more."""
        self.events += len(raw_events)
        self.monitor += len(raw_monitor)
        events, complaints = parse(raw_events, EVENTS_FILE, is_event)
        at = events[-1].get("t", 0.0) if events else 0.0
        notes = [{"t": at, "kind": "note", "text": text, "damaged": True} for text in complaints]
        into.events += events[:-1] + notes + events[-1:]  # the last event says whether the run was closed
        into.monitor += parse(raw_monitor, MONITOR_FILE, is_sample)[0]
        return max(len(raw_events), len(raw_monitor)) > CHUNK // 2


class FileFeed:
    """A run's folder. It may still be written to, by a run on a cluster that this kernel knows nothing of."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self._path = folder
        self.name = folder.resolve().name
        self._places = Places()
        self._first = b""  # the log's first line, which says when the run was started

    def read(self) -> Read:
        out = Read(gone=True)
        self._check_same(out)
        while self._places.take(
            read_whole_lines(self._path / EVENTS_FILE, self._places.events, CHUNK),
            read_whole_lines(self._path / MONITOR_FILE, self._places.monitor, CHUNK),
            out,
        ):
            pass
        return out

    def _check_same(self, out: Read) -> None:
        """Begin again when another run's log has taken the place of this one."""
        try:
            with (self._path / EVENTS_FILE).open("rb") as file:
                first, facts = file.readline(), os.fstat(file.fileno())
        except OSError:
            return
        if self._first and (first != self._first or facts.st_size < self._places.events):
            self._places = Places()
            afresh(out, facts.st_mtime)
        self._first = first if first.endswith(b"\n") else b""

    def fetch(self, method: str, *args: Any) -> bytes | None:
        return None

    def control(self, verb: str) -> str:
        raise RunError(
            f"Run {self.name!r} is read from {self._path}: there is no loop here to {verb}. rlkit.attach(name) finds a live run."
        )

    def close(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"run {self.name!r} on disk at {self._path}"


class LiveFeed:
    """The recorder of a run. When it is gone, its folder is read where that lies here, and a new recorder is looked for."""

    def __init__(self, name: str, cluster: Any, folder: Path) -> None:
        self.name, self.cluster = name, cluster
        self.folder: Path | None = folder
        self._recorder: Any = None
        self._asked: Any = None  # the call on its way
        self._connection: Any = None  # of this kernel to a cluster
        self._asked_at = (0, 0)
        self._places = Places()
        self._log: float | None = None  # of which log the places are
        self._answered = time.monotonic()
        self._look_at = 0.0

    def read(self) -> Read:
        out = Read()
        more = True
        while more:
            reply = self._ask()
            if reply is None:
                break
            more = self._take(reply, out)
        if out.live is None and self._asked is None:  # nobody is there to answer
            self._read_disk(out)
            out.gone, out.stale = True, time.monotonic() - self._answered
        elif out.live is None:
            out.stale = stale(self._answered)
        return out

    def _take(self, reply: dict[str, Any], out: Read) -> bool:
        self._answered = time.monotonic()
        out.live = reply
        self.folder = Path(reply["folder"])
        if self._log is not None and reply["log"] != self._log:
            self._places, self._log = Places(), reply["log"]
            afresh(out, reply["log"])
            return True  # what came with it is from the old places
        self._log = reply["log"]
        if self._asked_at != (self._places.events, self._places.monitor):  # read from the folder meanwhile
            return True
        return self._places.take(reply["events"], reply["monitor"], out)

    def _ask(self) -> dict[str, Any] | None:
        """The recorder's answer; None while there is none."""
        import ray
        from ray.exceptions import RayError

        from rlkit.cluster import current

        if not ray.is_initialized():
            self._asked = self._recorder = None
            return None
        connection = current() or ray.get_runtime_context().get_job_id()  # a new cluster counts its jobs from one again
        if connection != self._connection:  # handles of an earlier connection are of a cluster that is gone
            self._asked = self._recorder = None
            self._connection, self.cluster = connection, current() or self.cluster
        try:
            if self._asked is None:
                recorder = self._find()
                if recorder is None:
                    return None
                self._asked_at = self._places.events, self._places.monitor
                self._asked = recorder.watch.remote(*self._asked_at, CHUNK)
            if not ray.wait([self._asked], timeout=ANSWER_S)[0]:
                return None
            asked, self._asked = self._asked, None
            reply: dict[str, Any] = actors.get(asked, "watching")
            return reply
        except (RayError, RlkitError, ConnectionError):
            self._asked = self._recorder = None
            return None

    def _find(self) -> Any | None:
        """The recorder. While there is none it is looked for now and then, on a cluster that answers: Ray waits a minute for a dead one."""
        if self._recorder is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            if answers(self.cluster.address):
                self._recorder = actors.find("recorder", actors.namespace(self.name))
        return self._recorder

    def _read_disk(self, out: Read) -> None:
        """Take what the recorder wrote and could not tell any more."""
        if self.folder is None:
            return
        while self._places.take(
            read_whole_lines(self.folder / EVENTS_FILE, self._places.events, CHUNK),
            read_whole_lines(self.folder / MONITOR_FILE, self._places.monitor, CHUNK),
            out,
        ):
            pass

    def fetch(self, method: str, *args: Any) -> bytes | None:
        raw: bytes | None = self._call(method, *args)
        return raw

    def control(self, verb: str) -> str:
        word: str = self._call("control", verb)
        return word

    def _call(self, method: str, *args: Any) -> Any:
        """Raises:
        RunError: the recorder is gone or does not answer; or its own.
        """
        import ray

        gone = f"Run {self.name!r} cannot be reached on {self.cluster.address}"
        self._look_at = 0.0
        recorder = self._find() if ray.is_initialized() else None
        if recorder is None:
            raise RunError(f"{gone}: it is not alive any more, or the cluster is gone. Its folder is {self.folder}.")
        try:
            return actors.wait(
                [getattr(recorder, method).remote(*args)], what=f"the recorder ({method})", timeout_s=CONTROL_S, setting="nothing"
            )[0]
        except (ActorDiedError, DeadlineError, ConnectionError) as error:
            raise RunError(f"{gone}: {error}") from error

    def close(self) -> None:
        self._asked = self._recorder = None

    def __repr__(self) -> str:
        return f"live run {self.name!r} on {self.cluster.address}"


class ClusterFeed:
    """Monitors of a cluster that belong to no run. They live as long as this feed."""

    def __init__(self, cluster: Any) -> None:
        self.name = cluster.spec.name
        self.folder: Path | None = None
        self._cluster = cluster
        self._monitors = monitor.start_for_kernel(cluster.nodes)
        self._after = dict.fromkeys(self._monitors, -1)
        self._asked: dict[Any, Any] = {}  # call on its way -> monitor
        self._answered = time.monotonic()

    def read(self) -> Read:
        import ray
        from ray.exceptions import RayError

        out = Read()
        if self._reachable() and self._monitors:
            try:
                waited_for = set(self._asked.values())
                self._asked |= {m.read.remote(self._after[m]): m for m in self._monitors if m not in waited_for}
                ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=ANSWER_S)
            except (RayError, ConnectionError):
                ready = []
            for call in ready:
                handle = self._asked.pop(call)
                try:
                    self._after[handle], samples = ray.get(call)
                except (RayError, ConnectionError):  # its node is gone, or the cluster
                    continue
                self._answered = time.monotonic()
                out.monitor += samples
        out.monitor.sort(key=lambda sample: sample["t"])
        out.stale = stale(self._answered)
        return out

    def _reachable(self) -> bool:
        """Whether this kernel is connected to the cluster of these monitors, and not to one that took its place."""
        import ray

        return ray.is_initialized() and self._cluster.is_open

    def fetch(self, method: str, *args: Any) -> bytes | None:
        return None

    def control(self, verb: str) -> str:
        raise RunError(f"{self.name} is a cluster: there is no loop to {verb}. Watch one of its runs.")

    def close(self) -> None:
        import ray

        for handle in self._monitors if self._reachable() else ():
            ray.kill(handle)
        self._monitors, self._asked = [], {}

    def __repr__(self) -> str:
        return f"cluster {self.name!r}"


def stale(answered: float) -> float | None:
    """Seconds since the last answer; None while it is not overdue."""
    age = time.monotonic() - answered
    return age if age > OVERDUE_S else None


def afresh(out: Read, t: float) -> None:
    """What was read so far belongs to a run that another one replaced."""
    out.events, out.monitor, out.restarted = [{"t": t, "kind": "rewind", "step": -1, "why": "started afresh"}], [], True
