"""The benchmark of weight sync runs, and says what it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_section_measures_syncs_that_bring_engine_and_learner_together(local_cluster, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "sync", raising=False)
    import shapes
    import sync

    path = shapes.write("tiny", tmp_path / "model")
    result = sync.measure("small", str(path), 1, local_cluster(storage=str(tmp_path)), 2)
    numbers = shapes.parameters("tiny")
    assert (result["bytes"], result["transport"], result["checksum_ok"]) == (4 * numbers, "object_store", True)
    assert (len(result["syncs"]), result["policy_version"]) == (2, 1)
    assert set(result["parts_s"]) == {"seconds", "publish", "load", "verify", "rest"}
    gaps = result["logprob_gap"]
    assert gaps["after_sync"] == pytest.approx(gaps["before_step"], abs=1e-4)
    assert gaps["stale"] > 1e-4 > gaps["after_sync"]
