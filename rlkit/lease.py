"""Which kernel drives a run. One at a time: two kernels that update one learner would train on each other's leftovers.

A kernel is identified by its host, process id and process start time, so that a killed kernel is recognised at once from the same host;
from another host its lease runs out when it has not been renewed for `EXPIRES_S` seconds.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

RENEW_S = 2.0
EXPIRES_S = 20.0


@dataclass(frozen=True)
class Driver:
    """This kernel, as the run's recorder knows it."""

    id: str
    host: str  # host name and boot id: the same machine, not only the same name
    pid: int
    started: float  # process start, seconds since the epoch

    @classmethod
    def this(cls) -> Driver:
        """The driver of this process; the same one on every call, another one after a fork."""
        global _this
        if _this is None or _this.pid != os.getpid():
            started = psutil.Process().create_time()
            _this = cls(uuid.uuid4().hex[:12], _host(), os.getpid(), started)
        return _this

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def is_dead_for_sure(self) -> bool:
        """True only when this process is on the same machine and sees that the driver's process is gone."""
        if self.host != _host():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition('/')[0]}"


_this: Driver | None = None


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
