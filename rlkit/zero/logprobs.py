"""Log-probs of given tokens and the entropy of their distribution from hidden states, without the logits of all tokens at once.

The head runs ``chunk`` tokens at a time in the forward pass and again in the backward pass, so memory does not grow with tokens x
vocabulary. What happens to a chunk of logits (`measure`, `gradient`) is one pass over memory each on a GPU (`logprob_kernels`) and plain
torch on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from rlkit.zero.ds_config import CPU_CHUNK


def chunked_logprobs(
    hidden: torch.Tensor,  # (M, H), or (M, V) logits when weight is None
    weight: torch.Tensor | None,  # (V, H)
    bias: torch.Tensor | None,  # (V,)
    targets: torch.Tensor,  # (M,) int64
    temperature: float = 1.0,
    chunk: int = CPU_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log_softmax(hidden @ weight.T / temperature)`` at ``targets`` and its entropy, (M,) float32 each; ``chunk`` rows at a time."""
    out = _ChunkedLogprobs.apply(hidden, weight, bias, targets, float(temperature), int(chunk))
    return out[0], out[1]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int) -> Any:
        m = hidden.shape[0]
        dtype = hidden.dtype if weight is None else _product_dtype(weight)
        head = _Head(weight, bias, dtype)
        lse, logprobs, entropy = (hidden.new_empty(m, dtype=torch.float32) for _ in range(3))
        logits = None
        for span in _spans(m, chunk):
            logits = head(hidden[span])
            lse[span], logprobs[span], entropy[span] = measure(logits, targets[span], temperature)
        # With one chunk the logits are within the allowed memory: keep them rather than compute them twice.
        ctx.kept = logits if weight is not None and m <= chunk else None
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # turned into the gradient below; a second backward pass computes it again
        head = _Head(weight, bias, ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None if weight is None or not ctx.needs_input_grad[1] else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None or not ctx.needs_input_grad[2] else torch.zeros_like(bias, dtype=torch.float32)
        for span in _spans(hidden.shape[0], ctx.chunk):
            logits = kept if kept is not None else head(hidden[span])
            out = grad_hidden[span] if weight is None else logits
            gradient(
                logits, targets[span], lse[span], entropy[span], grad_logprobs[span], grad_entropy[span], ctx.temperature, out
            )  # (m, V)
            if weight is None:
                continue
            grad_hidden[span] = (out @ head.weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, out, hidden[span].to(ctx.dtype))
            if grad_bias is not None:
                grad_bias += out.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def measure(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, V) logits -> the log of the softmax's normaliser, the log-prob at ``targets`` and the entropy, each (m,) float32, nats."""
    if logits.is_cuda:
        from rlkit.zero import logprob_kernels

        return logprob_kernels.measure(logits, targets, temperature)
    z = logits.float() / temperature
    lse = z.logsumexp(1)
    logp = z - lse[:, None]
    return lse, logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def gradient(
    logits: torch.Tensor,  # (m, V)
    targets: torch.Tensor,  # (m,) int64
    lse: torch.Tensor,  # (m,) float32
    entropy: torch.Tensor,  # (m,) float32
    grad_logprobs: torch.Tensor,  # (m,) float32
    grad_entropy: torch.Tensor,  # (m,) float32
    temperature: float,
    out: torch.Tensor,  # (m, V), may be logits itself
) -> None:
    """Write the logits' gradient into ``out``. With z = logits / temperature, d logp[y] / d z = 1[y] - p and d H / d z = -p (log p + H)."""
    if logits.is_cuda:
        from rlkit.zero import logprob_kernels

        logprob_kernels.gradient(logits, targets, lse, entropy, grad_logprobs, grad_entropy, temperature, out)
        return
    logp = logits.float() / temperature - lse[:, None]
    p = logp.exp()
    grad = p * -grad_logprobs[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    if bool(grad_entropy.any()):
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    out.copy_(grad / temperature)


def _spans(m: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, m)) for start in range(0, m, chunk)]


class _Head:
    """The linear head in the dtype of its product; without a weight the rows are logits already."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight = None if weight is None else weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.weight is None else nn.functional.linear(hidden.to(self.dtype), self.weight, self.bias)


def _product_dtype(weight: torch.Tensor) -> torch.dtype:
    """That of the weight, or of autocast, which does not reach into the backward pass."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left.T @ right`` with (V, H) float32 ``total``; in the matrix product itself where the device can."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.is_cuda and left.dtype == torch.bfloat16 and _adds_in_fp32(left.device):
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total += left.T @ right


@functools.cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether this torch multiplies bfloat16 matrices into a float32 sum, in place and rightly: tried once on a small product."""
    left = torch.arange(64, device=device).remainder(7).to(torch.bfloat16).view(8, 8)
    total = torch.full((8, 8), 0.5, device=device)
    want = total + left.float().T @ left.float()
    try:
        torch.addmm(total, left.T, left, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # not in this version, or not in place
        return False
    return bool(torch.allclose(total, want))
