"""Cards that a run holds to share them: a real Ray cluster of two nodes, told of two GPUs on each that this machine need not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import two_nodes

pytestmark = pytest.mark.slow
CHECK = Path(__file__).parent / "seats_check.py"


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seats")
    with two_nodes(folder / "nodes", gpus_per_node=2) as cluster:
        done = subprocess.run(
            [sys.executable, str(CHECK), cluster.address, str(cluster.token_path), str(folder / "runs")],
            env=cluster.env(folder),
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_engine_and_rank_of_a_number_see_the_same_card_and_nobody_else_gets_it(saw):
    found = saw["sharing"]
    assert (found["before"], found["held"]) == (None, True)
    assert found["left"] == 2.0  # of four, two are held whole
    see = found["saw"]
    assert see["engine-0"] == see["rank-0"] == see["reference-0"]
    assert see["engine-1"] == see["rank-1"]
    assert see["engine-0"][0] == see["engine-1"][0]
    assert {see["engine-0"][1], see["engine-1"][1]} == {"0", "1"}
    assert all(node != see["engine-0"][0] for node, _ in found["elsewhere"])  # the cards that Ray still had
    assert found["same"]
    assert found["released"] == 4.0


def test_an_engine_over_two_cards_sees_both_and_ray_finds_a_whole_card(saw):
    found = saw["over_two_cards"]
    assert sorted(found["cards"]) == ["0", "1"]
    assert found["rank"] is None
    assert found["released"] == 4.0


def test_cards_that_others_hold_are_refused_by_name(saw):
    assert "needs 2 whole GPUs" in saw["refused"]["text"]
    assert "Other living runs: one;" in saw["refused"]["text"]
    assert saw["refused"]["released"] == 4.0


def test_what_is_held_grows_over_nodes_and_ends_with_the_run(saw):
    found = saw["growing"]
    assert found.pop("whole") == [False, 4.0, None]
    assert found == {"two": 2.0, "four": 0.0, "nodes": 2, "same": True, "again": 2.0, "closed": 4.0}
