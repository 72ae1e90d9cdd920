"""Rewards and their sums, by hand."""

from __future__ import annotations

import dataclasses

import cloudpickle
import numpy as np
import pytest
from scored import make_shard

from rlkit.errors import ConfigError, RewardError
from rlkit.rewards import Format, Length, Math, Reward, RewardOut, batched, function
from rlkit.rewards.base import Function, as_reward, parts_of


def values(reward, texts, answer="5") -> list[float]:
    samples = list(make_shard([texts], [answer]).samples())
    return reward.score([s.prompt for s in samples], samples).values.tolist()


def test_math_keeps_the_verdicts_apart():
    reward = Math(correct=2.0, wrong=-1.0, unparsed=-3.0)
    samples = list(make_shard([["#### 5", "#### 6", "no idea"]], ["5"]).samples())
    out = reward.score([s.prompt for s in samples], samples)
    assert out.values.tolist() == [2, -1, -3]
    assert out.verdicts == ("correct", "wrong", "unparsed")
    assert out.extracted == ("5", "6", None)


def test_simplerl_rule():
    texts = [r"so \boxed{5}", r"so \boxed{6}", "the answer is 5", r"\boxed{5", r"\boxed{nonsense}"]
    assert values(Math.simplerl(), texts) == [1.0, -0.5, -1.0, -1.0, -0.5]


def test_math_rules_are_a_setting():
    assert values(Math(rules=("hash",)), ["#### 5", r"\boxed{5}", "5"]) == [1, 0, 0]
    assert values(Math(rules="last_number"), ["#### 5", "It is 5 apples"]) == [1, 1]
    with pytest.raises(ConfigError, match="'box', did you mean 'boxed'"):
        Math(rules=("box",))


def test_math_follows_the_templates_of_the_prompts():
    boxed, free = (list(make_shard([["it is 5", r"\boxed{5}"]], ["5"]).samples()) for _ in range(2))
    prompts = [dataclasses.replace(s.prompt, template="qwen-boxed") for s in boxed] + [s.prompt for s in free]
    out = Math().score(prompts, [*boxed, *free])
    assert out.verdicts == ("unparsed", "correct", "correct", "correct")
    assert Math(rules=("last_number",)).score(prompts, [*boxed, *free]).verdicts[0] == "correct"


def test_math_without_an_answer_names_the_prompt():
    with pytest.raises(RewardError, match="Prompt 'p0' has no answer"):
        values(Math(), ["5"], answer=None)


@pytest.mark.parametrize("bad", [{"correct": float("nan")}, {"wrong": "x"}, {"timeout_s": 0}, {"rel_tol": 1}])
def test_math_refuses_bad_settings(bad):
    with pytest.raises(ConfigError):
        Math(**bad)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>5 = 2 + 3</think> <answer>5</answer>", 1),
        ("<think>\nline\nline\n</think>\n<answer>\n5\n</answer>\n", 1),
        ("5 = 2 + 3</think><answer>5</answer>", 1),  # the prompt ended with <think>
        ("<think></think><answer>5</answer>", 0),
        ("<think>x</think><answer> </answer>", 0),
        ("<think>x</think>5", 0),
        ("<answer>5</answer><think>x</think>", 0),
        ("<think>x</think><answer>5</answer> and more", 0),
        ("before <think>x</think><answer>5</answer>", 0),
        ("<think>x</think><think>y</think><answer>5</answer>", 0),
        ("<think>x</think><answer>5</answer><answer>6</answer>", 0),
        ("", 0),
    ],
)
def test_format_think(text, fits):
    assert values(Format(), [text]) == [fits]


def test_format_boxed_and_pattern():
    assert values(Format(style="boxed", present=0.5, absent=-0.5), [r"\boxed{1}", "1"]) == [0.5, -0.5]
    assert values(Format(r"^Answer: \d+$"), ["Answer: 12", "Answer: 12!", "x"]) == [1, 0, 0]
    assert Format("x").isolated
    assert Format("x").each
    assert not Format().isolated


@pytest.mark.parametrize("bad", [{"pattern": "("}, {"pattern": "x", "style": "think"}, {"style": "thinking"}])
def test_format_refuses_bad_settings(bad):
    with pytest.raises(ConfigError):
        Format(**bad)


