"""Worker processes that can be killed, for grading that may hang, crash or eat memory.

There is no signal handler and no fork of the calling process, so the pool works from a notebook, from threads and from Ray workers. Each
item has its own time limit. The process of an item that runs past it is killed and replaced; the items around it are done by others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.errors import DeadlineError, RewardError

CHILD = Path(__file__).with_name("child.py")
POLL_S = 0.1  # how late a cancellation is seen


class Outcome(NamedTuple):
    """What became of one item.

    ``status``: "ok" (``value`` is the result), "error" (``value`` is (type, message, traceback tail)), "unloadable" (the same, the function
    could not be loaded in the worker), "timeout", "memory" (it ran into the memory limit), "died" (``value`` says how).
    """

    status: str
    value: Any
    seconds: float


class Task(NamedTuple):
    """A pickled function and the key under which workers remember it."""

    key: str
    payload: bytes

    @classmethod
    def of(cls, payload: bytes) -> Task:
        return cls(hashlib.sha256(payload).hexdigest(), payload)

    @classmethod
    def named(cls, module: str, name: str) -> Task:
        """A module's function, which is imported in the worker only."""
        return cls.of(f"c{module}\n{name}\n.".encode())  # pickle's GLOBAL instruction


_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("cancelled", default=None)


@contextlib.contextmanager
def cancel_when(cancelled: Callable[[], bool]) -> Iterator[None]:
    """Pool calls inside of this block end with `Cancelled` as soon as ``cancelled()`` is true."""
    token = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(token)


class Cancelled(Exception):
    """`KillablePool.run` was told to stop."""


