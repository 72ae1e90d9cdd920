"""The same loop on a cluster that somebody else started: two nodes, token auth on, by address and over ray://."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import two_node_cluster  # noqa: F401  (a fixture)

DRIVER = Path(__file__).with_name("driver.py")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["address", "client_address"])
def test_the_loop_trains_over_both_nodes(two_node_cluster, tmp_path, way):  # noqa: F811
    there = two_node_cluster
    cluster = {
        "name": "remote",
        "address": getattr(there, way),
        "min_nodes": 2,
        "storage": str(tmp_path / "runs"),
        "sampler": {"engines": 2, "cpus_per_engine": 1, "threads": 1, "max_model_len": 64, "kv_cache_gib": 0.25},
        "learner": {"ranks": 2, "cpus_per_rank": 2, "threads": 1, "zero_stage": 3},
    }
    given = {"home": str(tmp_path / "home"), "cluster": cluster, "name": way.replace("_", "-"), "steps": 2}
    done = subprocess.run(
        [sys.executable, str(DRIVER), json.dumps(given)], capture_output=True, text=True, timeout=280, env=there.env(tmp_path), cwd=tmp_path
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    out = json.loads(done.stdout.strip().splitlines()[-1])
    assert out["steps"] == [0, 1]
    assert out["versions"] == [1, 2]
    assert out["gap"] < 1e-3
    assert len(set(out["engine_nodes"])) == 2
    assert len(set(out["rank_nodes"])) == 2
    assert {"engine-0", "engine-1", "rank-0", "rank-1", "learner", "recorder"} <= set(out["alive"])
    assert there.token not in done.stdout + done.stderr