def test_length_by_hand():
    # DAPO eq. 13 with L_max 10 and L_cache 4: 0 up to 6 tokens, then (6 - |y|) / 4, then -1
    texts = ["x" * n for n in (1, 6, 7, 8, 10, 12)]
    assert values(Length(10, 4), texts) == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ConfigError, match="buffer must be from 1 to max_tokens"):
        Length(10, 11)


def test_sum_keeps_parts_and_weights():
    reward = Math() + 0.2 * Format() - Length(10, 4)
    assert [(p.name, p.weight) for p in parts_of(reward)] == [("math", 1.0), ("format", 0.2), ("length", -1.0)]
    nested = 2 * (Math() + 0.5 * (Format() + Format(style="boxed")))
    assert [(p.name, p.weight) for p in parts_of(nested)] == [("math", 2.0), ("format", 1.0), ("format_2", 1.0)]
    assert [p.weight for p in parts_of(sum([Math(), Format()]))] == [1.0, 1.0]
    assert [p.weight for p in parts_of(-Math())] == [-1.0]


def test_functions_join_a_sum_and_get_names():
    def brevity(prompt, sample):
        return -len(sample.text)

    reward = Math() + brevity + (lambda p, s: 0.0) + (lambda p, s: 1.0)
    assert [p.name for p in parts_of(reward)] == ["math", "brevity", "lambda", "lambda_2"]
    assert [p.name for p in parts_of(brevity + Math())] == ["brevity", "math"]
    assert parts_of(function(brevity, name="short"))[0].name == "short"
    assert values(as_reward(brevity), ["abc"]) == [-3]


def test_names_of_the_summary_are_not_taken():
    assert parts_of(function(lambda p, s: 0.0, name="mean"))[0].name == "mean_2"


@pytest.mark.parametrize("weight", [float("nan"), "2", None, True])
def test_weights_are_finite_numbers(weight):
    with pytest.raises(ConfigError, match="weight"):
        Math() * weight


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan; rewards must be finite"),
        (float("-inf"), "returned -inf; rewards must be finite"),
        (None, r"returned None \(NoneType\); it must return one finite number"),
        ("1", r"returned '1' \(str\)"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        (np.zeros(3), r"an array of shape \(3,\)"),
        (1j, "complex"),
    ],
)
def test_bad_values_of_a_function(value, message):
    with pytest.raises(RewardError, match=message):
        values(Function(lambda p, s: value, "f"), ["x"])


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_all_kinds(value):
    assert values(Function(lambda p, s: value), ["x"]) == [1.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values for 2 samples"),
        (np.zeros((2, 1)), r"returned shape \(2, 1\) for 2 samples; it must return \(2,\)"),
        (3.0, "returned float for 2 samples"),
        ([1.0, float("nan")], "returned nan.*prompt 'p0', sample 1"),
    ],
)
def test_bad_results_of_a_batched_function(result, message):
    with pytest.raises(RewardError, match=message):
        values(batched(lambda p, s: result, "b"), ["x", "y"])


def test_batched_is_a_decorator_and_sees_all_samples():
    @batched
    def rank(prompts, samples):
        order = sorted(len(s.text) for s in samples)
        return [order.index(len(s.text)) for s in samples]

    assert rank.name == "rank"
    assert values(rank, ["xxx", "x", "xx"]) == [2, 0, 1]


def test_not_a_reward():
    with pytest.raises(ConfigError, match=r"is the class Math; make one with Math\(\)"):
        as_reward(Math)
    with pytest.raises(ConfigError, match=r"it must be a reward of rl\.rewards or a function"):
        as_reward("math")


def test_rewards_survive_pickling():
    reward = Math.simplerl() + 0.5 * Format("x") + Length(8, 2) + (lambda p, s: 3.0)
    copy = cloudpickle.loads(cloudpickle.dumps(reward))
    assert [p.name for p in parts_of(copy)] == ["math", "format", "length", "lambda"]
    for part in parts_of(copy):
        assert len(values(part.reward, ["x", "yy"])) == 2


def test_a_reward_class_of_ones_own():
    class Vowels(Reward):
        name = "vowels"

        def score(self, prompts, samples):
            return RewardOut(np.array([sum(c in "aeiou" for c in s.text) for s in samples], dtype=float))

    assert values(Vowels(), ["aeb", "x"]) == [2, 0]
    assert [p.name for p in parts_of(0.5 * Vowels() + Math())] == ["vowels", "math"]
    with pytest.raises(NotImplementedError, match="must define score"):
        values(Reward(), ["x"])
