"""Killed kernels and interrupted cells: whatever the phase, the parameters afterwards are those of an uninterrupted run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

DRIVER = Path(__file__).with_name("driver.py")
STEPS = 7
# Step -> where it is hit. "after": the work is done on the cluster, and the kernel that asked for it never hears of it.
TRAPS = {1: ("rollout", "during"), 2: ("reward", "during"), 3: ("update", "after"), 4: ("sync", "during"), 5: ("checkpoint", "during")}
MORE = {1: ("update", "during"), 2: ("rollout", "after"), 3: ("sync", "after"), 4: ("reward", "after"), 5: ("checkpoint", "after")}


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """Runs the driver script on one local cluster of its own; ends that cluster after the module."""
    home = tmp_path_factory.mktemp("home")
    cluster = {"name": "kill", "num_cpus": 2, "object_store_gib": 0.25, "dashboard": False, "storage": str(home / "runs"),
               "sampler": {"cpus_per_engine": 0.1, "max_model_len": 64, "threads": 1, "kv_cache_gib": 0.25},
               "learner": {"cpus_per_rank": 0.1, "threads": 1}}  # fmt: skip

    def call(name, expect=0, **options):
        given = {"home": str(home), "cluster": cluster, "name": name, "steps": STEPS} | options
        done = subprocess.run([sys.executable, str(DRIVER), json.dumps(given)], capture_output=True, text=True, timeout=240)
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1]) if expect == 0 else done.stdout

    def shutdown():
        code = "import rlkit as rl, sys, json; rl.connect(rl.ClusterSpec.make(json.loads(sys.argv[1]))).shutdown()"
        subprocess.run([sys.executable, "-c", code, json.dumps(cluster)], env=_env(home), check=True, timeout=120)

    call.shutdown = shutdown
    yield call
    shutdown()


@pytest.fixture(scope="module")
def whole(drive):
    """An uninterrupted run."""
    return drive("whole")


def _env(home):
    import os

    return os.environ | {"RLKIT_HOME": str(home)}


def same_parameters(a, b):
    one, two = (load_file(str(Path(r["final"]) / "model.safetensors")) for r in (a, b))
    assert one.keys() == two.keys()
    return max(float(np.abs(one[k].astype(np.float64) - two[k].astype(np.float64)).max()) for k in one)


def test_an_uninterrupted_run_learns_and_stays_in_step(whole):
    assert whole["steps"] == list(range(STEPS))
    assert whole["versions"] == list(range(1, STEPS + 1))
    assert whole["gap"] < 1e-3


def same_run(after, whole):
    assert after["steps"] == whole["steps"]
    assert after["versions"] == whole["versions"]
    assert after["reward"] == whole["reward"]
    assert same_parameters(after, whole) <= 1e-6


def killed_again_and_again(drive, name, traps):
    """One run whose kernel is killed once in each of ``traps``; every new kernel attaches to what lives."""
    left = dict(traps)
    for step in traps:
        drive(name, expect=-9, signal="kill", traps=left, attach=step != min(traps), learner={})
        del left[step]
    return drive(name, attach=True)


def test_after_kill_9_in_each_phase_new_kernels_attach_and_go_on(drive, whole):
    same_run(killed_again_and_again(drive, "killed", TRAPS), whole)


@pytest.mark.slow
def test_after_kill_9_at_other_moments(drive, whole):
    same_run(killed_again_and_again(drive, "killed-2", MORE), whole)


@pytest.mark.slow
@pytest.mark.parametrize("traps", [TRAPS, MORE], ids=["one", "more"])
def test_interrupted_cells_can_be_run_again(drive, whole, traps):
    after = drive(f"interrupted-{len(traps)}-{traps[1][0]}", signal="interrupt", traps=traps)
    assert after["interrupted"] == len(traps)
    same_run(after, whole)


@pytest.mark.slow
def test_when_the_cluster_dies_too_the_run_resumes_from_its_checkpoint(drive, whole):
    drive("gone", expect=-9, signal="kill", traps={4: ("update", "after")})
    drive.shutdown()
    same_run(drive("gone"), whole)
