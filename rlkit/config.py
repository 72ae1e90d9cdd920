"""Settings as flat frozen dataclasses, from YAML or keywords. An unknown key is an error that names the nearest known one.

One file of ``cluster_configs/`` fills three of them: the top level is a `ClusterSpec`, its ``sampler:`` section an `EngineSpec` and
its ``learner:`` section a `TrainSpec`. Keywords given in a cell win over the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from rlkit.errors import ConfigError, nearest


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
                raise ConfigError(f"{cls.__name__} has no setting {key!r}{nearest(key, known)}. Known: {', '.join(known)}.")
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
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        self._need(_is_int(self.n) and self.n >= 1, "n", "a whole number of at least 1")
        self._need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 (greedy) or above")
        self._need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._need(_is_int(self.top_k) and self.top_k >= 0, "top_k", "0 (off) or a positive whole number")
        self._need(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "a whole number of at least 1")
        self._need(_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens")
        self._need(all(self.stop), "stop", "non-empty strings")


@dataclass(frozen=True)
class EngineSpec(Spec):
    """The pool of rollout engines. Every other vLLM engine argument goes into ``vllm`` (checked against vLLM's own list).

    The named vLLM settings are those people tune; ``None`` leaves vLLM's default.
    """

    engine: str = "vllm"  # "vllm" | "hf"
    engines: int = 1  # how many engine actors
    cpus_per_engine: float = 1.0
    gpus_per_engine: float = 0.0  # fractions share a GPU
    threads: int | None = None  # compute threads of an engine on CPU; None: cpus_per_engine rounded up
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on GPU | "float32" | "bfloat16" | "float16"
    seed: int = 0
    tensor_parallel_size: int = 1
    max_model_len: int | None = None  # tokens of prompt and response together
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None  # CPU: size of the key-value cache; None: 1 GiB
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = True  # the prompt of a group is computed once
    enable_chunked_prefill: bool | None = None
    block_size: int | None = None
    swap_space: float | None = None
    trust_remote_code: bool = False  # runs Python that comes with the model: only for sources you trust
    vllm: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    rollout_timeout_s: float = 3600.0
    sync_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._need(self.engine in ("vllm", "hf"), "engine", "'vllm' or 'hf'")
        self._need(_is_int(self.engines) and self.engines >= 1, "engines", "a whole number of at least 1")
        self._need(self.dtype in ("auto", "float32", "bfloat16", "float16"), "dtype", "auto, float32, bfloat16 or float16")
        self._need(self.cpus_per_engine >= 0, "cpus_per_engine", "0 or above")
        self._need(self.gpus_per_engine >= 0, "gpus_per_engine", "0 or above")
        self._need(_is_int(self.tensor_parallel_size) and self.tensor_parallel_size >= 1, "tensor_parallel_size", "at least 1")
        u = self.gpu_memory_utilization
        self._need(u is None or 0 < u <= 1, "gpu_memory_utilization", "above 0 and at most 1")
        m = self.max_model_len
        self._need(m is None or (_is_int(m) and m >= 2), "max_model_len", "a whole number of at least 2")


@dataclass(frozen=True)
class TrainSpec(Spec):
    """The learner: ZeRO ranks, optimizer, micro-batches."""

    ranks: int = 1
    zero_stage: int = 2  # 0 none, 1 optimizer states, 2 + gradients, 3 + parameters (ZeRO, Rajbhandari et al. 2020)
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
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
    micro_batch_tokens: int = 16384  # padded tokens (rows x longest row) of one forward and backward on a rank
    minibatches: int = 1  # optimizer steps per pass over a batch
    epochs: int = 1  # passes over a batch
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False  # optimizer states in host memory
    offload_param: bool = False  # ZeRO-3: parameters in host memory
    logits_chunk: int = 2048  # tokens whose full-vocabulary logits exist at once
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        for name in ("lr", "eps", "weight_decay"):
            object.__setattr__(self, name, _as_float(self, name))
        self._need(self.zero_stage in (0, 1, 2, 3), "zero_stage", "0, 1, 2 or 3")
        for name in ("ranks", "minibatches", "epochs", "micro_batch_tokens", "logits_chunk"):
            value = getattr(self, name)
            self._need(_is_int(value) and value >= 1, name, "a whole number of at least 1")
        self._need(math.isfinite(self.lr) and self.lr >= 0, "lr", "a finite number of at least 0")
        self._need(self.max_grad_norm >= 0, "max_grad_norm", "0 (off) or above")
        self._need(self.schedule in ("constant", "linear", "cosine"), "schedule", "constant, linear or cosine")
        self._need(self.schedule == "constant" or self.total_steps is not None, "total_steps", f"set for a {self.schedule} schedule")
        self._need(not self.offload_param or self.zero_stage == 3, "offload_param", "False unless zero_stage is 3")
        self._need(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
        self._need(_is_int(self.max_lag) and self.max_lag >= 0, "max_lag", "0 or a positive whole number")
        self._need(_is_int(self.lora_rank) and self.lora_rank >= 0, "lora_rank", "0 (off) or a positive whole number")


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
        for name, kind in (("sampler", EngineSpec), ("learner", TrainSpec)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                object.__setattr__(self, name, kind.make(value))
        self._need(self.num_cpus is None or self.num_cpus >= 1, "num_cpus", "at least 1")
        self._need(self.connect_timeout_s > 0, "connect_timeout_s", "above 0")
        self._need(self.min_nodes >= 1, "min_nodes", "at least 1")

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
        except TypeError as error:
            raise ConfigError(f"{path}: a value has the wrong type: {error}") from error


def as_plain(spec: Any) -> Any:
    """Nested dicts and lists for JSON and YAML."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return {f.name: as_plain(getattr(spec, f.name)) for f in fields(spec)}
    if isinstance(spec, Mapping):
        return {k: as_plain(v) for k, v in spec.items()}
    if isinstance(spec, tuple | list):
        return [as_plain(v) for v in spec]
    return spec


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_float(spec: Spec, name: str) -> float:
    """YAML reads ``1e-6`` as a string; take it as the number that was meant."""
    value = getattr(spec, name)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{type(spec).__name__}.{name} is {value!r}; it must be a number.") from None
