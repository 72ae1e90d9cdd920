"""`score` on local shards: the same code that graders run, in this process."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scored import make_rollouts

from rlkit.context import Owner
from rlkit.errors import BatchError, ConfigError, DeadlineError, RewardError
from rlkit.rewards import Format, Math, Reward, RewardOut, batched
from rlkit.scoring import score

TEXTS = [["#### 3", "#### 4", "?"], [r"\boxed{7}", "7", "8"], ["1", "2", "3"]]
ANSWERS = ["3", "7", "2"]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_scores_by_hand(shards):
    scored = score(make_rollouts(TEXTS, ANSWERS, shards), Math(correct=1, wrong=-0.5, unparsed=-1) + 0.5 * Format(style="boxed"))
    np.testing.assert_allclose(scored.rewards, [[1, -0.5, -1], [1.5, 1, -0.5], [-0.5, 1, -0.5]])
    assert scored.rewards.dtype == np.float32
    np.testing.assert_allclose(scored.parts["math"], [[1, -0.5, -1], [1, 1, -0.5], [-0.5, 1, -0.5]])
    np.testing.assert_allclose(scored.parts["format"], [[0, 0, 0], [1, 0, 0], [0, 0, 0]])
    assert scored.weights == {"math": 1.0, "format": 0.5}
    assert set(scored.verdicts) == {"correct", "wrong", "unparsed", "timeout"}
    assert scored.verdicts["unparsed"].tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert scored.accuracy == pytest.approx(4 / 9)
    assert len(scored.shards) == shards
    samples = scored.samples()
    assert [s.verdict for s in samples[:3]] == ["correct", "wrong", "unparsed"]
    assert [s.extracted for s in samples[:4]] == ["3", "4", None, "7"]
    assert samples[3].parts == {"math": 1.0, "format": 1.0}
    assert samples[3].reward == 1.5


def test_rescoring_changes_nothing_else():
    rollouts = make_rollouts(TEXTS, ANSWERS)
    first, second = score(rollouts, Math()), score(rollouts, lambda p, s: len(s.text))
    assert first.rollouts is second.rollouts is rollouts
    assert first.rewards[0, 0] == 1
    assert second.rewards[0, 0] == 6
    assert second.verdicts == {}
    assert second.accuracy is None


def test_function_sees_prompt_and_sample():
    def check(prompt, sample):
        assert prompt is sample.prompt or prompt == sample.prompt
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.text)
        return 10 * int(prompt.id[1:]) + sample.index

    assert score(make_rollouts(TEXTS, ANSWERS, 2), check).rewards.tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


def test_batched_function_and_own_class_get_whole_groups():
    def centred(prompts, samples):
        assert len(prompts) == len(samples) == 9
        return [len(s.text) for s in samples]

    class Index(Reward):
        name = "index"

        def score(self, prompts, samples):
            return RewardOut(np.array([float(s.index) for s in samples]), verdicts=["correct"] * len(samples))

    scored = score(make_rollouts(TEXTS, ANSWERS), batched(centred) + 10 * Index())
    assert scored.rewards[0].tolist() == [6, 16, 21]
    assert scored.accuracy == 1


def test_crash_names_the_prompt_and_shows_the_text():
    def fragile(prompt, sample):
        return int(sample.text)

    with pytest.raises(RewardError) as caught:
        score(make_rollouts([["1", "2"], ["3", "not a number"]], ["1", "3"]), fragile)
    message = str(caught.value)
    assert "Reward 'fragile' failed on prompt 'p1', sample 1: ValueError: invalid literal for int()" in message
    assert "Response: 'not a number'" in message
    assert "in fragile" in message
    assert "base.py" not in message


def test_long_responses_are_shortened_in_errors():
    with pytest.raises(RewardError) as caught:
        score(make_rollouts([["x" * 5000]], ["1"]), lambda p, s: 1 / 0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_unusable_value_names_the_prompt(value):
    with pytest.raises(RewardError, match="prompt 'p1', sample 0"):
        score(make_rollouts([["a", "b"], ["c", "d"]], ["1", "2"]), lambda p, s: value if s.text == "c" else 0.0)


def test_hang_is_killed_and_named_and_the_next_call_works():
    def hang(prompt, sample):
        while sample.text == "c":
            pass
        return 1.0

    rollouts = make_rollouts([["a", "b"], ["c", "d"]], ["1", "2"])
    score(rollouts, lambda p, s: 0.0)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"'hang' was still running after 1 s on prompt 'p1', sample 0.*timeout_s of rl.score"):
        score(rollouts, hang, timeout_s=1.0)
    assert time.monotonic() - start < 6
    assert score(rollouts, lambda p, s: 2.0).rewards.tolist() == [[2, 2], [2, 2]]


def test_a_pattern_that_takes_forever_is_killed():
    with pytest.raises(DeadlineError, match="'format' was still running after 1 s on prompt 'p0'"):
        score(make_rollouts([["a" * 40 + "!"]], ["1"]), Format(r"^(a+)+$"), timeout_s=1.0)


def test_process_end_is_blamed_on_the_prompt():
    import os

    with pytest.raises(RewardError, match=r"ended its process \(exit status 9\) on prompt 'p0', sample 1"):
        score(make_rollouts([["a", "b"]], ["1"]), lambda p, s: os._exit(9) if s.index else 0.0)


def test_something_that_cannot_be_pickled():
    import threading

    lock = threading.Lock()
    with pytest.raises(RewardError, match="Reward 'lambda' cannot be sent to the graders"):
        score(make_rollouts(TEXTS, ANSWERS), lambda p, s: float(lock.locked()))


def test_a_hanging_answer_costs_its_own_time_only():
    texts = [[r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac{\sqrt{2}}{2}}"], ["3", r"\boxed{2^{1/2}/2}"]]
    rollouts = make_rollouts(texts, [r"\frac{1}{\sqrt{2}}"] * 2)
    start = time.monotonic()
    scored = score(rollouts, Math(timeout=-2, timeout_s=2.0))
    assert time.monotonic() - start < 20
    assert scored.rewards.tolist() == [[-2, 1], [0, 1]]
    assert scored.verdicts["timeout"].tolist() == [[True, False], [False, False]]


def test_wrong_stage_of_the_loop():
    scored = score(make_rollouts(TEXTS, ANSWERS), Math())
    with pytest.raises(BatchError, match=r"takes Rollouts, which sampler.generate\(...\) returns; it was given Scored"):
        score(scored, Math())
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        score(make_rollouts(TEXTS, ANSWERS), Math(), timeout_s=0)


def test_the_owner_hears_of_the_phase():
    owner = Owner("scoring-unit")
    seen = []
    owner.phase = lambda name: seen.append(name) or Owner.phase(owner, name)
    score(make_rollouts(TEXTS, ANSWERS, run="scoring-unit"), Math())
    assert seen == ["reward"]


def test_cheap_grading_takes_milliseconds():
    texts = [[f"{i} + {j}\n#### {i + j}" for j in range(8)] for i in range(16)]
    rollouts = make_rollouts(texts, [str(i) for i in range(16)])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        score(rollouts, Math())
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05  # 2 ms on an idle machine
