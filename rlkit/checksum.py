"""A checksum of a tensor's exact bits that is the same on CPU and GPU and does not depend on how the tensor was cut into pieces.

Weight sync compares the checksums of what the learner sent with those of what the engine holds. The sum is over integers modulo 2**64,
so it has no rounding: each element's bits, times an odd weight that depends on its position, so that a permutation or a shift shows. The
bits of -0.0 count as those of 0.0, which is what a matrix product with the identity turns it into.

On a GPU the tensors of a whole model take one kernel (`rlkit.checksum_kernel`) and one read by the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STEP = 0x9E3779B97F4A7C15 - 2**64  # the odd constant of Knuth's multiplicative hash, as int64
_CHUNK = 1 << 15  # elements: the temporaries (256 KiB each) stay in the cache of a CPU, ten times as fast
_AT_ONCE_BYTES = {"cuda": 2**30}  # of tensors that are held for one launch; elsewhere each is summed as it comes


def checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor of any shape and floating dtype, as an unsigned 64-bit integer."""
    return checksum_all([tensor])[0]


def checksums(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """name -> `checksum`."""
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    return dict(zip([name for name, _ in items], checksum_all([tensor for _, tensor in items]), strict=True))


def checksum_all(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`checksum` of each. All those on a GPU that have 2 or 4 bytes an element are read by one kernel."""
    import torch

    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flats = [t.detach().contiguous().view(views[t.element_size()]).reshape(-1) for t in tensors]
    found: dict[int, int] = {}
    for size in (2, 4):
        together = [i for i, f in enumerate(flats) if f.is_cuda and f.element_size() == size]
        if together:
            from rlkit.checksum_kernel import sums

            found |= zip(together, sums([flats[i] for i in together]), strict=True)
    return [(found[i] if i in found else _sum(flat)) % 2**64 for i, flat in enumerate(flats)]


def checksum_each(items: Iterable[tuple[str, str, torch.Tensor]]) -> Iterator[tuple[str, str, int]]:
    """The same triples with the tensor's checksum in its place. Of tensors made on the way, few are held at a time."""
    held: list[tuple[str, str, torch.Tensor]] = []
    size = 0
    for item in items:
        held.append(item)
        size += item[2].numel() * item[2].element_size()
        if size >= _AT_ONCE_BYTES.get(item[2].device.type, 0):
            yield from _named(held)
            held, size = [], 0
    yield from _named(held)


def _named(held: list[tuple[str, str, torch.Tensor]]) -> list[tuple[str, str, int]]:
    return [(name, where, s) for (name, where, _), s in zip(held, checksum_all([t for _, _, t in held]), strict=True)]


def _sum(bits: torch.Tensor) -> int:
    """The sum of `checksum` over (N,) integers, in chunks."""
    import torch

    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64, copy=True)
        if bits.element_size() > 1:
            part.masked_fill_(part == lowest(bits.element_size()), 0)
        weight = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64).mul_(STEP).add_(1)
        weight ^= weight >> 29
        total += int(part.add_(1).mul_(weight.bitwise_or_(1)).sum())
    return total + bits.numel()


def lowest(size: int) -> int:
    """The bits of -0.0 in a float of ``size`` bytes, as a signed integer."""
    return -(2 ** (8 * size - 1))
