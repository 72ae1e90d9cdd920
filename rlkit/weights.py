"""The learner's weights on their way to the engines: buckets in the object store, and a manifest that says what they must add up to.

The learner calls `publish` on rank 0 with its parameters, whole tensors one after the other under their Hugging Face names. Tensors are
cast to the engines' dtype, checksummed on the device where they are, and packed into *buckets* of about 256 MiB, each one flat array of
bytes in the object store that a reader maps without copying. An engine reads the buckets with `tensors`, and afterwards compares what it
computes with against ``checksums`` (see `rlkit.engines.worker`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit import transfer
from rlkit.checksum import checksum_all
from rlkit.errors import SyncError
from rlkit.reprs import Shown, number
from rlkit.types import fetch

if TYPE_CHECKING:
    import torch

    from rlkit.transfer import Exporter

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Some tensors of one dtype, one after the other. ``data`` is (bytes,) uint8."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # "float32" | "bfloat16" | "float16"
    data: np.ndarray


@dataclass(frozen=True)
class WeightManifest(Shown):
    """One version of the weights. A tied output layer is left out: an engine that has one checks it against the input embedding."""

    version: int
    dtype: str
    names: tuple[str, ...]  # Hugging Face names, in the order of the buckets
    shapes: Mapping[str, tuple[int, ...]]
    checksums: Mapping[str, int]  # of the tensors in ``dtype``
    buckets: tuple[Any, ...]  # references to `Bucket`, or `DeviceBucket`s; who published them keeps them until it publishes again
    bytes: int
    transport: str = "object_store"  # "object_store" | "ipc" | "nccl"; see `rlkit.transfer`

    def __repr__(self) -> str:
        return f"WeightManifest(version {self.version}, {len(self.names)} tensors, {self.bytes / 2**20:.1f} MiB {self.dtype})"


@dataclass(frozen=True)
class SyncStats(Shown):
    """What `Sampler.sync` did. ``checksum_ok`` is always True: a sync whose checksums differ raises SyncError."""

    version: int
    seconds: float
    bytes: int  # of one copy of the weights
    engines: int
    transport: str  # "object_store" | "ipc" | "nccl"
    checksum_ok: bool
    checked: int  # tensors whose values in every engine were compared with the learner's
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds: publish; load and verify of the slowest engine

    def __repr__(self) -> str:
        return (
            f"SyncStats(version {self.version}, {self.bytes / 2**20:.1f} MiB to {self.engines} engine{'s' * (self.engines > 1)} by "
            f"{self.transport}, {self.checked} tensors verified, {number(self.seconds)} s)"
        )


def publish(
    items: Iterable[tuple[str, torch.Tensor]],
    *,
    version: int,
    dtype: str,
    put: Callable[[Bucket], Any] | None = None,
    bucket_bytes: int | None = None,
    exporter: Exporter | None = None,
    sums: bool = True,
) -> WeightManifest:
    """Pack ``items`` (Hugging Face name, whole tensor on any device) into buckets; call it on rank 0 only.

    ``items`` may gather each tensor as it is asked for (ZeRO-3): one bucket and one tensor are held at a time. ``put`` stores a bucket and
    returns what the manifest holds of it; ``None`` is ``ray.put``, so the caller's process owns the buckets: keep the manifest until the
    next `publish`. With an ``exporter`` buckets stay on the GPU instead, in its care; ``sums`` False leaves the
    checksums to another rank. ``bucket_bytes`` defaults to 256 MiB, on a GPU to 512.
    """
    import torch

    if put is None and exporter is None:
        import ray

        put = ray.put
    if bucket_bytes is None:
        bucket_bytes = BUCKET_BYTES if exporter is None else transfer.BUCKET_BYTES
    kind = getattr(torch, dtype)
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, int] = {}
    refs: list[Any] = []
    pending: list[tuple[str, torch.Tensor]] = []
    held = total = 0

    def flush() -> None:
        nonlocal held
        if pending:
            if sums:  # of the learner's tensors, not of the bucket: a fault in packing shows too
                found.update(zip([n for n, _ in pending], checksum_all([t for _, t in pending]), strict=True))
            if exporter is not None:
                refs.append(exporter.pack(pending, dtype, held))
            elif put is not None:
                refs.append(put(_pack(pending, dtype, held)))
            pending.clear()
            held = 0

    for name, tensor in items:
        cast = tensor.detach().to(kind)
        if name in shapes:
            raise SyncError(f"The learner sent {name!r} twice.")
        shapes[name] = tuple(cast.shape)
        size = cast.numel() * cast.element_size()
        if pending and held + size > bucket_bytes:
            flush()
        pending.append((name, cast))  # it may be the parameter itself: nothing changes it before flush, which copies it
        held += size
        total += size
    flush()
    if exporter is not None:
        exporter.ready()
    transport = "object_store" if exporter is None else exporter.transport
    return WeightManifest(version, dtype, tuple(shapes), shapes, found, tuple(refs), total, transport)


def tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every tensor, bucket by bucket. The tensors are views into the object store: read them, don't write."""
    for ref in manifest.buckets:
        yield from unpack(fetch(ref))


def unpack(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of one bucket, without copying."""
    import torch

    kind = getattr(torch, bucket.dtype)
    start = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.data).view(kind)
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        n = int(np.prod(shape, dtype=np.int64))
        yield name, flat[start : start + n].view(shape)
        start += n


def check(held: list[tuple[str, str, int]], manifest: WeightManifest, engine: str) -> None:
    """Compare what an engine holds with what the learner sent.

    Raises:
        SyncError: a tensor is missing on one side, or differs.
    """
    names = {name for name, _, _ in held}
    missing = [n for n in manifest.names if n not in names]
    extra = sorted(names - set(manifest.names))
    wrong = [f"{name} (in {where})" for name, where, found in held if name in manifest.checksums and manifest.checksums[name] != found]
    for problem, which in (("did not take", missing), ("holds, but was not sent,", extra), ("holds other values for", wrong)):
        if which:
            raise SyncError(
                f"After the sync to policy version {manifest.version}, {engine} {problem} {len(which)} of {len(manifest.names)} tensors: "
                f"{', '.join(which[:4])}{' ...' if len(which) > 4 else ''}. It will not generate until a sync succeeds."
            )


def _pack(items: list[tuple[str, torch.Tensor]], dtype: str, size: int) -> Bucket:
    import torch

    data = np.empty(size, np.uint8)
    flat = torch.from_numpy(data).view(getattr(torch, dtype))
    start = 0
    for _, tensor in items:
        flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        start += tensor.numel()
    return Bucket(tuple(n for n, _ in items), tuple(tuple(t.shape) for _, t in items), dtype, data)
