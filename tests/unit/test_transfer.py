"""Which way the weights go, and how the manifests of several ranks become one."""

from rlkit.transfer import IPC, NCCL, OBJECT_STORE, DeviceBucket, choose, merge
from rlkit.weights import WeightManifest


def test_the_way_follows_who_shares_a_card():
    assert choose([], ["a"]) == OBJECT_STORE  # engines on the CPU
    assert choose(["a"], []) == OBJECT_STORE  # learner on the CPU
    assert choose(["a"], ["a"]) == IPC
    assert choose(["a", "b"], ["b", "a"]) == IPC
    assert choose(["b"], ["a"]) == NCCL
    assert choose(["c", "d"], ["a", "b"]) == NCCL
    assert choose(["a", "c"], ["a"]) == OBJECT_STORE  # NCCL refuses two members on one card


def manifest(gpu, sums):
    bucket = DeviceBucket(("w",), ((2, 3),), "bfloat16", 12, {gpu: ("handle of", gpu)})
    return WeightManifest(4, "bfloat16", ("w",), {"w": (2, 3)}, sums, (bucket,), 12, IPC)


def test_every_ranks_handles_come_together():
    one = merge([manifest("gpu-0", {"w": 7}), manifest("gpu-1", {})])
    assert one.checksums == {"w": 7}
    assert one.buckets[0].handles == {"gpu-0": ("handle of", "gpu-0"), "gpu-1": ("handle of", "gpu-1")}
    assert (one.version, one.bytes, one.transport) == (4, 12, IPC)
