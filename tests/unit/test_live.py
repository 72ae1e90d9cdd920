"""What a loop is asked for, and when it does it."""

import pytest

from rlkit.errors import RunError
from rlkit.live import Live


@pytest.fixture
def live():
    made = Live("sums")
    made.loop(1, 10)
    return made


def act(live, committed=0):
    return live.boundary(committed, now=100.0)["act"]


def word(live):
    return live.state(True)["control"]


def test_a_loop_goes_until_it_is_stopped(live):
    assert act(live) == "go"
    assert live.ask("stop", True) == "stopping"
    assert act(live) == "stop"
    live.loop(1, None)
    assert word(live) == "stopped"
    live.loop(1, 10)
    assert (word(live), act(live)) == ("run", "go")  # the next loop has nothing of it


def test_pause_step_resume(live):
    assert live.ask("pause", True) == "pausing"
    assert act(live) == "wait"
    assert (word(live), live.state(True)["waiting_since"]) == ("paused", 100.0)
    assert live.ask("step", True) == "pausing"
    assert act(live) == "go"
    assert act(live, 1) == "wait"
    assert live.ask("resume", True) == "run"
    assert [act(live, 1), act(live, 2)] == ["go", "go"]


@pytest.mark.parametrize("verb", ["pause", "resume", "step"])
def test_a_stop_is_not_taken_back(live, verb):
    live.ask("stop", True)
    with pytest.raises(RunError, match=f"ends after its current step; it cannot {verb} now"):
        live.ask(verb, True)
    assert live.ask("checkpoint", True) == "stopping"
    assert act(live) == "stop"


def test_two_clicks_on_step_are_one_step(live):
    live.ask("pause", True)
    assert act(live) == "wait"
    live.ask("step", True)
    live.ask("step", True)
    assert [act(live), act(live, 1)] == ["go", "wait"]


def test_a_step_while_it_runs_pauses_after_the_current_one(live):
    assert live.ask("step", True) == "pausing"
    assert act(live) == "wait"


def test_a_paused_loop_can_be_stopped(live):
    live.ask("pause", True)
    act(live)
    live.ask("stop", True)
    assert act(live) == "stop"


def test_a_checkpoint_is_asked_for_once_and_not_before_the_first_step(live):
    assert live.ask("checkpoint", True) == "run"
    assert live.boundary(-1, 0.0) == {"act": "go", "checkpoint": False}
    assert live.state(True)["checkpoint"]
    assert live.boundary(0, 0.0) == {"act": "go", "checkpoint": True}
    assert live.boundary(1, 0.0) == {"act": "go", "checkpoint": False}


def test_without_a_loop_there_is_nothing_to_control(live):
    with pytest.raises(RunError, match=r"'halt'; there are stop, pause, resume, step, checkpoint"):
        live.ask("halt", True)
    with pytest.raises(RunError, match="No loop over run 'sums' is running; nothing to pause"):
        live.ask("pause", False)  # its kernel is gone
    live.loop(1, None)
    with pytest.raises(RunError, match=r"run.start\(loop\)"):
        live.ask("stop", True)
    assert word(live) == "run"


def test_the_end_of_another_kernels_loop_ends_nothing(live):
    live.loop(2, 5)
    live.loop(1, None)
    assert live.state(True)["looping"]


def test_phases_nest_and_their_ends_may_come_late(live):
    live.doing([{"phase": "rollout", "step": 0, "since": 1.0}])
    live.progress(1.0, {"done": 3, "total": 8, "unit": "sample", "left_s": None})
    assert live.state(True)["progress"]["done"] == 3
    live.doing([{"phase": "rollout", "step": 0, "since": 1.0}, {"phase": "sync", "step": 0, "since": 2.0}])
    assert live.state(True)["progress"] is None
    live.progress(1.0, {"done": 4})  # of the outer one
    assert live.state(True)["progress"] is None
    live.ended(2.0)
    assert [p["phase"] for p in live.state(True)["phases"]] == ["rollout"]
    live.doing([{"phase": "reward", "step": 0, "since": 3.0}])
    live.ended(1.0)  # the news that the rollout ended, after that of the reward
    assert [p["phase"] for p in live.state(True)["phases"]] == ["reward"]
    assert live.state(False)["phases"] == []  # nobody drives: nothing is in progress
