"""Killing an engine at a moment that does not depend on the machine's speed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def killed_while_sampling(engine: Any, pid: int, within_s: float = 60.0) -> Iterator[None]:
    """Inside, the engine's process is killed as soon as it has sampled some tokens of a call."""
    import ray

    failed: list[str] = []

    def kill() -> None:
        deadline = time.monotonic() + within_s
        while ray.get(engine.progress.remote())["tokens"] == 0:
            if time.monotonic() > deadline:
                failed.append(f"the engine sampled nothing within {within_s:g} s")
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed, failed
