"""Scoring through real grader actors: rollouts and scores stay in the object store."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import ray
from scored import make_rollouts

from rlkit import actors
from rlkit.errors import DeadlineError, RewardError
from rlkit.estimators import advantages
from rlkit.rewards import Format, Math, batched
from rlkit.scoring import score


def rollouts_of(owner, texts, answers, shards=1):
    return make_rollouts(texts, answers, shards, run=owner.name, put=ray.put)


def info(owner) -> dict:
    return ray.get(actors.find("grader-0", owner.namespace).info.remote())


def test_rewards_are_computed_where_the_rollouts_are(owner):
    texts = [[f"#### {i + j % 2}" for j in range(4)] for i in range(6)]
    rollouts = rollouts_of(owner, texts, [str(i) for i in range(6)], shards=3)
    phases = []
    plain = owner.phase
    owner.phase = lambda name: phases.append(name) or plain(name)
    scored = score(rollouts, Math() + 0.5 * Format(style="boxed") + (lambda prompt, sample: sample.index / 10))
    np.testing.assert_allclose(scored.parts["math"], [[1, 0, 1, 0]] * 6)
    np.testing.assert_allclose(scored.rewards, [[1.0, 0.1, 1.2, 0.3]] * 6, rtol=1e-6)
    assert phases == ["reward"]
    assert actors.names(owner.namespace) == ["grader-0"]  # one a node
    assert all(isinstance(s, ray.ObjectRef) for s in scored.shards)
    assert scored.samples(prompts=2)[5].verdict == "wrong"
    assert advantages(scored, "dr_grpo").advantages.shape == (6, 4)
    local = score(make_rollouts(texts, [str(i) for i in range(6)]), Math())
    np.testing.assert_array_equal(local.rewards, scored.parts["math"])


def test_a_grader_starts_no_process_for_plain_numbers(owner):
    score(rollouts_of(owner, [["1", "2"]], ["1"]), Math())
    assert info(owner)["workers"] == []


def test_overhead_of_a_call(owner):
    texts = [[f"{i} + {j}\n#### {i + j}" for j in range(8)] for i in range(16)]
    rollouts = rollouts_of(owner, texts, [str(i) for i in range(16)])
    times = []
    for _ in range(10):
        start = time.perf_counter()
        score(rollouts, Math())
        times.append(time.perf_counter() - start)
    print(f"score of 128 samples: {min(times) * 1e3:.1f} ms")
    assert min(times) < 0.1  # below 10 ms on an idle machine


def test_a_hanging_answer_costs_its_own_time_only(owner):
    texts = [[r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac{\sqrt{2}}{2}}"]] + [[f"{i}", r"\boxed{2^{1/2}/2}"] for i in range(6)]
    rollouts = rollouts_of(owner, texts, [r"\frac{1}{\sqrt{2}}"] * 7, shards=2)
    score(rollouts, Math(timeout_s=0.5))  # processes are warm now
    start = time.monotonic()
    scored = score(rollouts, Math(timeout=-2, timeout_s=2.0))
    assert time.monotonic() - start < 2.0 + 6.0
    assert scored.rewards[0].tolist() == [-2, 1]
    assert scored.rewards[1:].tolist() == [[0, 1]] * 6
    assert scored.verdicts["timeout"].sum() == 1


def test_crash_names_the_prompt_and_the_next_call_works(owner):
    rollouts = rollouts_of(owner, [["1", "2"], ["3", "four"]], ["1", "3"], shards=2)
    with pytest.raises(RewardError) as caught:
        score(rollouts, lambda prompt, sample: int(sample.text))
    assert "prompt 'p1', sample 1: ValueError" in str(caught.value)
    assert "Response: 'four'" in str(caught.value)
    with pytest.raises(RewardError, match="returned 3 values for 2 samples"):
        score(rollouts, batched(lambda prompts, samples: [1.0, 2.0, 3.0]))
    with pytest.raises(RewardError, match=r"returned nan.*prompt 'p0', sample 0"):
        score(rollouts, lambda prompt, sample: float("nan"))
    assert score(rollouts, Math()).rewards.tolist() == [[1, 0], [1, 0]]


def test_a_hanging_function_is_killed(owner):
    rollouts = rollouts_of(owner, [["1", "2"]], ["1"])
    score(rollouts, lambda prompt, sample: 0.0)

    def hang(prompt, sample):
        while sample.index == 1:
            pass
        return 0.0

    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"after 1 s on prompt 'p0', sample 1"):
        score(rollouts, hang, timeout_s=1.0)
    assert time.monotonic() - start < 8
    assert score(rollouts, lambda prompt, sample: 1.0).rewards.tolist() == [[1, 1]]


def test_the_whole_call_has_a_deadline(owner):
    rollouts = rollouts_of(owner, [["1", "2"]], ["1"])
    with pytest.raises(DeadlineError, match=r"rewards of 1 prompts x 2.*raise deadline_s of rl.score"):
        score(rollouts, lambda prompt, sample: time.sleep(60) or 0.0, timeout_s=100, deadline_s=3)
    start = time.monotonic()
    assert score(rollouts, lambda prompt, sample: 1.0).rewards.tolist() == [[1, 1]]
    assert time.monotonic() - start < 8  # the grader was told to stop


def test_interrupting_the_cell_leaves_working_graders(owner):
    rollouts = rollouts_of(owner, [["1", "2"], ["3", "4"]], ["1", "3"], shards=2)
    score(rollouts, lambda prompt, sample: 0.0)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        score(rollouts, lambda prompt, sample: time.sleep(60) or 0.0, timeout_s=100)
    assert score(rollouts, lambda prompt, sample: 1.0).rewards.tolist() == [[1, 1], [1, 1]]
    assert time.monotonic() - start < 10


def test_a_dead_grader_is_replaced(owner):
    rollouts = rollouts_of(owner, [["1", "2"]], ["1"])
    score(rollouts, Math())
    first = info(owner)["pid"]
    os.kill(first, signal.SIGKILL)
    assert score(rollouts, Math()).rewards.tolist() == [[1, 0]]
    assert info(owner)["pid"] != first


def test_the_end_of_a_grader_ends_its_processes(owner):
    rollouts = rollouts_of(owner, [["1", "2"]], ["1"])
    score(rollouts, lambda prompt, sample: 0.0)
    found = info(owner)
    assert found["workers"]
    os.kill(found["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_running(pid) for pid in found["workers"]):
        assert time.monotonic() < deadline, "workers of a dead grader are still alive"
        time.sleep(0.05)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
