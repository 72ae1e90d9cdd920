"""Weights from GPU to GPU: CUDA IPC where a rank and an engine share a card, NCCL where they do not.

Both start as the object store does, with `rlkit.weights.publish` on the learner; only the buckets differ. They stay on the rank's GPU, and

- ``ipc``: the manifest carries a handle to each bucket's memory, one a GPU; an engine opens that of its own card and copies from it;
- ``nccl``: rank 0 and the engines' workers form a group once, and rank 0 broadcasts bucket after bucket while the engines load.

Afterwards `rlkit.weights.check` compares checksums, whatever the way. Buckets are freed when the sync is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.errors import SyncError

if TYPE_CHECKING:
    import torch

    from rlkit.weights import WeightManifest

OBJECT_STORE, IPC, NCCL = "object_store", "ipc", "nccl"
LINK_TIMEOUT_S = 120


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

    def pack(self, items: Sequence[tuple[str, torch.Tensor]], dtype: str, size: int) -> DeviceBucket:
        """Copy ``items`` into one flat tensor on their GPU; ``size`` is its bytes."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.device("cuda", torch.cuda.current_device())
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        view, start = flat.view(getattr(torch, dtype)), 0
        for _, tensor in items:
            view[start : start + tensor.numel()].copy_(tensor.reshape(-1))
            start += tensor.numel()
        torch.cuda.synchronize()
        self.flats.append(flat)
        handles = {gpu_uuid(device): reduce_tensor(flat)[1]} if self.transport == IPC else {}
        return DeviceBucket(tuple(n for n, _ in items), tuple(tuple(t.shape) for _, t in items), dtype, size, handles)

    def clear(self) -> None:
        """Free the buckets; engines must be done with them."""
        import torch

        self.flats.clear()
        torch.cuda.ipc_collect()


class Link:
    """Membership in the NCCL group of rank 0 (member 0) and the engines' workers."""

    def __init__(self, host: str, port: int, member: int, members: int, device: Any) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host, port, member, members, store_timeout=LINK_TIMEOUT_S)
        self._nccl = PyNcclCommunicator(group, device)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (member 0) or receive one bucket. Returns when it is done on this GPU."""
        import torch

        self._nccl.broadcast(flat, src=0)
        torch.cuda.current_stream().synchronize()


def receive(buckets: Iterable[DeviceBucket], device: torch.device, link: Link | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on ``device``) of every tensor, bucket by bucket. Read them before the next one is asked for.

    Raises:
        SyncError: a bucket is not reachable from this GPU.
    """
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    for bucket in buckets:
        if link is not None:
            flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
            link.broadcast(flat)
        else:
            mine = bucket.handles.get(gpu_uuid(device))
            if mine is None:
                raise SyncError(f"No rank shares GPU {gpu_uuid(device)} with this engine, so CUDA IPC cannot bring its weights.")
            arguments = list(mine)
            arguments[6] = device.index  # the card's number in this process
            flat = rebuild_cuda_tensor(*arguments)
        view, start = flat.view(getattr(torch, bucket.dtype)), 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            n = int(np.prod(shape, dtype=np.int64))
            yield name, view[start : start + n].view(shape)
            start += n


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
