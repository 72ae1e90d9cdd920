"""GPU kernels over a chunk of logits: one pass that reads it (`measure`), one that reads and writes it (`gradient`). Maths of `logprobs`.

All sums are in float32. The normaliser is found while reading, with the running maximum of Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), algorithm 3; the entropy is ``lse - sum p z`` with z = logits / temperature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # logits that one program holds at a time
WARPS = 8


def measure(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, V) logits, any float dtype -> (lse, log-prob at ``targets``, entropy), each (m,) float32, nats."""
    m, vocab = logits.shape
    lse, logprobs, entropy = (torch.empty(m, dtype=torch.float32, device=logits.device) for _ in range(3))
    if m:
        assert logits.stride(1) == 1
        _measure[(m,)](
            logits, targets.contiguous(), lse, logprobs, entropy, vocab, logits.stride(0), 1.0 / temperature, BLOCK=BLOCK, num_warps=WARPS
        )
    return lse, logprobs, entropy


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
    out: torch.Tensor,
) -> None:
    """Write d loss / d logits (m, V) into ``out``, which may be ``logits``."""
    m, vocab = logits.shape
    if not m:
        return
    assert logits.stride(1) == 1
    assert out.stride(1) == 1
    _gradient[(m, triton.cdiv(vocab, BLOCK))](
        logits,
        out,
        targets.contiguous(),
        lse.contiguous(),
        entropy.contiguous(),
        grad_logprobs.float().contiguous(),
        grad_entropy.float().contiguous(),
        vocab,
        logits.stride(0),
        out.stride(0),
        1.0 / temperature,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _measure(logits, targets, lse_out, logprob_out, entropy_out, vocab, stride, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)  # sum of exp(z - top)
    weighted = tl.full((), 0.0, tl.float32)  # sum of exp(z - top) z
    for first in range(0, vocab, BLOCK):
        cols = first + lanes
        z = tl.load(start + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(top, tl.max(z, axis=0))
        shrink = tl.exp(top - new)
        e = tl.exp(z - new)
        total = total * shrink + tl.sum(e, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(e > 0.0, e * z, 0.0), axis=0)  # 0 x -inf would be nan
        top = new
    lse = top + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(lse_out + row, lse)
    tl.store(logprob_out + row, chosen - lse)
    tl.store(entropy_out + row, lse - weighted / total)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    out,
    targets,
    lse_in,
    entropy_in,
    grad_logprob_in,
    grad_entropy_in,
    vocab,
    stride,
    out_stride,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < vocab
    lse, entropy = tl.load(lse_in + row), tl.load(entropy_in + row)
    up, up_entropy = tl.load(grad_logprob_in + row), tl.load(grad_entropy_in + row)
    z = tl.load(logits + row.to(tl.int64) * stride + cols, mask=inside, other=float("-inf")).to(tl.float32) * scale
    logp = z - lse
    p = tl.exp(logp)
    grad = -p * (up + up_entropy * tl.where(p > 0.0, logp + entropy, 0.0))
    grad += tl.where(cols == tl.load(targets + row), up, 0.0)
    tl.store(out + row.to(tl.int64) * out_stride + cols, (grad * scale).to(out.dtype.element_ty), mask=inside)
