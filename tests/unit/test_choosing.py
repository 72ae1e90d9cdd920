"""What is left open is chosen; what is set stays. Numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlkit import cards
from rlkit.choosing import choose, is_open, leanest
from rlkit.config import ClusterSpec, EngineSpec, TrainSpec, as_plain
from rlkit.errors import ResourceError
from rlkit.footprint import CONTEXT
from rlkit.models import ModelSize
from rlkit.parts import Parts
from rlkit.preflight import Node

GIB = 2**30
SMALL = ModelSize(135_000_000, 30, 576, 49_152, 3, 64, True)
SEVEN = ModelSize(6_738_415_616, 32, 4096, 32_000, 32, 128, False)
CARD = 139.8  # GiB of an H200


def node(gpus: int, cpus: int = 16, memory: int = 256) -> Node:
    return Node("10.0.0.2", "gpu", cpus=cpus, gpus=gpus, memory=memory * GIB)


def test_without_gpus_there_is_one_engine_that_stays_awake():
    sampler, learner, made = choose([node(0)], SMALL, EngineSpec(), TrainSpec(), None)
    assert (sampler.engines, sampler.gpus_per_engine, sampler.sleep_level) == (1, 0.0, 0)
    assert learner is not None
    assert (learner.gpus_per_rank, learner.offload_between_turns) == (0.0, False)
    assert made.peaks() == {}


def test_a_small_model_and_its_learner_share_a_card_awake():
    sampler, learner, made = choose([node(1)], SMALL, EngineSpec(max_model_len=1024), TrainSpec(), CARD)
    assert learner is not None
    assert (sampler.engines, sampler.gpus_per_engine, sampler.sleep_level) == (1, 0.5, 0)
    assert (learner.gpus_per_rank, learner.offload_between_turns) == (0.4, False)
    assert sampler.kv_cache_gib == 22.5  # 1,024 sequences of 1,024 tokens, 2 x 30 layers x 3 heads x 64 x 2 bytes each
    assert made.colocated
    assert max(made.peaks().values()) <= CARD * GIB


def test_a_large_learner_makes_the_engine_sleep_and_then_moves_itself():
    few = {"zero_stage": 3, "gradient_checkpointing": True, "micro_batch_tokens": 8192}
    sampler, learner, made = choose([node(1)], SEVEN, EngineSpec(max_model_len=1024), TrainSpec.make(few, offload_optimizer=True), CARD)
    assert learner is not None
    # 12.6 GiB of parameters stay beside 12.6 GiB of engine weights: all fits at once
    assert (sampler.engines, sampler.sleep_level, learner.offload_between_turns) == (1, 0, False)
    # 18 bytes a parameter on the card, 113 GiB: no room for an engine in the update, and little beside the states in a rollout
    sampler, learner, made = choose([node(1)], SEVEN, EngineSpec(max_model_len=1024), TrainSpec.make(few), CARD)
    assert learner is not None
    assert (sampler.sleep_level, learner.offload_between_turns) == (2, True)
    held = 18 * SEVEN.params
    (rank,) = [r for r in made.roles if r.name == "rank-0"]
    assert rank.host["between turns"] == held
    assert made.peaks()["update"] > held
    assert rank.phases["rollout"] == CONTEXT
    assert sampler.kv_cache_gib > 0.75 * CARD
    with pytest.raises(ResourceError, match=r"gpu has 64\.0 GiB of memory and would hold 11\d\.\d GiB"):
        choose([node(1, memory=64)], SEVEN, EngineSpec(max_model_len=1024), TrainSpec.make(few), CARD)


def test_what_is_set_stays():
    asked = EngineSpec(engines=2, gpus_per_engine=0.2, kv_cache_gib=3.0, sleep_level=1)
    train = TrainSpec(ranks=1, gpus_per_rank=0.3, offload_between_turns=False, gradient_checkpointing=False)
    sampler, learner, made = choose([node(1)], SMALL, asked, train, CARD)
    assert (sampler, learner) == (asked, train)
    assert not is_open(sampler)
    assert not is_open(train)
    assert is_open(EngineSpec())
    assert is_open(TrainSpec())
    assert is_open(asked.but(engine="hf")) is False
    assert leanest(train).zero_stage == 3
    engine = made.roles[0]
    assert engine.host == {"weights asleep": 2 * SMALL.params}
    assert engine.phases["rollout"] - engine.phases["sync"] > 3 * GIB
    assert engine.phases["sync"] - engine.phases["update"] == 2 * SMALL.params


@pytest.mark.parametrize(("asked", "engines"), [({"gpus_per_engine": 0.4}, 1), ({"engines": 4}, 4), ({"gpu_memory_utilization": 0.3}, 1)])
def test_one_engine_a_card_unless_more_are_asked_for(asked, engines):
    sampler, _, made = choose([node(1)], SMALL, EngineSpec.make(asked, max_model_len=512), TrainSpec(gpus_per_rank=0.4), CARD)
    assert sampler.engines == engines
    assert sampler.gpus_per_engine * engines + 0.4 <= 1
    assert max(made.peaks().values()) <= CARD * GIB


def test_ranks_have_cards_of_their_own_where_there_are_enough():
    sampler, learner, made = choose([node(4, cpus=64)], SMALL, EngineSpec(), TrainSpec(ranks=2), CARD)
    assert learner is not None
    assert (learner.gpus_per_rank, sampler.engines, sampler.gpus_per_engine) == (1.0, 2, 1.0)
    assert not made.colocated
    assert {r.gpu_ids for r in made.roles if r.name.startswith("rank-")} == {(2,), (3,)}
    alone, nobody, made = choose([node(1)], SEVEN, EngineSpec(max_model_len=4096), None, CARD)
    assert nobody is None
    assert [r.name for r in made.roles] == ["engine-0"]
    assert alone.kv_cache_gib is not None
    assert alone.kv_cache_gib > 0.75 * CARD


def test_two_cards_are_shared_by_all_when_phases_take_turns():
    sampler, learner, made = choose([node(2, cpus=32)], SMALL, EngineSpec(max_model_len=1024), TrainSpec(), CARD)
    assert learner is not None
    assert (sampler.engines, sampler.gpus_per_engine, learner.ranks, learner.gpus_per_rank) == (2, 0.5, 2, 0.4)
    assert [(r.name, r.gpu_ids) for r in made.roles] == [("engine-0", (0,)), ("engine-1", (1,)), ("rank-0", (0,)), ("rank-1", (1,))]
    assert made.spread == {0: (0, 1)}
    # One engine over both cards: a share of each.
    both, learner, made = choose([node(2, cpus=32)], SEVEN, EngineSpec(tensor_parallel_size=2, max_model_len=1024), TrainSpec(), CARD)
    assert learner is not None
    assert (both.engines, both.gpus_per_engine, learner.ranks) == (1, 0.5, 2)
    assert [(r.name, r.gpus, r.gpu_ids) for r in made.roles] == [("engine-0", 1.0, (0, 1)), ("rank-0", 0.4, (0,)), ("rank-1", 0.4, (1,))]
    assert max(made.peaks().values()) <= CARD * GIB


@pytest.mark.parametrize(
    ("engine", "train", "seats"),
    [
        ({}, {"max_lag": 1}, {"engine-0": (0,), "rank-0": (1,)}),  # both sides work at the same time
        ({}, {"ranks": 1}, {"engine-0": (0,), "rank-0": (1,)}),  # a card is left for an engine
        ({}, {"gpus_per_rank": 1}, {"engine-0": (0,), "rank-0": (1,)}),
        ({"gpus_per_engine": 1}, {}, {"engine-0": (0,), "rank-0": (1,)}),
        ({}, {"max_lag": 1, "gpus_per_rank": 0.4}, {"engine-0": (0,), "engine-1": (1,), "rank-0": (0,), "rank-1": (1,)}),
        ({"tensor_parallel_size": 2}, {"max_lag": 1}, {"engine-0": (0, 1), "rank-0": (0,), "rank-1": (1,)}),  # no card left to be apart
    ],
)
def test_two_cards_apart(engine, train, seats):
    _, _, made = choose([node(2, cpus=32)], SMALL, EngineSpec.make(engine, max_model_len=1024), TrainSpec.make(train), CARD)
    assert {r.name: r.gpu_ids for r in made.roles} == seats


def test_without_the_memory_of_a_card_only_seats_are_chosen():
    sampler, learner, _ = choose([node(1)], SMALL, EngineSpec(), TrainSpec(), None)
    assert learner is not None
    assert (sampler.engines, sampler.kv_cache_gib, sampler.sleep_level, learner.gpus_per_rank) == (1, None, 0, 0.4)


def test_refuses_a_card_with_no_room_for_a_cache():
    with pytest.raises(ResourceError, match="tensor_parallel_size"):
        choose([node(1)], SEVEN, EngineSpec(), TrainSpec(gradient_checkpointing=True, zero_stage=3, micro_batch_tokens=512), 14.0)


class Book:
    """The part of a run's ledger that choosing reads and writes."""

    def __init__(self) -> None:
        self.parts: dict[str, dict] = {}
        self.notes: list[str] = []

    def status(self) -> dict:
        return {"parts": self.parts}

    def check(self) -> None:
        pass

    def append(self, event: dict) -> None:
        self.notes.append(event["text"])


