"""Placement against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ResourceError
from rlkit.footprint import CONTEXT, activation_bytes, lora_params, model_states
from rlkit.models import ModelSize
from rlkit.placement import Measured, deal, measured_of, plan
from rlkit.preflight import Node

GIB = 2**30


# One thousand million parameters keep the hand's arithmetic short.
BILLION = ModelSize(10**9, 10, 1000, 10_000, 2, 100, True)
CPU = Node("10.0.0.1", "cpu", cpus=4, memory=64 * GIB)


def gpu_node(n: int, name: str = "gpu") -> Node:
    return Node("10.0.0.2", name, cpus=32, gpus=n, memory=512 * GIB)


@pytest.mark.parametrize(
    ("stage", "ranks", "parameters", "gradients", "optimizer"),
    [
        (0, 4, 4e9, 4e9, 8e9),
        (1, 4, 4e9, 4e9, 2e9),
        (2, 4, 4e9, 1e9, 2e9),
        (3, 4, 1e9, 1e9, 2e9),
        (3, 1, 4e9, 4e9, 8e9),
    ],
)
def test_fp32_states_of_each_stage(stage, ranks, parameters, gradients, optimizer):
    states = model_states(1e9, TrainSpec(zero_stage=stage, ranks=ranks))
    assert (states.parameters, states.gradients, states.optimizer) == (parameters, gradients, optimizer)
    assert states.total == parameters + gradients + optimizer


@pytest.mark.parametrize(
    ("stage", "total"),
    [
        (0, 16e9),  # autocast over fp32 parameters
        (1, 2e9 + 4e9 + 1.5e9),
        (2, 2e9 + 0.5e9 + 1.5e9),
        (3, 18e9 / 8),
    ],
)
def test_bf16_states_on_eight_ranks(stage, total):
    assert model_states(1e9, TrainSpec(zero_stage=stage, ranks=8, gpus_per_rank=1)).total == total


def test_lora_trains_adapters_only():
    # One layer, hidden 8, two kv heads of 2: q 8x8, k 8x4, v 8x4, o 8x8 = 192; gate, up, down 8x16 = 384; embedding 10x8 = 80.
    size = ModelSize(params=80 + 192 + 384, layers=1, hidden=8, vocab=10, kv_heads=2, head_dim=2, tied=True)
    spec = TrainSpec(lora_rank=2)
    # r (in + out): q 16, k 12, v 12, o 16, gate 24, up 24, down 24 = 128, times 2
    assert lora_params(size, spec) == 256
    states = model_states(size.params, spec, lora_params(size, spec))
    assert (states.parameters, states.gradients, states.optimizer) == (4 * 656, 4 * 256, 8 * 256)


def test_activations():
    spec = TrainSpec(micro_batch_tokens=1000, logits_chunk=100, gpus_per_rank=1)
    logits = 2 * 100 * 10_000  # 16 bit, turned into their gradient in place
    # A layer has 99M parameters: attention 2 x 1000 x 1000 + 2 x 1000 x 200, the rest 3 matrices of 1000 x 32,200. It keeps
    # 7 x 1000 + 3 x 32,200 + 2 x 200 = 104,000 numbers a token.
    assert activation_bytes(BILLION, spec) == 2 * 1000 * 11 * 104_000 + logits
    assert activation_bytes(BILLION, spec.but(gradient_checkpointing=True)) == 2 * 1000 * (10 * 1000 + 2 * 104_000) + logits
    assert activation_bytes(BILLION, spec.but(dtype="float32")) == 4 * 1000 * 11 * 104_000 + 2 * logits
    cpu = TrainSpec(micro_batch_tokens=1000, logits_chunk=100)
    assert activation_bytes(BILLION, cpu) == 2 * 34 * 1000 * 1000 * 10 + 2 * 4 * 100 * 10_000


def test_everything_on_one_cpu_node():
    made = plan(
        [CPU],
        BILLION,
        EngineSpec(kv_cache_gib=2),
        TrainSpec(ranks=2, zero_stage=2, cpus_per_rank=0.5, micro_batch_tokens=1),
        references=1,
    )
    assert [r.name for r in made.roles] == ["engine-0", "rank-0", "rank-1", "reference-0"]
    engine, rank, _, reference = made.roles
    assert engine.host == {"weights": 4e9, "KV cache": 2 * GIB}
    assert (rank.host["parameters"], rank.host["gradients"], rank.host["optimizer"]) == (4e9, 2e9, 4e9)
    assert reference.host == {"weights": 4e9}
    assert made.colocated


def test_whole_gpus_are_apart_and_fractions_share():
    apart = plan([gpu_node(4)], BILLION, EngineSpec(engines=2, gpus_per_engine=1), TrainSpec(ranks=2, gpus_per_rank=1), gpu_memory_gib=80)
    assert [(r.name, r.gpu_ids) for r in apart.roles] == [("engine-0", (0,)), ("engine-1", (1,)), ("rank-0", (2,)), ("rank-1", (3,))]
    assert not apart.colocated
    assert apart.roles[0].device == {"weights": 2e9, "KV cache": 0.9 * 80 * GIB - 2e9}
    engine = EngineSpec(engines=2, gpus_per_engine=0.6, gpu_memory_utilization=0.4)
    shared = plan([gpu_node(2)], BILLION, engine, TrainSpec(ranks=2, gpus_per_rank=0.4), gpu_memory_gib=80)
    assert [r.gpu_ids for r in shared.roles] == [(0,), (1,), (0,), (1,)]
    assert shared.colocated


@pytest.mark.parametrize(
    ("cards", "shares", "seats"),
    [
        # All fits on one card: it is the one that Ray takes too.
        (2, [("engine-0", 0.2, 1), ("engine-1", 0.2, 1), ("rank-0", 0.4, 1)], {"engine-0": (0,), "engine-1": (0,), "rank-0": (0,)}),
        (2, [("engine-0", 0.5, 1), ("engine-1", 0.5, 1), ("rank-0", 0.4, 1)], {"engine-0": (0,), "engine-1": (1,), "rank-0": (0,)}),
        (2, [("engine-0", 0.5, 2), ("rank-0", 0.4, 1), ("rank-1", 0.4, 1)], {"engine-0": (0, 1), "rank-0": (0,), "rank-1": (1,)}),
        (4, [(f"engine-{i}", 0.5, 2) for i in range(2)], {"engine-0": (0, 1), "engine-1": (0, 1)}),
        (1, [("engine-0", 0.5, 2)], None),
        (1, [("engine-0", 0.6, 1), ("engine-1", 0.6, 1)], None),
        (3, [], {}),
    ],
)
def test_shares_are_dealt_over_the_fewest_cards(cards, shares, seats):
    dealt = deal([(0, i) for i in range(cards)], shares)
    assert dealt == (None if seats is None else {name: tuple((0, i) for i in found) for name, found in seats.items()})


def test_an_engine_over_several_cards_stays_on_one_node():
    cards = [(0, 0), (1, 0), (1, 1)]
    assert deal(cards[:2], [("engine-0", 0.5, 2)]) is None
    for found in (cards, cards[1:]):
        assert deal(found, [("engine-0", 0.5, 2)]) == {"engine-0": ((1, 0), (1, 1))}


def test_the_table_shows_what_was_measured_beside_what_was_predicted():
    engine, train = EngineSpec(engines=2, gpus_per_engine=0.5, kv_cache_gib=4), TrainSpec(ranks=2, gpus_per_rank=0.4)
    made = plan([gpu_node(2)], BILLION, engine, train, gpu_memory_gib=80)
    assert "measured" not in repr(made)
    seen = replace(made, measured={"rank-1": {"update": Measured(12.5 * GIB, 40 * GIB)}})
    rows = {(r[0], r[1]): r[4] for r in seen.rows()}
    assert "(12.5 GiB measured)" in rows["rank-1", "gpu GPU 1"]
    assert "(40.0 GiB measured)" in rows["all of it", "gpu GPU 1"]
    assert "measured" not in rows["rank-0", "gpu GPU 0"] + rows["all of it", "gpu GPU 0"]
    assert "12.5 GiB measured" in seen._repr_html_()


def test_what_a_run_measured_is_the_most_of_its_own_phases():
    def phase(name, held, card, role="rank-0"):
        return {"kind": "phase", "phase": name, f"memory/{role}/reserved_gib": held, f"memory/{role}/card_gib": card}

    events = [phase("update", 3, 9), phase("update", 5, 8), phase("evaluation/rollout", 50, 50), {"kind": "note", "text": ""}]
    events += [phase("rollout", 7, 9, "engine-0"), {"kind": "phase", "phase": "rollout", "memory/engine-0/rss_gib": 4.0}]
    assert measured_of(events) == {
        "rank-0": {"update": Measured(5 * GIB, 9 * GIB)},
        "engine-0": {"rollout": Measured(7 * GIB, 9 * GIB)},
    }


def test_tensor_parallel_engine_takes_whole_gpus_of_one_node():
    made = plan([gpu_node(1, "one"), gpu_node(4, "four")], BILLION, EngineSpec(tensor_parallel_size=2), TrainSpec(gpus_per_rank=1))
    engine, rank = made.roles
    assert (engine.node, engine.gpus, engine.gpu_ids) == (1, 2.0, (0, 1))
    assert (rank.node, rank.gpu_ids) == (0, (0,))


def test_a_learner_beside_engines_that_stay_awake_keeps_what_an_update_took():
    train = TrainSpec(gpus_per_rank=0.4, micro_batch_tokens=1000)
    states, packed = 18e9, 2e9  # of 10^9 parameters; a sync packs their 16-bit copy

    def phases(**engine):
        made = plan(
            [gpu_node(1)], BILLION, EngineSpec.make({"gpus_per_engine": 0.5, "kv_cache_gib": 4}, **engine), train, gpu_memory_gib=80
        )
        return made.roles[1].phases

    awake, turns = phases(sleep_level=0), phases(sleep_level=2)
    assert awake["rollout"] == awake["update"] == awake["sync"] == turns["update"]
    assert turns["rollout"] == CONTEXT + states
    assert turns["sync"] == CONTEXT + states + packed


def test_offload_moves_the_optimizer_to_the_host():
    spec = TrainSpec(gpus_per_rank=1, zero_stage=2, offload_optimizer=True, gradient_checkpointing=True)
    rank = plan([gpu_node(2)], BILLION, EngineSpec(gpus_per_engine=1), spec).roles[1]
    assert rank.host == {"optimizer": 12e9, "gradients": 6e9}  # 16-bit sums and the fp32 copy that the optimizer reads
    assert rank.device["parameters"] == 2e9
    assert "gradients" not in rank.device


def test_refuses_a_gpu_that_would_overflow_and_says_what_to_change():
    # 16 GB of states and more on a GPU of 8 GiB
    with pytest.raises(ResourceError, match=r"GPU 1 of gpu has 8\.0 GiB and would hold .*rank-0.*zero_stage to 3.*offload_optimizer"):
        plan(
            [gpu_node(3)],
            BILLION,
            EngineSpec(gpus_per_engine=1, gpu_memory_utilization=0.5),
            TrainSpec(ranks=2, zero_stage=1, gpus_per_rank=1),
            gpu_memory_gib=8,
        )


def test_refuses_a_host_that_would_overflow():
    small = Node("10.0.0.3", "small", cpus=4, memory=8 * GIB)
    with pytest.raises(ResourceError, match=r"small has 8\.0 GiB of memory and would hold .*engine-0 .*rank-0 "):
        plan([small], BILLION, EngineSpec(kv_cache_gib=1), TrainSpec(micro_batch_tokens=1))


@pytest.mark.parametrize(
    ("engine", "learner", "named"),
    [
        (EngineSpec(engines=5), TrainSpec(), "engine-4.*sampler.engines or sampler.cpus_per_engine"),
        (EngineSpec(), TrainSpec(ranks=4), "rank-3.*learner.ranks or learner.cpus_per_rank"),
        (EngineSpec(), TrainSpec(gpus_per_rank=1), "rank-0.*0 GPUs.*learner.gpus_per_rank"),
    ],
)
def test_refuses_what_has_no_seat(engine, learner, named):
    with pytest.raises(ResourceError, match=named):
        plan([CPU], BILLION, engine, learner)


def test_reprs_list_every_role_and_escape():
    node = Node("10.0.0.1", "<b>host</b>", cpus=4, memory=64 * GIB)
    made = plan([node], BILLION, EngineSpec(kv_cache_gib=1), TrainSpec(micro_batch_tokens=1), references=1)
    text, page = repr(made), made._repr_html_()
    assert all(name in text and name in page for name in ("engine-0", "rank-0", "reference-0"))
    assert "<b>host</b>" in text
    assert "<b>host</b>" not in page
    assert "&lt;b&gt;host" in page
