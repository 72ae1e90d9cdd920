"""Settings that were left open, chosen from the cards, the cores and the model's size: no Ray, nothing is loaded.

`choose` fills what is None or 0 and leaves what was set. Engines and ranks share all cards, one of each on every card: a synchronous loop
works in one phase at a time, and so each phase has the whole cluster. Where a batch may be older than the learner (``max_lag``) they work
at the same time, so each side has half of the cards to itself; and so it is when a number of ranks is set that leaves cards for engines.
On a card that is shared both stay awake when all fits at once with a useful cache, else engines sleep, and the learner's states move when
even then the cache would be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlkit.config import EngineSpec, TrainSpec
from rlkit.engines.settings import GPU_SEQS
from rlkit.errors import ResourceError
from rlkit.footprint import CONTEXT, GRAPHS, Size, workspace_bytes
from rlkit.placement import Placement, plan
from rlkit.preflight import Node
from rlkit.reprs import gib

# One engine a card, also of a small model: with the scheduler of `rlkit.engines.scheduler` one of SmolLM2-135M on an H200 gave 174,000
# tokens/s for 1,024 prompts and 171,000 for 4,096, two gave 127,000 and 169,000 (benchmarks/rollout.py): processes on a card take turns.
MARGIN = 0.06  # of a card that stays free: fragments, and what is not predicted
USEFUL_CACHE = 0.15  # of a card: below this the others make room
LONGEST = 32768  # tokens of a sequence that a cache is made for when max_model_len is None
LEAST_CACHE = 2**28  # bytes
S = TypeVar("S", EngineSpec, TrainSpec)


def is_open(spec: EngineSpec | TrainSpec) -> bool:
    """Whether a spec leaves something for `choose` to fill."""
    if isinstance(spec, TrainSpec):
        return spec.ranks is None or spec.gpus_per_rank == 0 or spec.offload_between_turns is None or spec.gradient_checkpointing is None
    memory = spec.kv_cache_gib is not None or spec.gpu_memory_utilization is not None or spec.engine != "vllm"
    return not memory or spec.engines is None or spec.sleep_level is None or spec.gpus_per_engine == 0


def leanest(learner: TrainSpec) -> TrainSpec:
    """``learner`` with every setting that saves memory on its GPU: what can be assumed of one that is not made yet."""
    return learner.but(zero_stage=3, offload_optimizer=True, gradient_checkpointing=True, micro_batch_tokens=4096)


def choose(
    nodes: Sequence[Node],
    size: Size,
    sampler: EngineSpec,
    learner: TrainSpec | None,
    gpu_memory_gib: float | None,
    *,
    references: int = 0,
    cpus_per_reference: float = 1.0,
    gpus_per_reference: float = 0.0,
) -> tuple[EngineSpec, TrainSpec | None, Placement]:
    """``sampler`` and ``learner`` with every open setting filled, and where everybody sits. ``learner`` None: engines alone.

    Without GPUs, or when their memory is not known, only what does not depend on it is filled.

    Raises:
        ResourceError: it does not fit, or has no seat; see `rlkit.placement.plan`.
    """
    sampler, learner = fill(nodes, size, sampler, learner, gpu_memory_gib)
    made = plan(
        nodes,
        size,
        sampler,
        learner if learner is not None else TrainSpec(),
        references=references,
        cpus_per_reference=cpus_per_reference,
        gpus_per_reference=gpus_per_reference,
        gpu_memory_gib=gpu_memory_gib,
        with_learner=learner is not None,
    )
    return sampler, learner, made


def fill(
    nodes: Sequence[Node], size: Size, sampler: EngineSpec, learner: TrainSpec | None, gpu_memory_gib: float | None
) -> tuple[EngineSpec, TrainSpec | None]:
    """The settings of `choose`, seats not yet looked for.

    Raises:
        ResourceError: engines would have no room for a cache.
    """
    cards = sum(int(n.gpus) for n in nodes)
    if cards > 0:
        return _on_gpus(nodes, size, sampler, learner, cards, gpu_memory_gib)
    return _fill(sampler, engines=1, sleep_level=0), None if learner is None else _fill(learner, ranks=1, offload_between_turns=False)


def _on_gpus(
    nodes: Sequence[Node], size: Size, sampler: EngineSpec, learner: TrainSpec | None, cards: int, gpu_memory_gib: float | None
) -> tuple[EngineSpec, TrainSpec | None]:
    tp = sampler.tensor_parallel_size
    ranks, apart = (0, False) if learner is None else _ranks(sampler, learner, cards)
    shared = learner is not None and not apart
    engine_cards = max(1, cards - ranks if apart else cards) // tp * tp or tp
    engines = sampler.engines or engine_cards // tp
    per_card = max(1, -(-engines * tp // engine_cards))
    share = (0.5 if shared else 1.0) / per_card
    sampler = _fill(sampler, engines=engines, gpus_per_engine=float(tp) if tp > 1 and not shared else _down(share))
    if learner is not None:
        learner = _fill(learner, ranks=ranks)
        ranks_per_card = max(1, -(-ranks // cards))
        learner = _fill(learner, gpus_per_rank=1.0 if apart else _down(0.4 / ranks_per_card))
    if gpu_memory_gib is None or sampler.engine != "vllm":
        return _fill(sampler, sleep_level=0), None if learner is None else _fill(learner, offload_between_turns=False)
    card = gpu_memory_gib * 2**30
    if learner is None or not shared:
        sampler = _fill(sampler, sleep_level=0)
        learner = None if learner is None else _fill(learner, offload_between_turns=False)  # the ranks decide on checkpointing at start
        return _with_cache(sampler, size, per_card, card * (1 - MARGIN)), learner
    return _sharing(nodes, size, sampler, learner, per_card, card)


def _ranks(sampler: EngineSpec, learner: TrainSpec, cards: int) -> tuple[int, bool]:
    """How many ranks, and whether they have cards of their own."""
    tp, ranks = sampler.tensor_parallel_size, learner.ranks
    if ranks is not None:
        return ranks, learner.gpus_per_rank >= 1 or (learner.gpus_per_rank == 0 and cards - ranks >= tp)
    whole = learner.gpus_per_rank >= 1 or sampler.gpus_per_engine >= 1
    together = learner.max_lag > 0 and not 0 < learner.gpus_per_rank < 1 and not 0 < sampler.gpus_per_engine < 1  # work at the same time
    half = cards // 2 if sampler.engines is None else cards - sampler.engines * tp
    if whole or (together and min(half, cards - half) >= 1 and cards - half >= tp):
        return max(1, half), True
    return cards, False


def _sharing(
    nodes: Sequence[Node], size: Size, sampler: EngineSpec, learner: TrainSpec, per_card: int, card: float
) -> tuple[EngineSpec, TrainSpec]:
    """Who gives way on a shared card, the cheaper first: nobody, the engines, the learner's activations, its states."""
    for level, recompute, moves in ((0, False, False), (2, False, False), (2, True, False), (2, True, True)):
        one = _fill(sampler, sleep_level=level)
        two = _fill(learner, gradient_checkpointing=recompute, offload_between_turns=moves and not learner.offload_param)
        probe = plan(nodes, size, one.but(kv_cache_gib=one.kv_cache_gib or LEAST_CACHE / 2**30), two)
        ranks = [r for r in probe.roles if r.name.startswith("rank-")]
        together = sum(r.gpu_ids == ranks[0].gpu_ids for r in ranks)
        # Engines that stay awake live beside the fullest phase of the learner; those that sleep beside what it keeps during a rollout.
        beside = together * (ranks[0].phases["rollout"] if one.sleep_level else max(ranks[0].phases.values()))
        room = card * (1 - MARGIN) - beside
        asleep = probe.roles[0].phases["update"] / one.tensor_parallel_size if one.sleep_level else 0.0
        alone = card * (1 - MARGIN) - together * ranks[0].phases["update"] - per_card * asleep
        if alone >= 0 and room / per_card - _engine_without_cache(size, one) >= _wanted_cache(size, one, per_card, card):
            break
    return _with_cache(one, size, per_card, room), two


