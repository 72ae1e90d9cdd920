"""What the GPUs of this machine do, through NVML: utilisation, memory by the role of the process that holds it, power, temperature.

A GPU that is split by MIG is told part by part; NVML gives no utilisation for parts, and power and temperature of the whole card only,
which then stand with each part. A process of another container has no role that is known here: its memory counts as "other", with a note.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import psutil

from rlkit.errors import RlkitError

ROLES = {"VllmEngine": "engine", "HfEngine": "engine", "Rank": "learner"}  # by the class of the actor that Ray names the process after
ROLE_KEPT_S = 30.0
PARENTS = 4  # vLLM's workers are children of the engine's process, or of another child of it


class NoGpus(RlkitError):
    """Why there is nothing to read."""


class Gpus:
    """The GPUs of this machine. ``nvml`` is the module ``pynvml``, or what stands for it in a test.

    Raises:
        NoGpus: nvidia-ml-py is not installed, there is no driver, or no GPU.
    """

    def __init__(self, nvml: Any = None, role_of: Callable[[int], str | None] | None = None) -> None:
        if nvml is None:
            try:
                import pynvml
            except ImportError as error:
                raise NoGpus("no NVML: nvidia-ml-py is not installed on this node") from error
            nvml = pynvml
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NoGpus(f"no NVML: {_missing(str(error))}") from error
        if not count:
            raise NoGpus("NVML sees no GPU on this node")
        self._cards = [(i, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        self._role_of = role_of or Roles()

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """(one dict a GPU or MIG part, a note or ""); see `rlkit.monitor`."""
        out: list[dict[str, Any]] = []
        notes: list[str] = []
        for index, card in self._cards:
            power = self._number(self._nvml.nvmlDeviceGetPowerUsage, card)  # mW
            facts = {
                "power": None if power is None else round(power / 1000, 1),
                "temperature": self._number(self._nvml.nvmlDeviceGetTemperature, card, self._nvml.NVML_TEMPERATURE_GPU),
            }
            parts = self._parts(card)
            if parts:
                notes.append(f"GPU {index} is split by MIG: NVML gives no utilisation of its parts")
            for place, part in enumerate(parts):
                out += self._one(index, part, facts | {"utilization": None, "part": place}, notes)
            if not parts:
                rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, card)
                out += self._one(index, card, facts | {"utilization": None if rates is None else int(rates.gpu)}, notes)
        return out, "; ".join(notes)

    def _one(self, index: int, device: Any, facts: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
        memory = self._memory(device)
        if memory is None:  # a card that fell off the bus
            return []
        used = int(memory.used)
        roles, unseen = dict.fromkeys(("engine", "learner", "other"), 0), 0
        for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, device) or ():
            role, held = self._role_of(process.pid), process.usedGpuMemory
            unseen += role is None
            if role in ("engine", "learner") and held is not None:
                roles[role] += int(held)
        roles["other"] = max(0, used - sum(roles.values()))
        if unseen:
            notes.append(f"GPU {index} has {unseen} process{'es' if unseen > 1 else ''} of another container, counted as other")
        named = {
            "index": index,
            "uuid": _text(self._ask(self._nvml.nvmlDeviceGetUUID, device)),
            "name": _text(self._ask(self._nvml.nvmlDeviceGetName, device)),
        }
        return [named | {"memory": used, "memory_total": int(memory.total), "roles": roles} | facts]

    def _memory(self, device: Any) -> Any | None:
        """Without what the driver keeps for itself, as nvidia-smi shows it, where NVML tells the two apart."""
        whole = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, device, self._nvml.nvmlMemory_v2)
        return whole if whole is not None else self._ask(self._nvml.nvmlDeviceGetMemoryInfo, device)

    def _parts(self, card: Any) -> list[Any]:
        """The MIG parts of a card that is split."""
        nvml = self._nvml
        mode = self._ask(nvml.nvmlDeviceGetMigMode, card)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        most = self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, card) or 0
        found = [self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, i) for i in range(most)]
        return [part for part in found if part is not None]

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any | None:
        """NVML's answer; None where the card or its driver cannot say."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None

    def _number(self, call: Callable[..., Any], *args: Any) -> float | None:
        found = self._ask(call, *args)
        return None if found is None else float(found)


class Roles:
    """What a process is in a run, by the name that Ray gave it or one of its parents: "engine", "learner" or "other"; None for one that
    cannot be seen from here, since it runs in another container."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, str | None]] = {}

    def __call__(self, pid: int) -> str | None:
        now = time.monotonic()
        at, role = self._known.get(pid, (-ROLE_KEPT_S, "other"))
        if now - at >= ROLE_KEPT_S:
            role = _role(pid)
            if len(self._known) > 1000:  # of processes that ended long ago
                self._known.clear()
            self._known[pid] = (now, role)
        return role


def _role(pid: int) -> str | None:
    if not psutil.pid_exists(pid):
        return None
    try:
        process: psutil.Process | None = psutil.Process(pid)
        for _ in range(PARENTS):
            if process is None:
                break
            role = role_of_title(" ".join(process.cmdline()[:1]))
            if role is not None:
                return role
            process = process.parent()
    except psutil.Error:  # of another user, or gone meanwhile
        pass
    return "other"


def role_of_title(title: str) -> str | None:
    """The role behind ``ray::VllmEngine.generate``; None where the title is no actor's of ours."""
    found = re.match(r"ray::(\w+)", title)
    return ROLES.get(found[1]) if found else None


def _missing(message: str) -> str:
    return "no NVIDIA driver on this node" if "Not Found" in message or "Driver Not Loaded" in message else message


def _text(value: Any) -> str:
    return "" if value is None else value.decode() if isinstance(value, bytes) else str(value)
