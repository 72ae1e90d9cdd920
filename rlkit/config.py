"""Settings as flat frozen dataclasses, from YAML or keywords. An unknown key is an error that names the nearest known one.

One file of ``cluster_configs/`` fills three of them: the top level is a `ClusterSpec`, its ``sampler:`` section an `EngineSpec` and
its ``learner:`` section a `TrainSpec`. Keywords given in a cell win over the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import yaml

from rlkit.errors import ConfigError, nearest

MAY_BE_INFINITE = ("max_logprob_gap",)  # no limit


class Spec:
    """Construction from a mapping with unknown keys refused, and copies with changes."""

    @classmethod
    def make(cls, values: Mapping[str, Any] | None = None, /, **changes: Any) -> Self:
        """Build from ``values`` and keywords, keywords winning; ``None`` keywords are ignored.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a value out of range.
        """
        merged = dict(values or {}) | {k: v for k, v in changes.items() if v is not None}
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in merged:
            if key not in known:
                raise ConfigError(f"{cls.__name__} has no setting {key!r}{nearest(key, known) or '.'} Known: {', '.join(known)}.")
        return cls(**merged)

    def but(self, **changes: Any) -> Self:
        """A copy with ``changes``; ``None`` means "leave as it is"."""
        return type(self).make(self.as_dict(), **changes)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def diff(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ: name -> (here, there)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}

    def _check_types(self) -> None:
        """Numbers, texts and switches are what their field says; ``1e-6``, which YAML reads as text, becomes the float that was meant."""
        for f in fields(self):  # type: ignore[arg-type]
            kind, value = str(f.type), getattr(self, f.name)
            if kind.endswith(" | None"):
                if value is None:
                    continue
                kind = kind.removesuffix(" | None")
            if kind == "float":
                object.__setattr__(self, f.name, _as_float(self, f.name))
                self._need(math.isfinite(getattr(self, f.name)) or f.name in MAY_BE_INFINITE, f.name, "a finite number")
            elif kind == "int":
                self._need(isinstance(value, Integral) and not isinstance(value, bool), f.name, "a whole number")
                object.__setattr__(self, f.name, int(value))  # from NumPy's as well
            elif kind == "bool":
                self._need(isinstance(value, bool), f.name, "true or false")
            elif kind == "str":
                self._need(isinstance(value, str), f.name, "text")
            elif kind.startswith("Mapping"):
                self._need(isinstance(value, Mapping), f.name, "a mapping")

    def _need_at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._need(value is None or value >= least, name, f"at least {least}")

    def _need_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._need(value is None or value > 0, name, "above 0")

    def _need(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name} is {getattr(self, name)!r}; it must be {rule}.")


@dataclass(frozen=True)
class SampleSpec(Spec):
    """How responses are sampled. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch those filters off."""

    n: int = 1  # responses per prompt (the group size)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # generation ends before any of these; they are not part of the text
    seed: int | None = None  # None: the run derives one from its own seed, the step and the call
    logprobs: bool = True  # log-probs of the sampled tokens, at the sampling temperature

    def __post_init__(self) -> None:
        self._check_types()
        self._need(isinstance(self.stop, str | tuple | list), "stop", "a text or a list of texts")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        self._need(self.n >= 1, "n", "a whole number of at least 1")
        self._need(self.temperature >= 0, "temperature", "0 (greedy) or above")
        self._need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._need(self.top_k >= 0, "top_k", "0 (off) or a positive whole number")
        self._need(self.max_tokens >= 1, "max_tokens", "a whole number of at least 1")
        self._need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens")
        self._need(all(isinstance(text, str) and text for text in self.stop), "stop", "non-empty texts")


@dataclass(frozen=True)
class EngineSpec(Spec):
    """The pool of rollout engines. Every other vLLM engine argument goes into ``vllm`` (checked against vLLM's own list).

    The named vLLM settings are those people tune; ``None`` leaves vLLM's default.
    """

    engine: str = "vllm"  # "vllm" | "hf"
    engines: int | None = None  # how many engine actors; None: placement's choice on GPUs, 1 on CPU
    cpus_per_engine: float = 1.0
    gpus_per_engine: float = 0.0  # below 1: a share of each of its cards; 0 on a cluster with GPUs: placement chooses
    threads: int | None = None  # compute threads of an engine on CPU; None: cpus_per_engine rounded up
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on GPU | "float32" | "bfloat16" | "float16"
    seed: int = 0
    scheduler: str = (
        "rollout"  # of vLLM's steps: "rollout", rlkit's own (see rlkit.engines.scheduler) | "vllm", should a vLLM not go with it
    )
    tensor_parallel_size: int = 1
    max_model_len: int | None = None  # tokens of prompt and response together
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None  # size of the key-value cache; None: on CPU at most 1 GiB, less for small models
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = True  # the prompt of a group is computed once
    enable_chunked_prefill: bool | None = None
    sleep_level: int | None = None  # while the learner works: 0 stays awake, 1 weights to host memory, 2 weights dropped; None: placement
    block_size: int | None = None
    swap_space: float | None = None
    trust_remote_code: bool = False  # runs Python that comes with the model: only for sources you trust
    vllm: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    rollout_timeout_s: float = 3600.0
    sync_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_types()
        self._need(self.engine in ("vllm", "hf"), "engine", "'vllm' or 'hf'")
        self._need(self.scheduler in ("rollout", "vllm"), "scheduler", "'rollout' or 'vllm'")
        self._need(self.dtype in ("auto", "float32", "bfloat16", "float16"), "dtype", "auto, float32, bfloat16 or float16")
        self._need_at_least(0, "cpus_per_engine", "gpus_per_engine", "swap_space")
        self._need_at_least(1, "engines", "threads", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size")
        self._need_at_least(2, "max_model_len")
        self._need_positive("kv_cache_gib", "start_timeout_s", "rollout_timeout_s", "sync_timeout_s")
        u = self.gpu_memory_utilization
        self._need(u is None or 0 < u <= 1, "gpu_memory_utilization", "above 0 and at most 1")
        self._need(self.sleep_level in (None, 0, 1, 2), "sleep_level", "0 (stays awake), 1 (weights to host memory) or 2 (weights dropped)")


@dataclass(frozen=True)
class TrainSpec(Spec):
    """The learner: ZeRO ranks, optimizer, micro-batches."""

    ranks: int | None = None  # None: placement's choice on GPUs, 1 on CPU
    zero_stage: int = 2  # 0 none, 1 optimizer states, 2 + gradients, 3 + parameters (ZeRO, Rajbhandari et al. 2020)
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0  # fractions share a GPU; 0 on a cluster with GPUs: placement chooses
    threads: int | None = None  # compute threads of a rank on CPU; None: cpus_per_rank rounded up
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on GPU
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 switches clipping off
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    schedule: str = "constant"  # after the warm-up: "constant" | "linear" | "cosine" down to min_lr_ratio * lr
    total_steps: int | None = None  # optimizer steps at which "linear" and "cosine" end
    min_lr_ratio: float = 0.0
    packing: str = "auto"  # "varlen": samples end to end, no padding | "padded": a rectangle | "auto": varlen on GPU, padded on CPU
    micro_batch_tokens: int = 16384  # tokens of one forward and backward on a rank; with "padded" rows x longest row
    minibatches: int = 1  # optimizer steps per pass over a batch
    epochs: int = 1  # passes over a batch
    gradient_checkpointing: bool | None = None  # None: on GPU when a micro-batch's activations would not fit, never on CPU
    kernels: str = "auto"  # of norms, rotary embeddings, MLPs: "plain" | "liger" (pip install liger-kernel) | "compile" (ZeRO 0 to 2)
    offload_optimizer: bool = False  # optimizer states in host memory
    offload_param: bool = False  # ZeRO-3: parameters in host memory
    offload_between_turns: bool | None = None  # all states in host memory while engines sample; None: placement
    logits_chunk: int | None = None  # tokens whose full-vocabulary logits exist at once; None: 2048 on CPU, 1.25 GB of them on GPU
    lora_rank: int = 0  # 0: train all parameters
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    max_lag: int = 0  # how many policy versions a batch may be behind
    max_logprob_gap: float | None = None  # nats; None: 1e-3 in float32, 0.05 else
    trust_remote_code: bool = False
    seed: int = 0
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # merged over the DeepSpeed config that rlkit makes
    start_timeout_s: float = 600.0
    update_timeout_s: float = 3600.0

    @property
    def world(self) -> int:
        """How many ranks; 1 while that is open."""
        return self.ranks or 1

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "betas", _floats(self, "betas", 2))
        self._need(isinstance(self.lora_targets, tuple | list), "lora_targets", "a list of module names")
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        self._need(self.zero_stage in (0, 1, 2, 3), "zero_stage", "0, 1, 2 or 3")
        self._need_at_least(1, "ranks", "threads", "total_steps", "minibatches", "epochs", "micro_batch_tokens", "logits_chunk")
        self._need_at_least(0, "cpus_per_rank", "gpus_per_rank", "warmup_steps", "weight_decay", "max_grad_norm", "max_lag", "lora_rank")
        self._need_positive("eps", "start_timeout_s", "update_timeout_s", "max_logprob_gap")
        self._need(self.lr >= 0, "lr", "at least 0")
        self._need(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers from 0 to below 1")
        self._need(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "from 0 to 1")
        self._need(self.schedule in ("constant", "linear", "cosine"), "schedule", "constant, linear or cosine")
        self._need(self.schedule == "constant" or self.total_steps is not None, "total_steps", f"set for a {self.schedule} schedule")
        self._need(not self.offload_param or self.zero_stage == 3, "offload_param", "False unless zero_stage is 3")
        both = bool(self.offload_between_turns and self.offload_param)
        self._need(not both, "offload_between_turns", "False with offload_param, which keeps the parameters in host memory always")
        self._need(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
        self._need(self.packing in ("auto", "varlen", "padded"), "packing", "auto, varlen or padded")
        self._need(self.kernels in ("auto", "plain", "liger", "compile"), "kernels", "auto, plain, liger or compile")
        self._need(self.kernels != "compile" or self.zero_stage < 3, "kernels", "auto, plain or liger with zero_stage 3")
        gpu = self.gpus_per_rank > 0
        self._need(gpu or self.kernels in ("auto", "plain"), "kernels", "auto or plain on the CPU (gpus_per_rank 0)")


@dataclass(frozen=True)
class ClusterSpec(Spec):
    """Where the cluster is and what it must have, with the defaults for samplers and learners on it."""

    name: str = "laptop"
    address: str = "local"  # "local" | "host:port" | "ray://host:port"
    num_cpus: int | None = None  # local: CPUs that Ray may hand out; None: all
    num_gpus: int | None = None  # local: GPUs; None: all
    min_nodes: int = 1
    min_cpus: float = 0
    min_gpus: float = 0
    min_memory_gib: float = 0
    object_store_gib: float | None = None  # local: shared memory for rollouts; None: Ray's default
    dashboard: bool = True  # local: on loopback
    storage: str = "runs"  # where event logs, samples and checkpoints go; on several nodes a path that all of them see
    token_path: str | None = None  # file with the cluster's token; None: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token
    connect_timeout_s: float = 5.0
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables for the cluster's workers
    sampler: EngineSpec = field(default_factory=EngineSpec)
    learner: TrainSpec = field(default_factory=TrainSpec)

    def __post_init__(self) -> None:
        self._check_types()
        for name, kind in (("sampler", EngineSpec), ("learner", TrainSpec)):
            value = getattr(self, name)
            if isinstance(value, kind):
                continue
            self._need(value is None or isinstance(value, Mapping), name, "a section of settings")
            try:
                object.__setattr__(self, name, kind.make(value))
            except ConfigError as error:
                raise ConfigError(f"in section {name!r}: {error}") from error
        self._need_at_least(1, "num_cpus", "min_nodes")
        self._need_at_least(0, "num_gpus", "min_cpus", "min_gpus", "min_memory_gib")
        self._need_positive("connect_timeout_s", "object_store_gib")

    @classmethod
    def from_yaml(cls, path: str | Path) -> ClusterSpec:
        """Read a file of ``cluster_configs/`` or your own.

        Raises:
            ConfigError: no such file, no mapping in it, an unknown key (with file, section and nearest known key), a bad value.
        """
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"No cluster config at {path} (looked in {Path.cwd()}).")
        try:
            values = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of settings; it holds {type(values).__name__}.")
        try:
            return cls.make(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def as_plain(spec: Any) -> Any:
    """Nested dicts and lists for JSON and YAML."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return {f.name: as_plain(getattr(spec, f.name)) for f in fields(spec)}
    if isinstance(spec, Mapping):
        return {k: as_plain(v) for k, v in spec.items()}
    if isinstance(spec, tuple | list):
        return [as_plain(v) for v in spec]
    return spec


def _as_float(spec: Spec, name: str) -> float:
    value = getattr(spec, name)
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{type(spec).__name__}.{name} is {value!r}; it must be a number.") from None


def _floats(spec: Spec, name: str, count: int) -> tuple[float, ...]:
    values = getattr(spec, name)
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        found = ()
    if len(found) != count:
        raise ConfigError(f"{type(spec).__name__}.{name} is {values!r}; it must be {count} numbers.")
    return found
