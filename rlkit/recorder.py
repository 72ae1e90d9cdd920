"""The recorder: one small actor a run that owns the event log, the lease and the samples on disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rlkit import checkpoints
from rlkit.errors import RunBusyError, RunError
from rlkit.eventlog import EVENTS_FILE, MONITOR_FILE, History, finite, line_of, read_events, sample_rows, samples_file
from rlkit.lease import EXPIRES_S, Driver
from rlkit.live import Live
from rlkit.tail import read_whole_lines
from rlkit.tokentexts import TOKENIZER_FILE


class Recorder:
    """Owns a run's folder. All methods are short; those that change something take the caller's lease epoch."""

    def __init__(self, name: str, folder: str, seed: int, fresh: bool = False) -> None:
        self.name = name
        path = Path(folder).expanduser()
        self.folder = path if path.is_absolute() else Path.home() / path
        if fresh and self.folder.exists():
            self.folder.rename(_free_name(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = History()
        self.events: list[dict[str, Any]] = read_events(self.folder / EVENTS_FILE, repair=True)
        for event in self.events:
            self.history.add(event)
        self._file = (self.folder / EVENTS_FILE).open("a", encoding="utf-8")
        self._driver: Driver | None = None
        self._epoch = 0
        self._renewed = 0.0
        self.live = Live(name)
        self._observing = threading.Lock()
        self._monitor = (self.folder / MONITOR_FILE).open("a", encoding="utf-8")
        if self.history.seed is None:
            self._append({"kind": "open", "name": name, "seed": seed})

    # --- the lease -------------------------------------------------------------------------------------------------------------------

    def holder(self) -> dict[str, Any] | None:
        """The driver that holds the lease, or None when nobody does or it ran out."""
        if self._driver is None or time.monotonic() - self._renewed > EXPIRES_S:
            return None
        return self._driver.as_dict()

    def acquire(self, driver: dict[str, Any], seen_dead: str | None, takeover: bool) -> int:
        """Take the lease; returns its epoch. ``seen_dead`` is the id of a holder whose process the caller saw to be gone.

        Raises:
            RunBusyError: another kernel holds it.
        """
        new, old = Driver(**driver), self.holder()
        if old is not None and old["id"] not in (new.id, seen_dead) and not takeover:
            raise RunBusyError(
                f"Run {self.name!r} is driven by {Driver(**old)}. Stop that kernel first, or take the run over with "
                f"rlkit.attach({self.name!r}, takeover=True): the other kernel's next step then fails."
            )
        if self._driver is None or self._driver.id != new.id:
            self._epoch += 1
            self._driver = new
        self._renewed = time.monotonic()
        return self._epoch

    @ray.method(concurrency_group="control")
    def renew(self, epoch: int, phases: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Keep the lease. False when it has gone to another kernel. ``phases`` are those in progress from now on, where they change."""
        if epoch != self._epoch:
            return False
        self._renewed = time.monotonic()
        if phases is not None:
            self.live.doing(phases)
        return True

    def release(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._driver = None

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise RunBusyError(f"Run {self.name!r} was taken over by {self._driver}; this kernel no longer drives it.")

    # --- the loop's live state: answered while samples are being written ---------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def loop(self, epoch: int, total: int | None) -> None:
        """A loop over ``total`` steps begins; None: it ended."""
        if epoch == self._epoch:
            self.live.loop(epoch, total)

    @ray.method(concurrency_group="control")
    def boundary(self, epoch: int) -> dict[str, Any]:
        """Where the run is between two steps and what the loop is to do; see `rlkit.live`."""
        self._check(epoch)
        committed = self.history.committed
        return {"committed": committed, "last": self.history.steps.get(committed)} | self.live.boundary(committed, time.time())

    @ray.method(concurrency_group="control")
    def progress(self, epoch: int, since: float, facts: Mapping[str, Any]) -> None:
        """How far the phase is that began at ``since``."""
        if epoch == self._epoch:
            self.live.progress(since, facts)

    @ray.method(concurrency_group="control")
    def control(self, verb: str) -> str:
        """Ask the loop for something, from any kernel; see `rlkit.live`."""
        return self.live.ask(verb, self.holder() is not None)

    @ray.method(concurrency_group="control")
    def watch(self, events_at: int, monitor_at: int, most: int) -> dict[str, Any]:
        """What is new since these places (bytes) in the log and in the monitor's file, at most ``most`` bytes each, and the live state."""
        holder = self.holder()
        return {
            "log": self.events[0]["t"],  # another one: the run was started afresh under this name
            "events": read_whole_lines(self.folder / EVENTS_FILE, events_at, most),
            "monitor": read_whole_lines(self.folder / MONITOR_FILE, monitor_at, most),
            "now": time.time(),
            "folder": str(self.folder),
            "committed": self.history.committed,
            "driver": None if holder is None else str(Driver(**holder)),
            "live": self.live.state(holder is not None),
        }

    @ray.method(concurrency_group="control")
    def observe(self, lines: str) -> None:
        """Samples of a node's monitor, as lines of JSON."""
        with self._observing:
            self._monitor.write(lines)
            self._monitor.flush()

    @ray.method(concurrency_group="control")
    def read_samples(self, step: int) -> bytes | None:
        """The Parquet file of a step's samples; None when there is none."""
        path = samples_file(self.folder, step)
        return path.read_bytes() if path.is_file() else None

    @ray.method(concurrency_group="control")
    def read_tokenizer(self) -> bytes | None:
        """What `keep_tokenizer` wrote; None when there is none."""
        path = self.folder / TOKENIZER_FILE
        return path.read_bytes() if path.is_file() else None

    # --- writing ---------------------------------------------------------------------------------------------------------------------

    def append(self, epoch: int, events: Sequence[dict[str, Any]]) -> int:
        """Append events; returns the number of events so far."""
        self._check(epoch)
        for event in events:
            self._append(event)
            if event["kind"] == "phase":
                self.live.ended(event["t_start"])
        return len(self.events)

    def begin(self, epoch: int, step: int, version: int | None) -> None:
        """Start ``step`` at learner policy version ``version``."""
        self._check(epoch)
        if step != self.history.committed + 1:
            raise RunError(f"Step {step} cannot begin: {self.history.committed + 1} steps are complete.")
        self._append({"kind": "begin", "step": step, "version": version})
        self.live.step(step)

    def commit(self, epoch: int, event: dict[str, Any]) -> None:
        """Complete a step: from here on it is never done again."""
        self._check(epoch)
        step, done = event["step"], self.history.committed
        if step <= done:
            raise RunError(f"Step {step} was logged already; the next one is {done + 1}.")
        if step != done + 1:
            raise RunError(f"Step {step} is out of order; the next one is {done + 1}.")
        self._append({"kind": "step"} | event)
        self.live.step(None)

    def rewind(self, epoch: int, step: int, why: str) -> None:
        """Go on from the end of ``step`` (-1: from the start)."""
        self._check(epoch)
        self._append({"kind": "rewind", "step": step, "why": why})

    def write_samples(self, step: int, shards: list[Any], scores: list[Any], advantages: Any = None) -> str:
        """Write a step's samples as Parquet; ``shards`` and ``scores`` are lists of references, fetched here."""
        import pandas as pd

        if not self.folder.is_dir():
            raise RunError(f"The samples of step {step} cannot be kept: the folder of run {self.name!r}, {self.folder}, was deleted.")
        rows: list[dict[str, Any]] = []
        for shard, score in zip(ray.get(list(shards)), ray.get(list(scores)), strict=True):
            rows += sample_rows(step, shard, score)
        frame = pd.DataFrame(rows)
        if advantages is not None:
            frame["advantage"] = advantages.reshape(-1)
        target = samples_file(self.folder, step)
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        frame.to_parquet(part, index=False)
        part.replace(target)
        return str(target)

    def keep_tokenizer(self, raw: bytes) -> None:
        """Keep the engines' ``tokenizer.json`` in the run's folder; nothing is done where it is empty."""
        if raw:
            part = self.folder / f"{TOKENIZER_FILE}.part"
            part.write_bytes(raw)
            part.replace(self.folder / TOKENIZER_FILE)

    # --- reading ---------------------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the run is; small, whatever its length."""
        h = self.history
        last = h.steps.get(h.committed)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "seed": h.seed,
            "committed": h.committed,
            "last": last,
            "begun": h.begun.get(h.committed + 1),
            "parts": h.parts,
            "events": len(self.events),
            "opened": self.events[0]["t"],
            "holder": self.holder(),
        }

    def positions(self, step: int) -> dict[str, Any]:
        """Data positions at the end of ``step`` (-1: the start)."""
        return dict(self.history.steps[step]["positions"]) if step in self.history.steps else {}

    def read(self, since: int = 0) -> list[dict[str, Any]]:
        """Events from number ``since`` on."""
        return self.events[since:]

    def phases(self, step: int) -> list[dict[str, Any]]:
        """The phase events of the latest attempt at ``step``."""
        out: list[dict[str, Any]] = []
        for event in self.events:
            if event["kind"] == "begin" and event["step"] == step:
                out = []
            elif event["kind"] == "phase" and event.get("step") == step:
                out.append(event)
        return out

    def checkpoints(self, verb: str, *args: Any) -> Any:
        """``list``, ``verify`` (a step) or ``prune`` (how many to keep), on the checkpoints in the run's folder."""
        call: Any = {"list": checkpoints.found, "verify": checkpoints.verify, "prune": checkpoints.prune}[verb]
        return call(self.folder, *args)

    def flush(self) -> None:
        """Force everything to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _append(self, event: Mapping[str, Any]) -> None:
        """Raises:
        RunError: the log's file was deleted: what is written to it would be lost.
        """
        self.check_log()
        full: dict[str, Any] = finite({"t": time.time()} | dict(event))  # as a reader of the file has it
        self._file.write(line_of(full))
        self._file.flush()
        self.events.append(full)
        self.history.add(full)

    def check_log(self) -> None:
        """Raises:
        RunError: the log's file was deleted, with the run's folder or without it.
        """
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise RunError(
                f"The folder of run {self.name!r}, {self.folder}, was deleted while the run is alive; its log cannot be kept. "
                f"run.close(), or rlkit kill {self.name}, ends the run; then start it again."
            )


def _free_name(folder: Path) -> Path:
    """A name beside ``folder`` that is not taken, from the time it is set aside."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (folder.with_name(f"{folder.name}.{stamp}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(n for n in names if not n.exists())
