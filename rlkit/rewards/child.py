"""The program of one worker process of `rlkit.rewards.pool`. Started as a script; imports nothing of rlkit by itself.

Three inherited file descriptors: requests and answers on a private socket, and a life pipe whose other end only the parent holds.
When the parent goes away, however it died, the kernel signals SIGIO on the life pipe; its default action ends this process even while
C code holds the interpreter (a big-integer power, a regular expression).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import resource
import select
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


def die_with_parent(life: int) -> None:
    """Arrange that the end of the parent ends this process."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(life, select.POLLIN)
    if poll.poll(0):  # it was gone before the signal was armed
        os._exit(0)


def failure(error: BaseException) -> tuple[str, str, str]:
    """(type name, message, last lines of the traceback without those of this package)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != os.path.dirname(__file__)]
    tail = "".join(traceback.format_list(frames[-3:])).rstrip()
    return type(error).__name__, str(error)[:2000], tail[-2000:]


def serve(link: Connection) -> None:
    """Answer requests until the parent closes the link.

    ``("task", key, payload)`` loads a pickled function and is answered by ``("loaded", key)``. ``("items", key, [item, ...])`` applies
    it to each item in turn, with one answer an item: ``("ok", value, seconds, CPU seconds of this process)``, or "error" with (type,
    message, traceback), or "memory".
    """
    tasks: dict[str, Any] = {}
    broken: dict[str, tuple[str, str, str]] = {}
    link.send_bytes(pickle.dumps(("ready", os.getpid(), 0.0, time.process_time())))
    while True:
        request = pickle.loads(link.recv_bytes())
        if request[0] == "task":
            _, key, payload = request
            try:
                tasks[key] = pickle.loads(payload)
            except BaseException as error:  # noqa: BLE001 - reported with the first item
                broken[key] = failure(error)
            link.send_bytes(pickle.dumps(("loaded", key, 0.0, time.process_time())))
            continue
        _, key, packed = request
        for data in packed:
            link.send_bytes(answer(tasks.get(key), broken.get(key), data))


def answer(task: Any, broken: tuple[str, str, str] | None, data: bytes) -> bytes:
    """One item's pickled answer."""
    start = time.monotonic()
    try:
        if broken is not None:
            return pickle.dumps(("unloadable", broken, 0.0, time.process_time()))
        value = task(pickle.loads(data))
        return pickle.dumps(("ok", value, time.monotonic() - start, time.process_time()))
    except MemoryError:
        return pickle.dumps(("memory", None, time.monotonic() - start, time.process_time()))
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like are the item's failure too; the parent raises it
        return pickle.dumps(("error", failure(error), time.monotonic() - start, time.process_time()))


def main() -> None:
    link_fd, life = int(sys.argv[1]), int(sys.argv[2])
    memory = int(sys.argv[3])
    die_with_parent(life)
    link = Connection(link_fd)
    sys.path[:] = pickle.loads(link.recv_bytes())
    if memory > 0:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent closed the link
        serve(link)


if __name__ == "__main__":
    main()
