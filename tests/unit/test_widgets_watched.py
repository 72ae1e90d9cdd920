"""What a view makes of a log: tables that follow rewinds, gaps, clocks and restarts."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
from logs import GIB, Log

from rlkit.errors import RunError
from rlkit.widgets.watched import MAX_PHASES, Watched


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "sums")


def test_new_lines_are_read_once_and_in_order(log):
    log.steps(3)
    watched = Watched(log.folder)
    assert watched.poll()
    assert not watched.poll()
    log.steps(5, since=3)
    assert watched.poll()
    assert watched.steps["step"].tolist() == [0, 1, 2, 3, 4]
    assert watched.steps["reward/mean"].tolist() == [0, 0.01, 0.02, 0.03, 0.04]
    assert watched.metric_names() == ["reward/mean", "reward/std", "policy/entropy"]
    assert (watched.name, watched.seed, watched.stale) == ("sums", 0, None)


def test_a_rewind_takes_the_later_steps_back(log):
    log.steps(6)
    log.write({"kind": "rewind", "t": 1070.0, "step": 2, "why": "torn"})
    watched = Watched(log.folder)
    watched.poll()
    assert watched.steps["step"].tolist() == [0, 1, 2]
    log.step(3, t=1080.0, reward_mean=0.9)
    watched.poll()
    assert watched.steps["reward/mean"].tolist() == [0, 0.01, 0.02, 0.9]
    assert math.isnan(watched.steps["policy/entropy"][3])


def test_a_value_that_is_not_finite_is_told_from_one_that_is_not_there(log):
    log.step(0, reward_mean=0.5, policy_kl=None)
    log.step(1, reward_mean=None)
    log.step(2, reward_mean=0.7)
    watched = Watched(log.folder)
    watched.poll()
    assert watched.steps["reward/mean"].tolist() == [0.5, math.inf, 0.7]
    assert watched.steps["policy/kl"][0] == math.inf
    assert np.isnan(watched.steps["policy/kl"][1:]).all()


def test_time_that_goes_back_stands_still_and_is_told(log):
    log.step(0, t=1000.0, reward_mean=0)
    log.step(1, t=400.0, reward_mean=0)
    log.step(2, t=1010.0, reward_mean=0)
    log.monitor(500.0)
    log.monitor(470.0)
    watched = Watched(log.folder)
    watched.poll()
    assert watched.steps["t"].tolist() == [1000.0, 1000.0, 1010.0]
    assert watched.nodes["10.0.0.1"]["t"].tolist() == [500.0, 500.0]
    assert watched.clock_back == 600.0


def test_a_cut_last_line_is_left_for_later(log):
    log.steps(2)
    with (log.folder / "events.jsonl").open("a") as file:
        file.write('{"t": 1020.0, "kind": "step", "step": 2, "met')
    watched = Watched(log.folder)
    watched.poll()
    assert len(watched.steps) == 2
    with (log.folder / "events.jsonl").open("a") as file:
        file.write('rics": {"reward/mean": 0.4}}\n')
    watched.poll()
    assert watched.steps["reward/mean"][-1] == 0.4


def test_a_run_that_is_started_afresh_under_the_name_replaces_all(log, tmp_path):
    log.steps(5)
    log.phase("rollout", 1000.0, 2.0)
    log.monitor(1000.0, node="old")
    watched = Watched(log.folder)
    watched.poll()
    shutil.rmtree(log.folder)
    again = Log(tmp_path / "sums", seed=3)
    again.steps(1)
    again.monitor(2000.0, node="new")
    watched.poll()
    assert watched.steps["step"].tolist() == [0]
    assert (len(watched.phases), list(watched.nodes), watched.seed, watched.restarts) == (0, ["new"], 3, 1)


def test_phases_have_their_time_and_kind(log):
    log.write({"kind": "begin", "t": 1000.0, "step": 0, "version": 3})
    log.phase("rollout", 1000.0, 2.0, policy_version=1)
    log.phase("eval/rollout", 1002.0, 1.0, step=None)
    log.phase("polish", 1003.0, 1.0)
    log.write({"kind": "phase", "t": 1005.0, "phase": "sync", "step": 0, "policy_version": 4, "seconds": 0.5})  # of an old log: no start
    watched = Watched(log.folder)
    watched.poll()
    assert [watched.phases.labels[int(c)] for c in watched.phases["phase"]] == ["rollout", "rollout", "other"]
    assert watched.phases["start"].tolist() == [1000.0, 1002.0, 1003.0]
    assert (watched.versions, watched.lag) == ({"rollout": 1, "sync": 4}, 2)


def test_a_long_run_keeps_its_newest_phases(log):
    with (log.folder / "events.jsonl").open("a") as file:
        file.writelines(
            f'{{"t": {i}, "kind": "phase", "phase": "update", "step": {i}, "t_start": {i}, "seconds": 0.5}}\n'
            for i in range(2 * MAX_PHASES + 1)
        )
    watched = Watched(log.folder)
    watched.poll()
    assert len(watched.phases) == MAX_PHASES
    assert watched.phases["step"][-1] == 2 * MAX_PHASES


def test_monitor_samples_become_a_table_a_node(log):
    log.monitor(1000.0, gpus=2)
    log.monitor(1001.0, gpus=2, cpu=None)
    log.monitor(1000.0, node="10.0.0.2", note="no NVML: no NVIDIA driver on this node")
    watched = Watched(log.folder)
    watched.poll()
    table = watched.nodes["10.0.0.1"]
    assert table["gpu1/utilization"].tolist() == [51.0, 51.0]
    assert table["gpu0/engine"].tolist() == [2 * GIB, 2 * GIB]
    assert math.isnan(table["cpu"][1])
    assert np.isnan(table["object_store"]).all()
    assert watched.gpus == {"10.0.0.1": ["0 H200", "1 H200"], "10.0.0.2": []}
    assert "no NVIDIA" in watched.notes["10.0.0.2"]


def test_a_run_that_does_not_exist_is_an_error_that_names_the_place(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        Watched(tmp_path / "nowhere")
