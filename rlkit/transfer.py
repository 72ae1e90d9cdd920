"""Weights from GPU to GPU, the learner's side: CUDA IPC where a rank and an engine share a card, NCCL where they do not.

Both start as the object store does, with `rlkit.weights.publish` on the learner; only the buckets differ. They stay on the rank's GPU, and

- ``ipc``: the manifest carries a handle to each bucket's memory, one a GPU; every engine on that card opens it and copies from it;
- ``nccl``: rank 0 and the engines' workers form a group once, and rank 0 broadcasts bucket after bucket while the engines load.

The engines take both with vLLM's own weight-transfer engines, see `rlkit.engines.receiving`. Afterwards `rlkit.weights.check` compares
checksums, whatever the way. Buckets are freed when the sync is over: the allocator keeps their memory for the next one, or for an update.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlkit.weights import WeightManifest

OBJECT_STORE, IPC, NCCL = "object_store", "ipc", "nccl"
LINK_TIMEOUT_S = 120
BUCKET_BYTES = 512 * 2**20  # of a bucket on a GPU: opening a handle costs more than what it leads to


@dataclass(frozen=True)
class DeviceBucket:
    """Some tensors of one dtype, one after the other, in the memory of a GPU."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bytes: int
    handles: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # GPU uuid -> CUDA IPC arguments; none with NCCL


def choose(engine_gpus: Sequence[str], rank_gpus: Sequence[str]) -> str:
    """The way for engines' workers and ranks on these GPUs (uuids; none on the CPU).

    ``ipc`` when every worker shares its card with a rank, ``nccl`` when none does, else the object store: NCCL refuses two members on
    one card, and CUDA IPC does not reach another one.
    """
    if not engine_gpus or not rank_gpus:
        return OBJECT_STORE
    shared = [gpu in set(rank_gpus) for gpu in engine_gpus]
    if all(shared):
        return IPC
    return OBJECT_STORE if any(shared) else NCCL


class Exporter:
    """Packs buckets on a rank's GPU and keeps them alive until `clear`."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.flats: list[torch.Tensor] = []
        self._counts: list[tuple[Any, int]] = []  # of the readers of each bucket

    def pack(self, items: Sequence[tuple[str, torch.Tensor]], dtype: str, size: int) -> DeviceBucket:
        """Copy ``items`` into one flat tensor on their GPU; ``size`` is its bytes. Returns before the copies are done: see `ready`."""
        import torch

        device = torch.device("cuda", torch.cuda.current_device())
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        fill(flat, [tensor for _, tensor in items], dtype)
        self.flats.append(flat)
        handles = {gpu_uuid(device): self._export(flat)} if self.transport == IPC else {}
        return DeviceBucket(tuple(n for n, _ in items), tuple(tuple(t.shape) for _, t in items), dtype, size, handles)

    def ready(self) -> None:
        """Wait until all buckets are filled: another process sees the memory, not this one's streams."""
        import torch

        torch.cuda.synchronize()

    def clear(self) -> None:
        """Free the buckets; engines must be done with them."""
        import torch

        for count in self._counts:
            torch.UntypedStorage._release_ipc_counter_cuda(*count)  # type: ignore[attr-defined]
        self._counts.clear()
        self.flats.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def _export(self, flat: torch.Tensor) -> tuple[Any, ...]:
        """The arguments with which torch opens ``flat`` in any number of other processes.

        torch frees exported memory when its count of readers is 0, and an export counts as one reader: with two of them the count falls
        below 0, with one that was killed it stays at 1, and either way the memory is lost. Here the end of the sync frees a bucket, so
        readers are made to count down a spare export instead.
        """
        arguments = _arguments(flat)
        self._counts.append(_count(arguments))
        at = _positions()
        arguments[at["ref_counter_handle"]], arguments[at["ref_counter_offset"]] = _count(_spare(flat.device.index))
        return tuple(arguments)


def _arguments(tensor: torch.Tensor) -> list[Any]:
    """What rebuilds a tensor on a GPU in another process."""
    from torch.multiprocessing.reductions import reduce_tensor

    return list(reduce_tensor(tensor)[1])


def _count(arguments: Sequence[Any]) -> tuple[Any, int]:
    """Where the count of an export's readers is: a block of shared memory, and a place in it."""
    at = _positions()
    return arguments[at["ref_counter_handle"]], arguments[at["ref_counter_offset"]]


@functools.cache
def _spare(device: int) -> tuple[Any, ...]:
    """An export of a few bytes that live as long as this process."""
    import torch

    keep = torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", device))
    return (*_arguments(keep), keep)


@functools.cache
def _positions() -> dict[str, int]:
    """Name -> place of the arguments of torch's ``rebuild_cuda_tensor``."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return {name: i for i, name in enumerate(inspect.signature(rebuild_cuda_tensor).parameters)}


def fill(flat: torch.Tensor, tensors: Sequence[torch.Tensor], dtype: str) -> None:
    """Copy ``tensors``, one after the other, into the bytes of ``flat`` as ``dtype``, all in few launches."""
    import torch

    view = flat.view(getattr(torch, dtype))
    with torch.no_grad():
        torch._foreach_copy_(list(view.split([t.numel() for t in tensors])), [t.reshape(-1) for t in tensors])


class Link:
    """The learner's place, member 0, in the NCCL group with the engines' workers."""

    def __init__(self, host: str, port: int, members: int, device: Any) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host, port, 0, members, store_timeout=LINK_TIMEOUT_S)
        self._nccl = PyNcclCommunicator(group, device)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send one bucket as member 0. Returns when it is done on this GPU."""
        import torch

        self._nccl.broadcast(flat, src=0)
        torch.cuda.current_stream().synchronize()


def merge(manifests: Sequence[WeightManifest]) -> WeightManifest:
    """One manifest from those of all ranks: rank 0's, with every rank's handles."""
    first = manifests[0]
    buckets = []
    for same in zip(*(m.buckets for m in manifests), strict=True):
        handles = {gpu: h for bucket in same for gpu, h in bucket.handles.items()}
        buckets.append(replace(same[0], handles=handles))
    return replace(first, buckets=tuple(buckets))


def gpu_uuid(device: Any) -> str:
    """The identity of a card, the same in every process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
