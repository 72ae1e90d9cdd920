"""What engines, ranks and references take, in bytes by part and by phase, worked out from numbers alone.

Bytes of model states follow ZeRO (Rajbhandari et al. 2020, section 3.1 and figure 1) for P parameters on N ranks:

    ===========  ==============  ===========  ===========================
    precision    parameters      gradients    optimizer (Adam)
    ===========  ==============  ===========  ===========================
    float32      4 P             4 P          8 P   (two moments)
    bfloat16     2 P             4 P          12 P  (two moments, fp32 weights)
    ===========  ==============  ===========  ===========================

Stage 1 divides the optimizer's by N, stage 2 the gradients' too, stage 3 all three. In bfloat16 the paper has 2 P of gradients; rlkit
accumulates them in fp32. Stage 0 in bfloat16 is autocast over fp32 parameters and costs what float32 does. With LoRA, P counts the
adapters in gradients and optimizer, and the frozen base is a whole copy in each rank below stage 3.

With ``offload_optimizer`` optimizer states and gradients are in host memory. DeepSpeed 0.19 keeps the accumulated gradients there and a
second fp32 copy that the optimizer reads: 6 P bytes in bfloat16 below stage 3 (16-bit sums), 4 P in stage 3, where rlkit makes one of
the two (`rlkit.zero.offload.share_gradients`). On the GPU remain parameters, a bucket of gradients and the largest gradient in fp32.

On a card that is shared the peak is that of the fullest *phase*: rollout, update or sync. Engines that sleep and ranks whose states move
(`rlkit.turns`) hold only what a process on a GPU always holds while the other side works; a learner beside engines that stay awake keeps
what its fullest phase took. A weight sync packs a copy of the 16-bit weights.

Activations of a micro-batch of T tokens are on the CPU 34 T h L bytes in 16 bit (Korthikanti et al. 2022, equation 2, without the attention
scores, which fused attention does not keep), twice that in fp32; on a GPU they are counted for a gated MLP and fused kernels, see
`activation_bytes`.
With gradient checkpointing one tensor of T h stays a layer, and one layer's activations at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlkit.config import EngineSpec, TrainSpec
from rlkit.engines.settings import GPU_SEQS, kv_cache_bytes
from rlkit.zero.ds_config import chunk_of, precision

VLLM_GPU_SHARE = 0.9  # of a GPU's memory, when gpu_memory_utilization is None
PHASES = ("rollout", "update", "sync")
# What `nvidia-smi` shows of a process with torch on a Hopper card before it holds a tensor: context, kernels, cuBLAS workspace.
CONTEXT = 0.6 * 2**30
# CUDA graphs of a vLLM engine: "about 1 GB" for its default capture sizes (cluster_configs/one_gpu.yaml); none with enforce_eager.
GRAPHS = 1.0 * 2**30
BATCHED_TOKENS = 8192  # vLLM's step when max_num_batched_tokens is None, and sequences when max_num_seqs is None
BUCKET = 1 << 26  # elements of a gradient bucket at most, unless one parameter is larger; see rlkit.zero.ds_config


class Size(Protocol):
    """What `rlkit.models.size` reads from a model's files; only read here."""

    @property
    def params(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tied(self) -> bool: ...


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Role:
    """One actor and its seat. ``device`` and ``host`` are bytes by part; on CPU everything is in ``host``."""

    name: str
    cpus: float
    gpus: float
    host: Mapping[str, float]
    device: Mapping[str, float] = field(default_factory=dict)
    cards: int = 1  # over which its GPUs are spread, when it has a share of each
    node: int = -1
    gpu_ids: tuple[int, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)  # bytes on its GPUs in each of `PHASES`

    @property
    def shares(self) -> bool:
        """Whether it leaves room for others on each of its cards."""
        return 0 < self.gpus < self.cards

    @property
    def parts(self) -> dict[str, float]:
        return {k: self.device.get(k, 0.0) + self.host.get(k, 0.0) for k in {**self.device, **self.host}}


def model_states(params: float, spec: TrainSpec, trainable: float | None = None) -> States:
    """Bytes of parameters, gradients and optimizer states on one rank; see the table above."""
    low = precision(spec) == "bfloat16" and spec.zero_stage > 0
    p, g, o = (2.0, 4.0, 12.0) if low else (4.0, 4.0, 8.0)
    trained, n, stage = params if trainable is None else trainable, spec.world, spec.zero_stage
    return States(
        parameters=p * params / (n if stage >= 3 else 1),
        gradients=g * trained / (n if stage >= 2 else 1),
        optimizer=o * trained / (n if stage >= 1 else 1),
    )


def mlp_width(size: Size) -> float:
    """Width of the gated MLP: not among the model's numbers, so taken from what the parameters of a layer leave over."""
    h, kv = size.hidden, size.kv_heads * size.head_dim
    layer = (size.params - size.vocab * h * (1 if size.tied else 2)) / size.layers
    return max(0.0, (layer - 2 * h * h - 2 * h * kv) / (3 * h))


def lora_params(size: Size, spec: TrainSpec) -> int:
    """Parameters of the LoRA adapters (Hu et al. 2021: r (in + out) for each adapted matrix) of a gated-MLP decoder."""
    h, kv, width = size.hidden, size.kv_heads * size.head_dim, mlp_width(size)
    shapes: dict[str, tuple[float, float]] = {"q_proj": (h, h), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (h, h)}
    shapes |= {"gate_proj": (h, width), "up_proj": (h, width), "down_proj": (width, h)}
    return round(size.layers * spec.lora_rank * sum(sum(shapes[t]) for t in spec.lora_targets if t in shapes))


def layer_numbers(hidden: float, heads: float, kv: float, mlp: float) -> float:
    """Numbers a token that a decoder layer of norm, attention, norm and gated MLP keeps for its backward pass with fused kernels.

    Inputs of norms and linear maps (4 h, attention output, MLP product), query and output of the attention, keys and values, gate and up.
    """
    return 4 * hidden + 3 * heads + 2 * kv + 3 * mlp


def activation_bytes(size: Size, spec: TrainSpec) -> float:
    """Bytes that one micro-batch's forward pass keeps for the backward pass, and its logits; an estimate.

    On a GPU those of `layer_numbers`. ``gradient_checkpointing`` None counts as off.
    """
    tokens, h, gpu = spec.micro_batch_tokens, size.hidden, spec.gpus_per_rank > 0
    width = 2.0 if precision(spec) == "bfloat16" else 4.0
    layer = layer_numbers(h, h, size.kv_heads * size.head_dim, mlp_width(size)) if gpu else 17.0 * h
    extra = layer if gpu else 0.0  # a layer's gradients
    kept = (size.layers * h + layer if spec.gradient_checkpointing else size.layers * layer) + extra
    number = width if gpu else 2 * 4.0  # on a GPU the logits become their gradient in place; else both, in fp32
    return width * tokens * kept + number * min(chunk_of(spec.logits_chunk, size.vocab, gpu), tokens) * size.vocab


def workspace_bytes(size: Size, spec: EngineSpec) -> float:
    """Bytes of a vLLM step beside weights and cache; an estimate. Hidden states, query, key, value and MLP of a step's tokens in 16 bit
    (some 16 h each), and the logits of every sequence in fp32, three times (raw, at the temperature, as log-probs)."""
    tokens, rows = spec.max_num_batched_tokens or BATCHED_TOKENS, spec.max_num_seqs or GPU_SEQS
    return 2.0 * 16 * tokens * size.hidden + 3 * 4.0 * rows * size.vocab


def buffer_bytes(size: Size, spec: TrainSpec) -> float:
    """Bytes of a rank's gradient buckets and of the output layer's gradient, which is summed in fp32 and cast."""
    width = 2.0 if precision(spec) == "bfloat16" and spec.zero_stage > 0 else 4.0
    largest = size.vocab * size.hidden
    bucket = width * max(largest, min(BUCKET, size.params)) if spec.zero_stage > 0 else 0.0
    return bucket + (width + 4.0) * largest


def gpus_of_engine(spec: EngineSpec) -> float:
    """GPUs of one engine: a share of as many cards as it has tensor-parallel parts, or at least one for each of them."""
    parts, share = spec.tensor_parallel_size, spec.gpus_per_engine
    if parts == 1:
        return share
    return share * parts if 0 < share < 1 else max(share, float(parts))


def engine(index: int, size: Size, spec: EngineSpec, gpu_memory: float | None) -> Role:
    gpus = gpus_of_engine(spec)
    on_gpu = gpus > 0
    width = 4 if spec.dtype == "float32" or (spec.dtype == "auto" and not on_gpu) else 2
    weights = float(width * size.params)
    if not on_gpu:
        token = 2 * size.layers * size.kv_heads * size.head_dim * width
        context = spec.max_model_len or 2048
        cache = float(kv_cache_bytes(spec, token, context)) if spec.engine == "vllm" else 0.0
        return Role(f"engine-{index}", spec.cpus_per_engine, 0.0, {"weights": weights, "KV cache": cache})
    parts = {"weights": weights}
    left = (CONTEXT + (0.0 if spec.enforce_eager else GRAPHS)) * spec.tensor_parallel_size  # what a sleeping engine still holds
    if spec.kv_cache_gib is not None:
        parts["KV cache"] = spec.kv_cache_gib * 2**30 * spec.tensor_parallel_size
        parts["workspace"] = left + workspace_bytes(size, spec) * spec.tensor_parallel_size
    elif gpu_memory is not None and spec.engine == "vllm":
        share = spec.gpu_memory_utilization or VLLM_GPU_SHARE
        parts["KV cache"] = max(0.0, share * gpu_memory * spec.tensor_parallel_size - weights)  # vLLM takes all of its share
    awake = sum(parts.values())
    asleep = left if spec.sleep_level else awake
    phases = {"rollout": awake, "update": asleep, "sync": left + weights if spec.sleep_level else awake}
    host = {"weights asleep": weights} if spec.sleep_level == 1 else {}
    return Role(f"engine-{index}", spec.cpus_per_engine, gpus, host, parts, spec.tensor_parallel_size, phases=phases)


def rank(index: int, size: Size, spec: TrainSpec, keeps: bool = False) -> Role:
    """``keeps``: nobody takes turns with it, so its allocator gives nothing back: what an update took stays taken in the other phases."""
    states = model_states(size.params, spec, lora_params(size, spec) if spec.lora_rank else None)
    parts = {
        "parameters": states.parameters,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activation_bytes(size, spec),
    }
    if spec.gpus_per_rank == 0:
        return Role(f"rank-{index}", spec.cpus_per_rank, 0.0, parts)
    outside = spec.offload_optimizer and spec.zero_stage > 0
    low = precision(spec) == "bfloat16" and spec.zero_stage > 0
    if outside and spec.zero_stage < 3:
        parts["gradients"] = (6.0 if low else 8.0) / 4.0 * states.gradients
    parts["buffers"] = CONTEXT + buffer_bytes(size, spec)
    moved = {"parameters": spec.offload_param, "gradients": outside, "optimizer": outside}
    host, device = {k: v for k, v in parts.items() if moved.get(k)}, {k: v for k, v in parts.items() if not moved.get(k)}
    held = sum(v for k, v in device.items() if k in moved)  # between two updates
    packed = (2.0 if low else 4.0) * size.params  # the copy that a sync packs, all of it on each rank that shares a card
    whole = device.get("parameters", 0.0)
    if spec.offload_between_turns:
        host["between turns"] = held
        phases = {"rollout": CONTEXT, "update": sum(device.values()), "sync": CONTEXT + whole + packed}
    else:
        update, sync = sum(device.values()), CONTEXT + held + packed
        phases = {"rollout": update if keeps else CONTEXT + held, "update": update, "sync": max(update, sync) if keeps else sync}
    return Role(f"rank-{index}", spec.cpus_per_rank, spec.gpus_per_rank, host, device, phases=phases)


def reference(index: int, size: Size, cpus: float, gpus: float) -> Role:
    weights = {"weights": float((2 if gpus > 0 else 4) * size.params)}
    if gpus == 0:
        return Role(f"reference-{index}", cpus, gpus, weights)
    return Role(f"reference-{index}", cpus, gpus, {}, weights, phases=dict.fromkeys(PHASES, CONTEXT + weights["weights"]))
