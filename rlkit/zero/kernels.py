"""Fewer and larger kernels for a decoder layer's norms, rotary embeddings and gated MLP.

``liger``: kernels of liger-kernel (Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training") put into the modules of one
model; its losses and its own forward of the whole model are not used. ``compile``: each decoder layer through torch.compile.
"""

from __future__ import annotations

import importlib.util
import sys
from types import MethodType
from typing import Any

from torch import nn

from rlkit.config import TrainSpec
from rlkit.errors import ConfigError, ModelError


def choose(spec: TrainSpec) -> str:
    """``"plain"``, ``"liger"`` or ``"compile"``: what ``kernels: auto`` means for this spec on this machine.

    Raises:
        ConfigError: liger is asked for and not installed.
    """
    installed = importlib.util.find_spec("liger_kernel") is not None
    if spec.kernels == "liger" and not installed:
        raise ConfigError(
            "TrainSpec.kernels is 'liger' and liger-kernel is not installed: pip install liger-kernel, or set kernels to 'plain'."
        )
    if spec.kernels != "auto":
        return spec.kernels
    if spec.gpus_per_rank == 0:
        return "plain"
    # On an H200 compiled layers were the fastest (benchmarks/update.py), for ten seconds at start; ZeRO-3's hooks break their graphs.
    return "compile" if spec.zero_stage < 3 else "liger" if installed else "plain"


def apply(model: nn.Module, kind: str, backend: str = "inductor") -> dict[str, int]:
    """Put the kernels of ``kind`` into ``model``, before DeepSpeed wraps it. Returns how many modules took which.

    Raises:
        ModelError: a model without a list of decoder layers, to compile.
    """
    if kind == "liger":
        return _liger(model)
    if kind == "compile":
        layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)  # type: ignore[arg-type]
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"{type(model).__name__} has no list of decoder layers to compile; set kernels to 'plain'.")
        for layer in layers:
            layer.compile(dynamic=True, backend=backend)
        return {"layers": len(layers)}
    return {}


def _liger(model: nn.Module) -> dict[str, int]:
    counts = {"norms": 0, "mlps": 0, "rotary": 0}
    for module in model.modules():
        if _is_norm(module):
            module.forward = MethodType(_norm, module)
            counts["norms"] += 1
        elif _is_silu_mlp(module):
            module.forward = MethodType(_mlp, module)
            counts["mlps"] += 1
    # Attention layers look the rotary embedding up in their module, so it is replaced there, for every model of that kind in this process.
    for name in sorted({type(m).__module__ for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")}):
        source = sys.modules[name]
        if _is_plain_rotary(source):
            source.apply_rotary_pos_emb = _rotary  # type: ignore[attr-defined]
            counts["rotary"] += 1
        elif getattr(source, "apply_rotary_pos_emb", None) is _rotary:
            counts["rotary"] += 1
    return counts


def _is_norm(module: nn.Module) -> bool:
    """x / rms(x) * weight, as in Llama and Qwen2; Gemma's, which scales by 1 + weight, starts from zero weights and has ``eps``."""
    return type(module).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm") and hasattr(
        module, "variance_epsilon"
    )


def _is_silu_mlp(module: nn.Module) -> bool:
    if type(module).__name__ not in ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "MistralMLP"):
        return False
    act = getattr(module, "act_fn", None)
    return isinstance(act, nn.SiLU) or type(act).__name__ in ("SiLUActivation", "SiLU")


def _is_plain_rotary(source: Any) -> bool:
    return source.__name__.rpartition(".")[2] in ("modeling_llama", "modeling_qwen2", "modeling_qwen3", "modeling_mistral") and (
        getattr(source, "apply_rotary_pos_emb", None) not in (None, _rotary)
    )


def _norm(self: Any, hidden_states: Any) -> Any:
    from liger_kernel.ops import LigerRMSNormFunction

    # Not in place: the gradient that comes in may be shared with the residual branch.
    return LigerRMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False)


def _mlp(self: Any, x: Any) -> Any:
    from liger_kernel.ops import LigerSiLUMulFunction

    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def _rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)
