"""Memory as it is: of a GPU and of a process by phase, of a node's host. Imports torch only where a GPU is measured."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import ResourceError
from rlkit.reprs import gib

GIB = 2**30
HOST_RESERVE = 0.05  # of a node's memory, kept free for everything that is not counted here
_CGROUP = Path("/sys/fs/cgroup")


class Meter:
    """The peak of this process between `begin` and `end`, on its GPU (``device`` "cuda") or in host memory."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def begin(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def end(self) -> dict[str, float]:
        """GiB. On a GPU ``allocated_gib`` and ``reserved_gib`` are this process's peaks of torch's allocator since `begin`, and
        ``card_gib`` is what all processes hold of the card now; ``rss_gib`` is the process's peak in host memory since it started."""
        found = {"rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self.cuda:
            import torch

            free, total = torch.cuda.mem_get_info()
            found |= {
                "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
                "card_gib": (total - free) / GIB,
            }
        return found


def named(role: str, found: Mapping[str, float]) -> dict[str, float]:
    """A `Meter`'s numbers as an event holds them: ``memory/rank-0/allocated_gib`` ..."""
    return {f"memory/{role}/{key}": value for key, value in found.items()}


def of_engines(replies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The engines' memory as a phase event holds it."""
    return {k: v for i, reply in enumerate(replies) for k, v in named(f"engine-{i}", reply["memory"]).items()}


def step_metrics(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The peaks over a step's phase events: ``memory/engine_peak_gib`` and ``memory/learner_peak_gib`` of the process that held most (on
    the GPU, or in host memory where there is none), ``memory/card_used_gib`` of the fullest card."""
    out: dict[str, float] = {}
    numbers = [(k, v) for phase in phases for k, v in phase.items() if k.startswith("memory/")]
    on_gpu = any(key.endswith("/allocated_gib") for key, _ in numbers)
    for key, value in numbers:
        _, role, what = key.split("/", 2)
        kind = {"engine": "engine", "rank": "learner"}.get(role.split("-")[0])
        if what == ("allocated_gib" if on_gpu else "rss_gib") and kind is not None:
            name = f"memory/{kind}_peak_gib"
        elif what == "card_gib":
            name = "memory/card_used_gib"
        else:
            continue
        out[name] = max(out.get(name, 0.0), value)
    return out


def host_memory() -> tuple[int, int]:
    """(bytes that can still be had, bytes in all) of this node, within this process's cgroup."""
    import psutil

    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for limit, used, stat in _cgroup_files():
        most = _number(limit)
        if most is None or most >= total:
            continue
        held = (_number(used) or 0) - _reclaimable(stat)
        free, total = min(free, max(0, most - held)), most
    return free, total


def check_host(needed: float, what: str, settings: str, found: tuple[int, int] | None = None) -> None:
    """Refuse to put ``needed`` bytes into host memory that is not there.

    Raises:
        ResourceError: names the numbers, ``what`` and the ``settings`` to change.
    """
    free, total = host_memory() if found is None else found
    spare = free - HOST_RESERVE * total
    if needed > spare:
        raise ResourceError(
            f"{what} would take {gib(needed)} of host memory; of this node's {gib(total)}, {gib(free)} are free and {HOST_RESERVE:.0%} "
            f"stay in reserve. {settings}"
        )


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    """(limit, usage, statistics) of cgroup version 2, then 1."""
    one = _CGROUP / "memory"
    return [
        (_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat"),
        (one / "memory.limit_in_bytes", one / "memory.usage_in_bytes", one / "memory.stat"),
    ]


def _number(file: Path) -> int | None:
    """The whole number in a file; None when there is no such file, or it says "max"."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Bytes of file cache, which the kernel gives back when they are asked for."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", stat.read_text(), re.M) if stat.is_file() else None
    return int(found[1]) if found else 0
