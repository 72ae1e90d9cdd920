"""The DeepSpeed config that a `TrainSpec` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkit.config import TrainSpec
from rlkit.errors import ConfigError

# Settings that rlkit computes from the batch or from other settings; changing them would change the meaning of an update.
OWNED = {
    "train_batch_size": "micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "minibatches",
    "managed_gradient_accumulation": "minibatches",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "lr, betas, eps and weight_decay",
    "scheduler": "schedule, warmup_steps and total_steps",
    "fp16": "dtype",
    "bf16": "dtype",
}
CHUNK_BYTES = 1_250_000_000  # of 16-bit logits at once on a GPU, when logits_chunk is not set
CPU_CHUNK = 2048  # tokens, when logits_chunk is not set
_PINNED_BYTES = 4 << 30  # of fp32 gradients on a rank, up to which its offloaded states are page-locked
_BUCKET = 1 << 26  # elements; buckets larger than the model only cost memory


def precision(spec: TrainSpec) -> str:
    """``"float32"`` or ``"bfloat16"``: what ``dtype: auto`` means for this spec."""
    if spec.dtype != "auto":
        return spec.dtype
    return "bfloat16" if spec.gpus_per_rank > 0 else "float32"


def packing_of(spec: TrainSpec) -> str:
    """``"varlen"`` or ``"padded"``: what ``packing: auto`` means for this spec, before the model is known."""
    if spec.packing != "auto":
        return spec.packing
    return "varlen" if spec.gpus_per_rank > 0 else "padded"


def chunk_of(setting: int | None, vocab: int, gpu: bool) -> int:
    """Tokens whose logits exist at once: ``setting``, or when None as many as fit into `CHUNK_BYTES` on a GPU, and `CPU_CHUNK` on a CPU."""
    if setting is not None:
        return setting
    return max(256, CHUNK_BYTES // (2 * vocab) // 256 * 256) if gpu else CPU_CHUNK


def allowed_gap(spec: TrainSpec) -> float:
    """The largest mean difference between sampler and learner log-probs, nats."""
    if spec.max_logprob_gap is not None:
        return spec.max_logprob_gap
    return 1e-3 if precision(spec) == "float32" else 0.05


def make(spec: TrainSpec, n_params: int, largest: int) -> dict[str, Any]:
    """The config. ``n_params`` counts trainable parameters, ``largest`` is the size of the largest one.

    - ``managed_gradient_accumulation`` is off: gradients add up over as many backward passes as we make, and ``engine.step()`` is the
      boundary. That is what micro-batches by token budget need, of which each step has another number.
    - The optimizer is torch's AdamW, fused into one kernel: nothing is compiled at start, on a GPU or for states in host memory.
    - One rank has nothing to scatter: it reduces each bucket where it lies, without copies of its parts.
    - ``dtype: bfloat16`` keeps fp32 master weights and accumulates gradients in fp32. ZeRO-0 does it by autocast over fp32 parameters.

    Raises:
        ConfigError: ``spec.deepspeed`` sets something that rlkit computes.
    """
    stage, low = spec.zero_stage, precision(spec) == "bfloat16"
    bucket = max(largest, min(_BUCKET, n_params), 1)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": spec.world > 1,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
            "stage3_param_persistence_threshold": 10**5,
        }
    # torch rounds page-locked memory up to a power of two and copies into it: a large model's states would take it all.
    pinned = spec.gpus_per_rank > 0 and 4 * n_params / spec.world < _PINNED_BYTES
    if spec.offload_optimizer and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if spec.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # ZeRO-0 in fp32 does not report the norm before clipping, so the rank clips there, in a hook of the optimizer.
        "gradient_clipping": spec.max_grad_norm if stage > 0 else 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": spec.lr,
                "betas": list(spec.betas),
                "eps": spec.eps,
                "weight_decay": spec.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if low and stage == 0:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif low:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(config, spec.deepspeed)


def _merged(config: dict[str, Any], extra: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    out = dict(config)
    for key, value in extra.items():
        if not path and key in OWNED:
            raise ConfigError(f"TrainSpec.deepspeed may not set {key!r}: rlkit sets it from {OWNED[key]}.")
        if path == "zero_optimization." and key in ("stage", "offload_optimizer", "offload_param"):
            setting = "zero_stage" if key == "stage" else key
            raise ConfigError(f"TrainSpec.deepspeed may not set {path + key!r}: set {setting} of the TrainSpec.")
        known = out.get(key)
        out[key] = _merged(known, value, f"{path}{key}.") if isinstance(known, dict) and isinstance(value, Mapping) else value
    return out
