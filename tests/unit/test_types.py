"""The values of the loop: order, shapes, summaries and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlkit.config import SampleSpec
from rlkit.errors import BatchError
from rlkit.types import Batch, Prompt, Rollouts, RolloutShard, Scored, ScoreShard, UpdateStats, fetch, require, samples_table


def prompt(i: int) -> Prompt:
    messages = ({"role": "system", "content": "add"}, {"role": "user", "content": f"{i}+{i}="})
    return Prompt(f"p{i}", messages, answer=str(2 * i))


def shard(first: int, lengths: list[list[int]]) -> RolloutShard:
    """A shard whose tokens count up from 100 * first."""
    grid = np.array(lengths, dtype=np.int32)
    n = int(grid.sum())
    return RolloutShard(
        prompts=tuple(prompt(first + i) for i in range(len(lengths))),
        prompt_tokens=tuple(np.array([1, 2], dtype=np.int32) for _ in lengths),
        tokens=np.arange(100 * first, 100 * first + n, dtype=np.int32),
        lengths=grid,
        logprobs=-np.arange(n, dtype=np.float32),
        texts=tuple(f"text {first}-{i}" for i in range(grid.size)),
        finish_reasons=tuple("stop" if i % 2 == 0 else "length" for i in range(grid.size)),
    )


def rollouts() -> Rollouts:
    """3 prompts x 2 samples in two shards of 2 and 1 prompts; lengths 1 2 / 3 0 / 4 5."""
    shards = (shard(0, [[1, 2], [3, 0]]), shard(2, [[4, 5]]))
    lengths = np.array([[1, 2], [3, 0], [4, 5]], dtype=np.int32)
    return Rollouts(
        id="r",
        shards=shards,
        prompt_ids=("p0", "p1", "p2"),
        shard_sizes=(2, 1),
        prompt_lengths=np.array([2, 2, 2], dtype=np.int32),
        lengths=lengths,
        truncated=np.array([[False, True]] * 3),
        policy_version=4,
        sampling=SampleSpec(n=2),
        engine="vllm",
        seconds=3.0,
    )


def scored() -> Scored:
    made = rollouts()
    rewards = np.array([[1, 0], [0, 0], [1, 1]], dtype=np.float32)
    correct = rewards > 0
    details = [("correct", "0"), ("wrong", "7"), ("wrong", "3"), ("unparsed", None), ("correct", "4"), ("correct", "4")]
    shards = (
        ScoreShard(rewards[:2], {"math": rewards[:2]}, tuple(v for v, _ in details[:4]), tuple(e for _, e in details[:4])),
        ScoreShard(rewards[2:], {"math": rewards[2:]}, tuple(v for v, _ in details[4:]), tuple(e for _, e in details[4:])),
    )
    return Scored(made, rewards, {"math": rewards}, {"math": 1.0}, {"correct": correct, "wrong": ~correct}, shards, 0.1)


def test_the_question_is_the_last_user_message():
    assert prompt(3).question == "3+3="
    assert Prompt("x", ({"role": "system", "content": "s"},)).question == ""


def test_offsets_and_samples_follow_prompt_major_order():
    one = shard(0, [[1, 2], [3, 0]])
    assert one.group_size == 2
    assert one.offsets().tolist() == [0, 1, 3, 6, 6]
    got = [(s.prompt.id, s.index, s.tokens.tolist(), s.logprobs.tolist(), s.truncated) for s in one.samples()]
    assert got == [
        ("p0", 0, [0], [0.0], False),
        ("p0", 1, [1, 2], [-1.0, -2.0], True),
        ("p1", 0, [3, 4, 5], [-3.0, -4.0, -5.0], False),
        ("p1", 1, [], [], True),
    ]


def test_rollouts_give_samples_of_the_first_prompts_over_shards():
    made = rollouts()
    assert made.shape == (3, 2)
    assert [s.text for s in made.samples()] == ["text 0-0", "text 0-1", "text 0-2", "text 0-3", "text 2-0", "text 2-1"]
    assert [s.prompt.id for s in made.samples(1)] == ["p0", "p0"]
    assert [s.prompt.id for s in made.samples(3)] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert len(made.samples(99)) == 6
    assert made.samples(0) == []


def test_rollouts_report_their_speed_and_what_was_dropped():
    made = rollouts()
    assert made.tokens_per_second == 5.0  # 15 tokens in 3 s
    assert repr(made) == "Rollouts(3 prompts x 2, 15 tokens, 3 truncated, 5 tokens/s, vllm, policy version 4)"
    assert dataclasses.replace(made, seconds=0.0).tokens_per_second == 0.0
    assert "1 prompts dropped as too long" in repr(dataclasses.replace(made, dropped=(("p9", 300),)))


def test_scored_samples_carry_rewards_parts_verdicts_and_answers():
    got = [(s.prompt.id, s.reward, s.parts, s.verdict, s.extracted) for s in scored().samples(2)]
    assert got == [
        ("p0", 1.0, {"math": 1.0}, "correct", "0"),
        ("p0", 0.0, {"math": 0.0}, "wrong", "7"),
        ("p1", 0.0, {"math": 0.0}, "wrong", "3"),
        ("p1", 0.0, {"math": 0.0}, "unparsed", None),
    ]
    assert [s.extracted for s in scored().samples()][4:] == ["4", "4"]


def test_the_summary_of_scored_by_hand():
    summary = scored().summary()
    assert summary["reward/mean"] == pytest.approx(3 / 6)
    assert summary["reward/std"] == pytest.approx(0.5)
    assert summary["reward/no_spread_groups"] == pytest.approx(2 / 3)  # 0 0 and 1 1
    assert summary["length/mean"] == pytest.approx(15 / 6)
    assert summary["length/max"] == 5
    assert summary["length/truncated"] == 0.5
    assert summary["reward/math"] == pytest.approx(0.5)
    assert summary["verdict/correct"] == pytest.approx(0.5)
    assert all(type(v) is float for v in summary.values())
    assert scored().accuracy == 0.5
    assert dataclasses.replace(scored(), verdicts={}).accuracy is None


def test_the_html_of_scored_escapes_the_model_s_text():
    made = scored()
    evil = dataclasses.replace(made.rollouts.shards[0], texts=("<img onerror=x>",) * 4)
    made = dataclasses.replace(made, rollouts=dataclasses.replace(made.rollouts, shards=(evil, made.rollouts.shards[1])))
    assert "<img" not in made._repr_html_()
    assert "&lt;img" in made._repr_html_()


def test_batch_counts_what_is_kept():
    advantages = np.array([[1, -1], [0, 0], [2, 0]], dtype=np.float32)
    batch = Batch(scored(), advantages, np.array([True, False, True]), "grpo", no_spread_groups=2)
    assert (batch.n_samples, batch.policy_version) == (4, 4)
    summary = batch.summary()
    assert summary["advantage/mean"] == pytest.approx((1 - 1 + 2 + 0) / 4)
    assert summary["advantage/std"] == pytest.approx(np.sqrt(6 / 4 - 0.25))
    assert summary["advantage/dropped_groups"] == 1
    assert repr(batch) == "Batch(2 of 3 prompts x 2, grpo, 2 groups without spread, policy version 4)"
    none = Batch(scored(), advantages, np.zeros(3, dtype=bool), "grpo", 3)
    assert none.summary()["advantage/mean"] == 0.0


def test_update_stats_look_bare_names_up_under_policy():
    stats = UpdateStats(5, {"policy/loss": -0.25, "update/tokens_per_second": 900.0}, seconds=1.5)
    assert stats["loss"] == -0.25
    assert stats["update/tokens_per_second"] == 900.0
    assert repr(stats) == "UpdateStats(policy version 5, loss -0.25, 1.50 s)"
    with pytest.raises(KeyError):
        stats["none"]


def test_a_value_of_the_wrong_stage_is_refused_by_name():
    with pytest.raises(BatchError, match=r"learner\.update takes Batch, which rl\.advantages returns; it was given Rollouts"):
        require(rollouts(), Batch, "learner.update", "rl.advantages")
    require(scored(), Scored, "rl.advantages", "rl.score")


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        scored().rewards = None  # type: ignore[misc,assignment]


def test_fetch_passes_local_values_through():
    value = object()
    assert fetch(value) is value


def test_the_table_cuts_long_texts():
    sample = dataclasses.replace(rollouts().samples(1)[0], text="x" * 500)
    table = samples_table([sample], width=10)
    assert "x" * 9 + "…" in table
    assert "x" * 10 not in table
