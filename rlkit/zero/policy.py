"""The model as the learner and the reference use it: log-probs and entropy of response tokens, not logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlkit.zero.ds_config import CPU_CHUNK
from rlkit.zero.logprobs import chunked_logprobs

_RESCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Policy(nn.Module):
    """A causal language model whose forward returns (2, M) float32: log-probs and entropy, nats, of M response tokens.

    One tensor, not two: ZeRO-3 gathers this module's parameters for the backward pass once *all* of its outputs have a gradient.

    The head's weight is used outside its own module; ZeRO-3 is told so by `register_external` (DeepSpeed gathers it for the whole
    forward and backward of this module).
    """

    def __init__(self, model: nn.Module, chunk: int = CPU_CHUNK) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    def forward(
        self,
        ids: torch.Tensor,  # (B, T) int64
        at: torch.Tensor,  # (M,) int64
        targets: torch.Tensor,  # (M,) int64
        positions: torch.Tensor | None = None,  # (1, T) int64
        cu_seqlens: torch.Tensor | None = None,  # (S + 1,) int32
        max_len: int = 0,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        return torch.stack(token_logprobs(self.model, ids, at, targets, positions, cu_seqlens, max_len, temperature, self.chunk))

    def head(self) -> nn.Module | None:
        """The output layer when it is a plain linear map on the backbone's output, else None."""
        return _head(self.model)


def token_logprobs(
    model: nn.Module,
    ids: torch.Tensor,  # (B, T) int64
    at: torch.Tensor,  # (M,) int64, places in the flattened (B x T) that predict
    targets: torch.Tensor,  # (M,) int64, the tokens that followed them
    positions: torch.Tensor | None = None,  # (1, T) int64
    cu_seqlens: torch.Tensor | None = None,  # (S + 1,) int32
    max_len: int = 0,
    temperature: float = 1.0,
    chunk: int = CPU_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of the distribution that it was drawn from, both (M,) float32 in nats.

    The arguments up to ``max_len`` are those of `rlkit.zero.layout.Inputs`. Both results are of the distribution at ``temperature``
    (logits divided by it), which must be above 0. Attention is causal without a mask: padding on the right is never seen by the tokens
    before it, and with ``cu_seqlens`` the attention is `rlkit.zero.attention.attend`, which stays within each sample.
    Differentiable in both outputs.
    """
    packed: dict[str, Any] = {}
    if cu_seqlens is not None:  # transformers' names for packed samples; it hands them on to the attention
        packed = {"position_ids": positions, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        packed |= {"max_length_q": max_len, "max_length_k": max_len}
    head = _head(model)
    if head is None:
        logits = model(input_ids=ids, use_cache=False, **packed).logits
        return chunked_logprobs(logits.flatten(0, 1).index_select(0, at), None, None, targets, temperature, chunk)
    hidden = _backbone(model)(input_ids=ids, use_cache=False, **packed).last_hidden_state  # (B, T, H)
    rows = hidden.flatten(0, 1).index_select(0, at)  # (M, H)
    return chunked_logprobs(rows, head.weight, getattr(head, "bias", None), targets, temperature, chunk)


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