def test_a_run_chooses_once_and_again_the_same(monkeypatch, capsys):
    sizes = {"small": SMALL, "seven": SEVEN}
    monkeypatch.setattr(cards, "size_of", lambda model, nodes: sizes[model])
    cluster = SimpleNamespace(nodes=(node(1),), spec=ClusterSpec(), gpu_memory_gib=lambda: CARD)
    run, book = Parts("choosing", 0, cluster), Book()
    run.ledger = book  # type: ignore[assignment]
    first = run._chosen("sampler", "small", EngineSpec())
    assert (first.engines, first.sleep_level) == (1, 0)
    assert "run.sampler: placement chose engines=1" in book.notes[0]
    assert "fullest GPU: rollout" in capsys.readouterr().out
    book.parts["sampler"] = {"model": "small", "spec": as_plain(first), "asked": as_plain(EngineSpec())}
    learner = run._chosen("learner", "small", TrainSpec())
    assert (learner.gpus_per_rank, learner.offload_between_turns) == (0.4, False)
    book.parts["learner"] = {"model": "small", "spec": as_plain(learner), "asked": as_plain(TrainSpec())}
    assert run._chosen("sampler", "small", EngineSpec()) == first  # the cell is run again
    assert run._chosen("sampler", "small", first) == first  # without arguments: as recorded, nothing is open
    assert len(book.notes) == 2
    assert [r.name for r in run.placement().roles] == ["engine-0", "rank-0"]
    # Engines that take the whole card: a run that only samples. With a learner in the run they have no seat.
    with pytest.raises(ResourceError, match="No seat for rank-0"):
        run._chosen("sampler", "small", EngineSpec(gpus_per_engine=1.0))
    only, book = Parts("choosing-only", 0, cluster), Book()
    only.ledger = book  # type: ignore[assignment]
    alone = only._chosen("sampler", "small", EngineSpec(gpus_per_engine=1.0))
    assert (alone.engines, alone.gpus_per_engine, alone.sleep_level) == (1, 1.0, 0)
    assert "rank-0" not in book.notes[0]
    # Before its learner is made, a large model's engine is given what a lean learner would leave.
    large, book = Parts("choosing-large", 0, cluster), Book()
    large.ledger = book  # type: ignore[assignment]
    engine = large._chosen("sampler", "seven", EngineSpec(max_model_len=2048))
    assert engine.engines == 1
    assert engine.kv_cache_gib > 0.15 * CARD
