"""The model as the learner and the reference use it: log-probs and entropy of response tokens, not logits.

Full-vocabulary logits exist for ``chunk`` tokens at a time: the head runs chunk by chunk in the forward pass and again in the
backward pass, so memory does not grow with tokens x vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_RESCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Policy(nn.Module):
    """A causal language model whose forward returns (2, M) float32: log-probs and entropy, nats, of M response tokens.

    One tensor, not two: ZeRO-3 gathers this module's parameters for the backward pass once *all* of its outputs have a gradient.

    The head's weight is used outside its own module; ZeRO-3 is told so by `register_external` (DeepSpeed gathers it for the whole
    forward and backward of this module).
    """

    def __init__(self, model: nn.Module, chunk: int = 2048) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    def forward(
        self,
        input_ids: torch.Tensor,  # (B, T) int64, padded on the right
        prompt_lens: torch.Tensor,  # (B,) int64
        lengths: torch.Tensor,  # (B,) int64, response tokens
        temperature: float = 1.0,
    ) -> torch.Tensor:
        return torch.stack(token_logprobs(self.model, input_ids, prompt_lens, lengths, temperature, self.chunk))

    def head(self) -> nn.Module | None:
        """The output layer when it is a plain linear map on the backbone's output, else None."""
        return _head(self.model)


def token_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,  # (B, T) int64, padded on the right
    prompt_lens: torch.Tensor,  # (B,) int64, at least 1
    lengths: torch.Tensor,  # (B,) int64, response tokens; row b holds prompt_lens[b] + lengths[b] tokens
    temperature: float = 1.0,
    chunk: int = 2048,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each response token and entropy of the distribution that it was drawn from, both (M,) float32 in nats.

    Row-major: all response tokens of row 0, then those of row 1. Both are of the distribution at ``temperature`` (logits divided by it),
    which must be above 0. Attention is causal without a mask: padding on the right is never seen by the tokens before it.
    Differentiable in both outputs.
    """
    ids = input_ids[:, :-1]  # nothing follows the last token
    steps = torch.arange(ids.shape[1], device=ids.device)
    # Position t predicts token t + 1, so the response's log-probs come from positions prompt - 1 ... prompt + response - 2.
    starts = prompt_lens[:, None] - 1
    predicts = (steps >= starts) & (steps < starts + lengths[:, None])  # (B, T - 1) bool
    targets = input_ids[:, 1:][predicts]  # (M,)
    head = _head(model)
    if head is None:
        logits = model(input_ids=ids, use_cache=False).logits
        return chunked_logprobs(logits[predicts], None, None, targets, temperature, chunk)
    hidden = _backbone(model)(input_ids=ids, use_cache=False).last_hidden_state  # (B, T - 1, H)
    return chunked_logprobs(hidden[predicts], head.weight, getattr(head, "bias", None), targets, temperature, chunk)


def chunked_logprobs(
    hidden: torch.Tensor,  # (M, H), or (M, V) logits when weight is None
    weight: torch.Tensor | None,  # (V, H)
    bias: torch.Tensor | None,  # (V,)
    targets: torch.Tensor,  # (M,) int64
    temperature: float = 1.0,
    chunk: int = 2048,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log_softmax(hidden @ weight.T / temperature)`` at ``targets`` and its entropy, (M,) float32 each; ``chunk`` rows at a time."""
    out = _ChunkedLogprobs.apply(hidden, weight, bias, targets, float(temperature), int(chunk))
    return out[0], out[1]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int) -> Any:
        m = hidden.shape[0]
        logprobs = hidden.new_empty(m, dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        kept = None
        for span in _spans(m, chunk):
            logp = _log_softmax(hidden[span], weight, bias, temperature)
            logprobs[span] = logp.gather(1, targets[span, None])[:, 0]
            entropy[span] = -(logp.exp() * logp).sum(1)
            kept = logp
        # With one chunk the log-softmax is within the allowed memory: keep it rather than compute it twice.
        ctx.kept = kept if m <= chunk else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None if weight is None or not ctx.needs_input_grad[1] else torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None or not ctx.needs_input_grad[2] else torch.zeros_like(bias, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for span in _spans(hidden.shape[0], ctx.chunk):
            logp = ctx.kept if ctx.kept is not None else _log_softmax(hidden[span], weight, bias, ctx.temperature)
            p = logp.exp()
            # d logp[y] / d z = 1[y] - p;  d H / d z = -p (log p + H)
            grad = p * -grad_logprobs[span, None]
            grad.scatter_add_(1, targets[span, None], grad_logprobs[span, None])
            if with_entropy:
                grad -= grad_entropy[span, None] * p * (logp + entropy[span, None])
            grad /= ctx.temperature  # (m, V)
            if weight is None:
                grad_hidden[span] = grad.to(hidden.dtype)
                continue
            low = grad.to(weight.dtype)
            grad_hidden[span] = (low @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += low.T @ hidden[span].to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _spans(m: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, m)) for start in range(0, m, chunk)]


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = hidden if weight is None else nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    return torch.log_softmax(logits.float() / temperature, dim=1)


def _backbone(model: nn.Module) -> nn.Module:
    return getattr(model, model.base_model_prefix)  # type: ignore[arg-type, no-any-return]


def _head(model: nn.Module) -> nn.Module | None:
    """The linear head, or None when the model does more to its logits than one linear map."""
    config = model.config
    for name in _RESCALED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Linear) else None


def no_dropout(model: nn.Module) -> None:
    """Switch every dropout off, so that train mode (which gradient checkpointing needs) gives the log-probs of eval mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def register_external(policy: Policy) -> None:
    """Tell ZeRO-3 that `Policy` itself reads the head's weight. Call it after ``deepspeed.initialize`` with stage 3."""
    import deepspeed

    head = policy.head()
    if head is not None:
        for parameter in head.parameters(recurse=False):
            deepspeed.zero.register_external_parameter(policy, parameter)
