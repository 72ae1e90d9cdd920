"""When a GPU is full: which phase, which numbers, and which setting to change. `advise` is the decision tree, and is pure.

phase                      first                      then
─────────────────────────  ─────────────────────────  ────────────────────────────────────────────────────────────────────
start of an engine         utilization, cache         shorter context, what else is on the card
start of a rank            offload_optimizer          ZeRO stage 3 over more ranks, what else is on the card
rollout                    max_num_batched_tokens     gpu_memory_utilization or kv_cache_gib, max_num_seqs
forward, backward          micro_batch_tokens         logits_chunk when the logits failed, gradient_checkpointing, offload, ZeRO
optimizer                  offload_optimizer          ZeRO stage 3 over more ranks
sync                       sleep_level, offload       gpu_memory_utilization
turn                       sleep_level, offload       gpu_memory_utilization
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import OutOfMemoryError
from rlkit.footprint import BATCHED_TOKENS
from rlkit.reprs import gib
from rlkit.zero.ds_config import chunk_of

LEAST_TOKENS = 512  # below this a smaller micro-batch is no help: one sequence has as many
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_VLLM_START = (
    "No available memory for the cache blocks",
    "less than desired GPU memory utilization",
    "larger than the available KV cache memory",
)


@dataclass(frozen=True)
class Facts:
    """Bytes on the card when an allocation failed; 0 where unknown."""

    asked: float = 0.0
    allocated: float = 0.0  # by this process, at the phase's peak
    reserved: float = 0.0  # held by this process's allocator
    free: float = 0.0
    total: float = 0.0
    vocab: int = 0  # of the model, to tell logits from other tensors

    @property
    def others(self) -> float:
        """Held by other processes on the card: engines, ranks, references, other programs."""
        return max(0.0, self.total - self.free - self.reserved)


def advise(phase: str, facts: Facts, sampler: EngineSpec | None, learner: TrainSpec | None) -> str:
    """What to change, most promising first."""
    ways: list[str] = []
    if phase == "start" and sampler is None and learner is not None:
        ways += _fewer_states(learner)
    elif phase == "start":
        ways += _smaller_cache(sampler, start=True)
        ways.append("lower EngineSpec.max_model_len")
    elif phase == "rollout":
        now = (sampler.max_num_batched_tokens if sampler else None) or BATCHED_TOKENS
        if now // 2 >= LEAST_TOKENS:
            ways.append(f"lower EngineSpec.max_num_batched_tokens (now {now}) to {now // 2}")
        ways += _smaller_cache(sampler)
        ways.append("lower EngineSpec.max_num_seqs")
    elif phase in ("forward", "backward") and learner is not None:
        ways += _smaller_update(facts, learner)
    elif phase == "optimizer" and learner is not None:
        ways += _fewer_states(learner)
    elif phase in ("sync", "turn"):
        if sampler is not None and not sampler.sleep_level:
            ways.append("set EngineSpec.sleep_level to 2, so that engines give the card back while the learner works")
        if learner is not None and not learner.offload_between_turns and not learner.offload_param:
            ways.append("set TrainSpec.offload_between_turns to True")
        ways += _smaller_cache(sampler)
    if facts.total and facts.others > 0.5 * facts.total and phase not in ("sync", "turn"):
        ways.append(
            f"free the card: other processes hold {gib(facts.others)} of it (sleep_level, offload_between_turns, or other programs)"
        )
    return "; or ".join(ways) if ways else "use a card with more memory or a smaller model"


def _smaller_cache(sampler: EngineSpec | None, start: bool = False) -> list[str]:
    if sampler is not None and sampler.kv_cache_gib is not None:
        return [f"lower EngineSpec.kv_cache_gib (now {sampler.kv_cache_gib:g})"]
    now = sampler.gpu_memory_utilization if sampler is not None else None
    shown = "" if now is None else f" (now {now:g})"
    if start:
        return [f"lower EngineSpec.gpu_memory_utilization{shown} when others need the card, raise it when the cache is what is too small"]
    return [f"lower EngineSpec.gpu_memory_utilization{shown}"]


def _smaller_update(facts: Facts, learner: TrainSpec) -> list[str]:
    ways = []
    tokens = learner.micro_batch_tokens
    chunk = min(chunk_of(learner.logits_chunk, max(1, facts.vocab), learner.gpus_per_rank > 0), tokens)
    # A chunk's logits in 16 or 32 bit; an allocation within a tenth of that is one of them.
    sized = facts.vocab and any(0.9 <= facts.asked / (width * chunk * facts.vocab) <= 1.1 for width in (2, 4))
    if sized and chunk > 64:
        ways.append(f"lower TrainSpec.logits_chunk (now {chunk}) to {max(64, chunk // 4)}: it was the logits that did not fit")
    if tokens // 2 >= LEAST_TOKENS:
        ways.append(f"lower TrainSpec.micro_batch_tokens (now {tokens}) to {tokens // 2}")
    if not learner.gradient_checkpointing:
        ways.append("set TrainSpec.gradient_checkpointing to True")
    return ways + _fewer_states(learner)


def _fewer_states(learner: TrainSpec) -> list[str]:
    ways = []
    if not learner.offload_optimizer and learner.zero_stage > 0:
        ways.append("set TrainSpec.offload_optimizer to True")
    if learner.zero_stage < 3 and learner.world > 1:
        ways.append("set TrainSpec.zero_stage to 3")
    elif learner.zero_stage < 3:
        ways.append("set TrainSpec.zero_stage to 3 and spread it over more TrainSpec.ranks")
    else:
        ways.append(f"raise TrainSpec.ranks (now {learner.world}) over more GPUs")
    return ways


def message(
    phase: str, role: str, facts: Facts, sampler: EngineSpec | None, learner: TrainSpec | None, after: str = "", cause: str = ""
) -> str:
    """The whole text of an `OutOfMemoryError`."""
    asked = f"asked for {gib(facts.asked)} more" if facts.asked else "asked for more than is free"
    numbers = (
        f": it {asked}, had {gib(facts.allocated)} allocated at the peak ({gib(facts.reserved)} reserved); "
        f"{gib(facts.free)} of the card's {gib(facts.total)} are free and other processes hold {gib(facts.others)}"
        if facts.total
        else ""
    )
    tail = f" {after}" if after else ""
    why = f" ({cause})" if cause else ""
    return f"{role} ran out of GPU memory in the {phase} phase{numbers}. To change: {advise(phase, facts, sampler, learner)}.{tail}{why}"


@contextmanager
def explained(
    phase: str,
    role: str,
    *,
    sampler: EngineSpec | None = None,
    learner: TrainSpec | None = None,
    vocab: int = 0,
    after: str = "",
) -> Iterator[None]:
    """Turn torch's out-of-memory error, and CUDA's own, in the block into ours.

    Raises:
        OutOfMemoryError: names phase, numbers and setting; ``after`` says what state things are in.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if "out of memory" not in str(error).lower():
            raise
        found = measure(str(error), vocab)
        raise OutOfMemoryError(message(part_of(error) or phase, role, found, sampler, learner, after)) from error


def part_of(error: BaseException) -> str | None:
    """ "backward" or "optimizer" when the error came from there in an update, by the functions that it passed; None elsewhere."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.endswith("rlkit/zero/engine.py") and frame.name in ("backward", "step"):
            return "backward" if frame.name == "backward" else "optimizer"
    return None


def measure(text: str, vocab: int = 0) -> Facts:
    """The numbers of this process's GPU now; ``text`` is torch's message, which holds what was asked for."""
    import torch

    asked = asked_bytes(text)
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Facts(asked=asked, vocab=vocab)
    free, total = torch.cuda.mem_get_info()
    return Facts(asked, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), free, total, vocab)


def asked_bytes(text: str) -> float:
    """Bytes of the allocation that failed, from torch's message; 0 when it does not say."""
    found = _ASKED.search(text)
    return float(found[1]) * _UNIT[found[2]] if found else 0.0


def at_start(error: ValueError, role: str, sampler: EngineSpec) -> OutOfMemoryError | None:
    """Ours for one of vLLM's complaints about memory when it starts, None for any other error."""
    text = str(error)
    if not any(known in text for known in _VLLM_START):
        return None
    return OutOfMemoryError(message("start", role, measure(text), sampler, None, cause=f"vLLM: {text}"))