class _Worker:
    """One child process and what it is working on."""

    def __init__(self, memory_limit: int) -> None:
        ours, theirs = Pipe(duplex=True)
        life_read, self.life = os.pipe()
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(theirs.fileno()), str(life_read), str(memory_limit)],
                pass_fds=(theirs.fileno(), life_read),
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C in a terminal is for the notebook, not for the workers
            )
        finally:
            theirs.close()
            os.close(life_read)
        self.link: Connection = ours
        self.link.send_bytes(pickle.dumps(sys.path))
        self.ready = False  # False while it starts or loads a function: its items' time has not begun
        self.known: set[str] = set()
        self.queue: deque[int] = deque()  # indices of items sent and not answered; the first one is running
        self.since = time.monotonic()
        self.cpu = 0.0  # CPU seconds that it had used when its running item began

    def cpu_seconds(self) -> float:
        """CPU time since the running item began."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except FileNotFoundError:
            return 0.0  # it has just ended; the next read sees that
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - self.cpu

    def send(self, task: Task, indices: Sequence[int], items: Sequence[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as end-of-file by the next read
            if task.key not in self.known:
                self.link.send_bytes(pickle.dumps(("task", task.key, task.payload)))
                self.known.add(task.key)
                self.ready = False
            self.link.send_bytes(pickle.dumps(("items", task.key, list(items))))
        self.queue.extend(indices)
        self.since = time.monotonic()

    def kill(self) -> int:
        """End the process; returns its exit status."""
        self.process.kill()
        code = self.process.wait()
        self.link.close()
        os.close(self.life)
        return code


class KillablePool:
    """Up to ``workers`` processes (None: one a CPU, at most 16), started when there is something to do.

    ``memory_limit`` bounds each worker's address space in bytes (None: no bound). With ``cpu_clock`` an item's time is what its process
    has computed for, so that a busy machine does not make answers time out; it still ends after four times as long by the wall clock.
    One call runs at a time; others wait.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        memory_limit: int | None = 2 * 2**30,
        cpu_clock: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.workers = workers or min(16, len(os.sched_getaffinity(0)))
        self.memory_limit = memory_limit or 0
        self.cpu_clock = cpu_clock
        self.start_timeout_s = start_timeout_s
        self.progress: tuple[int, int] | None = None  # (items done, items in all) of the call in progress
        self.started = 0  # processes ever started: the first ones and replacements
        self._alive: list[_Worker] = []
        self._lock = threading.Lock()

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [w.process.pid for w in self._alive]

    def close(self) -> None:
        """End all workers. The pool can be used again: it starts new ones."""
        with self._lock:
            self._reset()

    def run(
        self,
        task: Task,
        items: Sequence[Any],
        timeout_s: float,
        *,
        stop_at_failure: bool = False,
    ) -> list[Outcome | None]:
        """Apply the task to each item; outcomes in the order of the items.

        With ``stop_at_failure`` the first outcome that is not "ok" ends the call at once; items that were not done by then are None.

        Raises:
            Cancelled: the condition of `cancel_when` became true; the processes were killed.
            DeadlineError: worker processes did not start within ``start_timeout_s``.
            RewardError: workers end before they are ready.
        """
        with self._lock:
            try:
                return self._run(task, [pickle.dumps(i) for i in items], timeout_s, stop_at_failure)
            except BaseException:  # KeyboardInterrupt as well: a worker may be in the middle of something
                self._reset()
                raise
            finally:
                self.progress = None

    def _run(self, task: Task, items: list[bytes], timeout_s: float, stop_at_failure: bool) -> list[Outcome | None]:
        out: list[Outcome | None] = [None] * len(items)
        todo = deque(range(len(items)))
        left, cancelled = len(items), _cancelled.get()
        # A few items a message saves round trips; few enough that the last worker is not left with many.
        chunk = max(1, min(16, len(items) // (4 * self.workers)))
        while left:
            self.progress = len(items) - left, len(items)
            if cancelled is not None and cancelled():
                raise Cancelled
            self._feed(task, items, todo, chunk)
            now = time.monotonic()
            limit = min((w.since + self._limit(w, timeout_s) for w in self._busy()), default=now)
            ready = wait([w.link for w in self._busy()], timeout=max(0.01, min(POLL_S, limit - now)))
            for worker in [w for w in self._alive if w.link in ready]:
                found = self._read(worker, todo)
                for index, outcome in found:
                    out[index] = outcome
                    left -= 1
                    if stop_at_failure and outcome.status != "ok":
                        self._reset([w for w in self._alive if w.queue])
                        return out
            for worker in self._late(timeout_s):
                index = worker.queue.popleft()
                out[index] = Outcome("timeout", None, timeout_s)
                left -= 1
                todo.extendleft(reversed(worker.queue))
                self._reset([worker])
                if stop_at_failure:
                    self._reset([w for w in self._alive if w.queue])
                    return out
        return out

    def _busy(self) -> list[_Worker]:
        return [w for w in self._alive if w.queue or not w.ready]

    def _limit(self, worker: _Worker, timeout_s: float) -> float:
        return timeout_s if worker.ready else self.start_timeout_s

    def _feed(self, task: Task, items: list[bytes], todo: deque[int], chunk: int) -> None:
        """Give work to idle workers, starting more while there is work for them."""
        while todo:
            idle = next((w for w in self._alive if w.ready and not w.queue), None)
            if idle is None:
                coming = sum(not w.ready for w in self._alive)
                if len(self._alive) < self.workers and coming * chunk < len(todo):
                    self._alive.append(_Worker(self.memory_limit))
                    self.started += 1
                    continue
                return
            take = [todo.popleft() for _ in range(min(chunk, len(todo)))]
            idle.send(task, take, [items[i] for i in take])

    def _read(self, worker: _Worker, todo: deque[int]) -> list[tuple[int, Outcome]]:
        """All answers of a worker that are here. A worker that ended is replaced; its running item takes the blame."""
        found: list[tuple[int, Outcome]] = []
        try:
            while worker.link.poll(0):
                status, value, seconds, worker.cpu = pickle.loads(worker.link.recv_bytes())
                worker.since = time.monotonic()
                if status in ("ready", "loaded"):
                    worker.ready = True
                    continue
                found.append((worker.queue.popleft(), Outcome(status, value, seconds)))
                if status == "memory":  # its heap may be full: take a fresh process
                    todo.extendleft(reversed(worker.queue))
                    self._reset([worker])
                    return found
        except (EOFError, ConnectionResetError):
            self._alive.remove(worker)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)  # its own exit status, rather than that of the kill below
            code = worker.kill()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            if not worker.ready and not worker.queue:
                raise RewardError(f"A grading process ended with {how} before it was ready; its output is in the log.") from None
            if worker.queue:
                found.append((worker.queue.popleft(), Outcome("died", how, time.monotonic() - worker.since)))
                todo.extendleft(reversed(worker.queue))
        return found

    def _late(self, timeout_s: float) -> list[_Worker]:
        now = time.monotonic()
        late = [w for w in self._busy() if self._over(w, now - w.since, timeout_s) and not w.link.poll(0)]
        for worker in late:
            if not worker.ready:
                raise DeadlineError(f"A grading process was not ready after {self.start_timeout_s:g} s (setting start_timeout_s).")
        return late

    def _over(self, worker: _Worker, waited: float, timeout_s: float) -> bool:
        if waited <= self._limit(worker, timeout_s):
            return False
        return not (self.cpu_clock and worker.ready and waited <= 4 * timeout_s and worker.cpu_seconds() <= timeout_s)

    def _reset(self, workers: Sequence[_Worker] | None = None) -> None:
        for worker in list(self._alive if workers is None else workers):
            self._alive.remove(worker)
            worker.kill()
