"""A checksum of a tensor's exact bits that is the same on CPU and GPU and does not depend on how the tensor was cut into pieces.

Weight sync compares the checksums of what the learner sent with those of what the engine holds. The sum is over integers modulo 2**64,
so it has no rounding: each element's bits, times an odd weight that depends on its position, so that a permutation or a shift shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STEP = 0x9E3779B97F4A7C15 - 2**64  # the odd constant of Knuth's multiplicative hash, as int64
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # on the CPU the temporaries (256 KiB each) stay in the cache: ten times as fast


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor of any shape and floating dtype, as an unsigned 64-bit integer. Works in chunks."""
    import torch

    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(views[tensor.element_size()]).reshape(-1)
    total = 0
    chunk = _CHUNK.get(bits.device.type, 1 << 24)
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk].to(torch.int64, copy=True).add_(1)
        weight = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64).mul_(_STEP).add_(1)
        weight ^= weight >> 29
        total += int(part.mul_(weight.bitwise_or_(1)).sum())
    return (total + tensor.numel()) % 2**64


def checksums(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """name -> `checksum`."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: checksum(tensor) for name, tensor in items}
