"""`rlkit.checksum` on a GPU: one Triton kernel over any number of tensors, wherever they lie.

Each program sums a piece of one tensor; the pieces of a tensor are then added up, exactly, since integers modulo 2**64 have no rounding.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from rlkit.checksum import STEP, lowest

PIECE = 1 << 15  # elements of one program
BLOCK = 2048  # elements that it reads at once


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    addresses,  # (T,) int64: where each tensor starts
    counts,  # (T,) int64: elements in each
    owners,  # (P,) int64: the tensor of each piece
    starts,  # (P,) int64: the piece's first element in its tensor
    out,  # (P,) int64
    STEP: tl.constexpr,
    LOWEST: tl.constexpr,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    owner = tl.load(owners + piece)
    start = tl.load(starts + piece)
    count = tl.load(counts + owner)
    address = tl.load(addresses + owner)
    if BITS == 16:  # noqa: SIM108  known when it is compiled: the other branch is left out
        data = address.to(tl.pointer_type(tl.int16))
    else:
        data = address.to(tl.pointer_type(tl.int32))
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for offset in range(0, PIECE, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < count
        bits = tl.load(data + at, mask=inside, other=0).to(tl.int64)
        bits = tl.where(bits == LOWEST, 0, bits) + 1
        weight = at * STEP + 1
        weight = (weight ^ (weight >> 29)) | 1
        total += tl.where(inside, bits * weight, 0)
    tl.store(out + piece, tl.sum(total, axis=0))


def sums(flats: Sequence[torch.Tensor]) -> list[int]:
    """The sum of `rlkit.checksum` of each of the contiguous (N,) int16 or int32 tensors, all of one dtype and on one GPU; signed."""
    device = flats[0].device
    numels = np.array([f.numel() for f in flats], np.int64)
    pieces = -(-numels // PIECE)  # (T,)
    if pieces.sum() == 0:
        return [0] * len(flats)
    owners = np.repeat(np.arange(len(flats), dtype=np.int64), pieces)  # (P,)
    first = np.concatenate([[0], np.cumsum(pieces)[:-1]])
    starts = (np.arange(len(owners), dtype=np.int64) - first[owners]) * PIECE
    addresses = np.array([f.data_ptr() for f in flats], np.int64)
    # One copy to the GPU. Every part begins at a multiple of 16 bytes: Triton compiles another kernel for pointers that do not.
    parts = [addresses, numels, owners, starts]
    begins = np.cumsum([0, *(len(part) + len(part) % 2 for part in parts)])
    table = np.zeros(begins[-1], np.int64)
    for begin, part in zip(begins[:-1], parts, strict=True):
        table[begin : begin + len(part)] = part
    on_gpu = torch.from_numpy(table).to(device)
    columns = [on_gpu[begin : begin + len(part)] for begin, part in zip(begins[:-1], parts, strict=True)]
    t, p = len(flats), len(owners)
    out = torch.empty(p, dtype=torch.int64, device=device)
    size = flats[0].element_size()
    with torch.cuda.device_of(flats[0]):
        _kernel[(p,)](
            *columns,
            out,
            STEP=STEP,
            LOWEST=lowest(size),
            BITS=8 * size,
            PIECE=PIECE,
            BLOCK=BLOCK,
            num_warps=8,
        )
    total = torch.zeros(t, dtype=torch.int64, device=device).index_add_(0, columns[2], out)
    return [int(s) + int(n) for s, n in zip(total.tolist(), numels, strict=True)]
