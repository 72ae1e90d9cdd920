"""From an EngineSpec to the environment and the arguments of an engine. Pure: imports neither Ray nor vLLM."""

from __future__ import annotations

import math
from typing import Any

from rlkit.config import EngineSpec
from rlkit.errors import ConfigError, nearest

NAMED = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "block_size",
    "swap_space",
    "trust_remote_code",
    "seed",
)
OURS = ("model", "tokenizer", "dtype", "logprobs_mode", "worker_extension_cls", "disable_log_stats", "use_tqdm_on_load")
WORKER = "rlkit.engines.worker.WeightWorker"
GPU_SEQS = 1024  # sequences decoded at once on a GPU when EngineSpec.max_num_seqs is None


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables that must be set before vLLM or torch is imported in the engine's process."""
    out = {
        "OMP_NUM_THREADS": str(spec.threads or max(1, math.ceil(spec.cpus_per_engine))),
        "TOKENIZERS_PARALLELISM": "true" if spec.gpus_per_engine > 0 else "false",  # a thousand responses are decoded at once
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if spec.engine == "hf":
        return out
    out |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: no second process to start, feed and lose
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin every engine to the same cores
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles for a minute at start, and cannot return the log-probs that are asked for
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TQDM_DISABLE": "1",  # bars over CUDA graphs and weight files would come into the notebook from another process
        "FLASHINFER_LOGGING_LEVEL": "error",
    }
    if spec.gpus_per_engine == 0 and spec.enforce_eager is not False:
        out["TORCHDYNAMO_DISABLE"] = (
            "1"  # else vLLM compiles a part of its sampler in the first rollout, which takes seconds and a C++ compiler
        )
    return out


def engine_args(spec: EngineSpec, known: list[str], **ours: Any) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs, of which ``known`` are the fields.

    Raises:
        ConfigError: a setting that this vLLM does not have, with the nearest that it has; or one that has its own EngineSpec field.
    """
    args = {name: getattr(spec, name) for name in NAMED if getattr(spec, name) is not None}
    for key in spec.vllm:
        if key in args or key in NAMED:
            raise ConfigError(f"EngineSpec.vllm has {key!r}, which is a setting of EngineSpec itself: give it there.")
        if key in OURS:
            raise ConfigError(f"EngineSpec.vllm has {key!r}, which rlkit sets itself.")
    args |= dict(spec.vllm)
    for key in args:
        if key not in known:
            raise ConfigError(f"vLLM has no engine argument {key!r}{nearest(key, known) or '.'}")
    return args | ours


def gpu_args(spec: EngineSpec) -> dict[str, Any]:
    """What rlkit chooses on a GPU where ``spec`` leaves it open: a batch large enough that all samples of a rollout run at once, and CUDA
    graphs of whole decode steps for it without torch.compile, which decodes no faster there and takes half a minute at start."""
    seqs = spec.max_num_seqs or GPU_SEQS
    out: dict[str, Any] = {"max_num_seqs": seqs}
    if not spec.enforce_eager and "compilation_config" not in spec.vllm:
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < seqs] + [*range(128, seqs, 128), seqs]
        out["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return out


def kv_cache_bytes(spec: EngineSpec, token_bytes: int, max_model_len: int) -> int:
    """Key-value cache of an engine on the CPU when none is given: room for every sequence at full length, at most 1 GiB (zeroing a GiB
    takes seconds at start), and at least two full sequences."""
    if spec.kv_cache_gib is not None:
        return int(spec.kv_cache_gib * 2**30)
    block = spec.block_size or 128
    sequence = token_bytes * (-(-max_model_len // block)) * block
    return max(2 * sequence, min(2**30, sequence * (spec.max_num_seqs or 256)))
