"""Causal attention over samples that lie end to end in one row, as an attention implementation of transformers.

A model takes it by name (`use`). Its attention layers then call `attend` with the keywords that were given to the model:
``cu_seq_lens_q`` (S + 1,) int32 and ``max_length_q``, the names that transformers uses for its own packed attention. Without them
a call is plain causal attention over a rectangle, which is right for rows padded on the right.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rlkit.errors import ModelError

NAME = "rlkit_varlen"
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
# torch 2.13 has a switch for fewer key-value heads than query heads; 2.11 has none, and `use` tries whether its kernel takes them.
_GROUPS_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
_groups_taken = _GROUPS_SWITCH


def obstacle(model: nn.Module) -> str | None:
    """Why this model cannot run without padding, or None. It must give all attention to one function, causal over the whole sample."""
    config: Any = model.config
    settable = getattr(type(model), "_can_set_attn_implementation", None)
    if not getattr(model, "_supports_attention_backend", False) or settable is None or not settable():
        return f"{type(model).__name__} does not let its attention be replaced"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        return f"it has layers of {', '.join(others)}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "its attention is over a sliding window"
    for name in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, name, None):
            return f"its config has {name}"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    return None


def use(model: nn.Module, gpu: bool) -> None:
    """Let ``model`` compute its attention with `attend`, on a GPU or on the CPU.

    Raises:
        ModelError: transformers did not take it.
    """
    from transformers import AttentionInterface

    # No mask function goes with the name, and transformers makes no mask for a name that has none.
    AttentionInterface.register(NAME, attend)
    global _groups_taken
    if gpu and not _groups_taken:
        _groups_taken = _takes_groups()
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    found = model.config._attn_implementation  # type: ignore[union-attr]
    if found != NAME:
        raise ModelError(f"{type(model).__name__} uses the attention {found!r} although {NAME!r} was set; set packing to 'padded'.")


def attend(
    module: nn.Module,
    query: torch.Tensor,  # (B, H, T, D)
    key: torch.Tensor,  # (B, KV, T, D)
    value: torch.Tensor,  # (B, KV, T, D)
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,  # (S + 1,) int32
    max_length_q: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """((B, T, H, D), no attention weights).

    Raises:
        ModelError: the layer asks for something that would be left out: a mask, dropout, a window, capped scores, sinks.
    """
    if attention_mask is not None or dropout or sliding_window is not None or softcap is not None or s_aux is not None:
        raise ModelError(
            f"{type(module).__name__} asks for more than causal attention over whole samples (mask, dropout, window, capped scores or "
            "sinks); set packing to 'padded'."
        )
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings give fp32 back
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(low), key.to(low), value.to(low)
    if cu_seq_lens_q is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    if query.is_cuda and query.dtype in _FLASH_DTYPES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256:
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    return _segments(query, key, value, cu_seq_lens_q, scaling), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, scaling: float | None
) -> torch.Tensor:
    """One kernel over all samples (FlashAttention-2, Dao 2023), (1, T, H, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scaling}
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and not _groups_taken:
        k, v = (x[:, :, None].expand(-1, -1, repeats, -1).flatten(1, 2) for x in (k, v))
    elif repeats > 1 and _GROUPS_SWITCH:
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, **options)[None]


def _takes_groups() -> bool:
    """Whether the kernel shares key-value heads between query heads, forward and backward: tried on two samples of a few tokens."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    made = torch.Generator(gpu).manual_seed(0)
    shapes = ((1, 4, 48, 64), (1, 2, 48, 64), (1, 2, 48, 64))
    leaves = [torch.randn(s, generator=made, device=gpu).bfloat16().requires_grad_() for s in shapes]
    bounds = torch.tensor([0, 20, 48], dtype=torch.int32, device=gpu)
    q, k, v = (x[0].transpose(0, 1) for x in leaves)
    try:
        found = varlen_attn(q, k, v, bounds, bounds, 28, 28, window_size=(-1, 0))
        got = torch.autograd.grad(found.float().square().sum(), leaves)
    except RuntimeError:  # torch's check of the shapes
        return False
    wanted = _segments(leaves[0], leaves[1], leaves[2], bounds, None)[0]
    want = torch.autograd.grad(wanted.float().square().sum(), leaves)
    pairs = [(found, wanted), *zip(got, want, strict=True)]
    return all(bool(torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.05)) for a, b in pairs)


def _segments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Sample by sample, (1, T, H, D): the CPU, and dtypes and head sizes that the kernel does not take."""
    bounds = cu_seqlens.tolist()
    parts = [
        scaled_dot_product_attention(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)
