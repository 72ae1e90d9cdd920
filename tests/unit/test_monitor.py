"""The monitor's samples: GPUs by role, parts of MIG, no NVML; means for a long run; what is handed to a recorder that comes and goes."""

import types

import pytest

from rlkit import monitor
from rlkit.nvml import Gpus, NoGpus, Roles, role_of_title

GIB = 2**30


class NvmlError(Exception):
    pass


class Nvml:
    """Stands for the module pynvml: a whole card, and one that is split by MIG."""

    NVMLError, NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE, nvmlMemory_v2 = NvmlError, 0, 1, 2

    def __init__(self, mig=(False,), missing=(), old=False):
        self.mig, self.missing, self.old = mig, missing, old

    def __getattr__(self, name):
        def call(*args):
            if name in self.missing:
                raise NvmlError("Not Supported")
            return getattr(self, f"_{name.removeprefix('nvml').removeprefix('Device')}")(*args)

        return call

    def _Init(self): ...

    def _GetCount(self):
        return len(self.mig)

    def _GetHandleByIndex(self, i):
        return i

    def _GetUUID(self, d):
        return f"GPU-{d}"

    def _GetName(self, d):
        return b"A card"

    def _GetMigMode(self, d):
        if not self.mig[d]:
            raise NvmlError("Not Supported")
        return (1, 1)

    def _GetMaxMigDeviceCount(self, d):
        return 3

    def _GetMigDeviceHandleByIndex(self, d, i):
        if i == 2:
            raise NvmlError("Not Found")
        return f"{d}.{i}"

    def _GetMemoryInfo(self, d, version=1):
        """By version 1 what the driver keeps counts as used."""
        if version == self.nvmlMemory_v2 and self.old:
            raise NvmlError("Function Not Found")
        return types.SimpleNamespace(used=(10 if version == self.nvmlMemory_v2 else 11) * GIB, total=80 * GIB)

    def _GetUtilizationRates(self, d):
        return types.SimpleNamespace(gpu=93)

    def _GetComputeRunningProcesses(self, d):
        held = {7: 4 * GIB, 8: 3 * GIB, 9: 1 * GIB, 10: None}
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]

    def _GetPowerUsage(self, d):
        return 512_340

    def _GetTemperature(self, d, which):
        return 61


def roles(pid):
    return {7: "engine", 8: "learner"}.get(pid, "other")


def test_a_card_with_memory_by_role():
    (gpu,), note = Gpus(Nvml(), roles).read()
    assert note == ""
    assert gpu == {
        "index": 0,
        "uuid": "GPU-0",
        "name": "A card",
        "utilization": 93,
        "memory": 10 * GIB,
        "memory_total": 80 * GIB,
        "roles": {"engine": 4 * GIB, "learner": 3 * GIB, "other": 3 * GIB},  # with what no process that can be seen holds
        "power": 512.3,
        "temperature": 61.0,
    }


def test_a_card_that_is_split_by_mig_is_told_part_by_part():
    gpus, note = Gpus(Nvml(mig=(True, False)), roles).read()
    assert [(g["index"], g["uuid"], g["utilization"]) for g in gpus] == [(0, "GPU-0.0", None), (0, "GPU-0.1", None), (1, "GPU-1", 93)]
    assert note == "GPU 0 is split by MIG: NVML gives no utilisation of its parts"


def test_what_a_card_cannot_say_is_none():
    missing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses")
    (gpu,), _ = Gpus(Nvml(missing=missing), roles).read()
    assert (gpu["power"], gpu["utilization"], gpu["roles"]["other"]) == (None, None, 10 * GIB)
    assert Gpus(Nvml(missing=("nvmlDeviceGetMemoryInfo",)), roles).read() == ([], "")


def test_an_old_driver_counts_what_it_keeps_as_used():
    (gpu,), _ = Gpus(Nvml(old=True), roles).read()
    assert (gpu["memory"], gpu["roles"]["other"]) == (11 * GIB, 4 * GIB)


def test_a_process_of_another_container_is_other_and_said():
    (gpu,), note = Gpus(Nvml(), lambda pid: {7: "engine", 8: None}.get(pid, "other")).read()
    assert gpu["roles"] == {"engine": 4 * GIB, "learner": 0, "other": 6 * GIB}
    assert note == "GPU 0 has 1 process of another container, counted as other"


def test_why_there_are_no_gpus(monkeypatch):
    with pytest.raises(NoGpus, match="NVML sees no GPU on this node"):
        Gpus(Nvml(mig=()))
    with pytest.raises(NoGpus, match="no NVML: Not Supported"):
        Gpus(Nvml(missing=("nvmlInit",)))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(NoGpus, match="nvidia-ml-py is not installed"):
        Gpus()
    monkeypatch.setattr(monitor, "object_store", lambda: (None, None))
    assert monitor.Look("here")()["note"] == "no NVML: nvidia-ml-py is not installed on this node"


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::VllmEngine.generate", "engine"),
        ("ray::HfEngine", "engine"),
        ("ray::Rank.update", "learner"),
        ("ray::Grader", None),
        ("zsh", None),
    ],
)
def test_roles_by_the_name_that_ray_gives_a_process(title, role):
    assert role_of_title(title) == role


def test_the_role_of_a_process_that_is_gone():
    assert Roles()(2**22 + 1) is None  # no process has so high a number


def sample(t, cpu=10.0, memory=5, gpus=()):
    return {"t": t, "node": "a", "cpu": cpu, "memory": memory, "memory_total": 9, "object_store": 0, "gpus": list(gpus), "note": ""}


def gpu(utilization, memory, power=None):
    return {"uuid": "g", "utilization": utilization, "memory": memory, "power": power, "temperature": 50, "roles": {"engine": memory}}


def test_some_samples_as_one():
    made = monitor.merge([sample(1, 10.0, 5, [gpu(10, 3)]), sample(2, 20.0, 7, [gpu(30, 8)]), sample(3, 60.0, 6, [gpu(20, 4)])])
    assert (made["t"], made["cpu"], made["memory"]) == (3, 30.0, 7)
    assert made["gpus"] == [{"uuid": "g", "utilization": 20.0, "memory": 8, "power": None, "temperature": 50.0, "roles": {"engine": 8}}]
    assert monitor.merge([sample(1)]) == sample(1)


def test_nodes_of_one_name_are_told_apart():
    def node(host, id):
        return types.SimpleNamespace(host=host, ip="10.0.0.1", id=id)

    assert monitor.labels([node("a", "123456789"), node("", "2")]) == ["a", "10.0.0.1"]
    assert monitor.labels([node("a", "123456789"), node("a", "223456789")]) == ["a (123456)", "a (223456)"]


def test_later_samples_are_handed_on_as_means(monkeypatch):
    monkeypatch.setattr(monitor, "FIRST", 3)
    hand = monitor.Hand("nowhere")
    for t in range(3 + 2 * monitor.LATER_EVERY + 1):
        hand.keep(sample(t))
    assert [line.partition(",")[0] for line in hand._kept] == ['{"t":0', '{"t":1', '{"t":2', '{"t":7', '{"t":12']