def _wanted_cache(size: Size, spec: EngineSpec, per_card: int, card: float) -> float:
    """Bytes of an engine's cache: as set, else a useful one."""
    if spec.kv_cache_gib is not None:
        return spec.kv_cache_gib * 2**30
    if spec.gpu_memory_utilization is not None:
        return spec.gpu_memory_utilization * card - _engine_without_cache(size, spec)
    return min(USEFUL_CACHE * card / per_card, _full_cache(size, spec))


def _with_cache(spec: EngineSpec, size: Size, per_card: int, room: float) -> EngineSpec:
    """``kv_cache_gib`` for engines that share ``room`` bytes of a card, unless their memory was set.

    Raises:
        ResourceError: not even a small cache fits.
    """
    if spec.kv_cache_gib is not None or spec.gpu_memory_utilization is not None or spec.engine != "vllm":
        return spec
    cache = min(room / per_card - _engine_without_cache(size, spec), _full_cache(size, spec))
    if cache < LEAST_CACHE:
        raise ResourceError(
            f"{per_card} engine(s) a card would have {gib(max(0.0, room))} for weights of {gib(2 * size.params)} each and a cache. "
            "Raise sampler.tensor_parallel_size, set learner.offload_optimizer or learner.zero_stage 3 over more ranks, or use more GPUs."
        )
    return spec.but(kv_cache_gib=int(cache / 2**30 * 100) / 100 if cache >= 2**30 else cache / 2**30)


def _engine_without_cache(size: Size, spec: EngineSpec) -> float:
    """Bytes of an engine on each of its cards, but for the key-value cache."""
    width = 4 if spec.dtype == "float32" else 2
    graphs = 0.0 if spec.enforce_eager else GRAPHS
    return width * size.params / spec.tensor_parallel_size + CONTEXT + graphs + workspace_bytes(size, spec)


def _full_cache(size: Size, spec: EngineSpec) -> float:
    """Bytes beyond which a cache holds nothing: every sequence at its full length."""
    token = 2 * size.layers * size.kv_heads * size.head_dim * (4 if spec.dtype == "float32" else 2) / spec.tensor_parallel_size
    return float(token * (spec.max_num_seqs or GPU_SEQS) * (spec.max_model_len or LONGEST))


def _fill(spec: S, **values: object) -> S:
    """``spec`` with ``values`` where it is None, or 0 for a share of GPUs."""
    given = spec.as_dict()
    open_ = {k: v for k, v in values.items() if given[k] is None or (k.startswith("gpus_per_") and given[k] == 0)}
    return spec.but(**open_)


def _down(share: float) -> float:
    """A share rounded down, so that several of them never ask for more than a card."""
    return int(share * 1000) / 1000
