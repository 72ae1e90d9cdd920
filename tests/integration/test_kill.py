"""Killed kernels and interrupted cells: whatever the phase, the parameters afterwards are those of an uninterrupted run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

DRIVER = Path(__file__).with_name("driver.py")
PHASES = ("rollout", "reward", "update", "sync", "checkpoint")


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """Runs the driver script on one local cluster of its own; ends that cluster after the module."""
    home = tmp_path_factory.mktemp("home")
    cluster = {"name": "kill", "num_cpus": 2, "object_store_gib": 0.25, "dashboard": False, "storage": str(home / "runs"),
               "sampler": {"cpus_per_engine": 0.1, "max_model_len": 64, "threads": 1, "kv_cache_gib": 0.25},
               "learner": {"cpus_per_rank": 0.1, "threads": 1}}  # fmt: skip

    def call(name, expect=0, **options):
        given = {"home": str(home), "cluster": cluster, "name": name, "steps": 3} | options
        done = subprocess.run([sys.executable, str(DRIVER), json.dumps(given)], capture_output=True, text=True, timeout=240)
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1]) if expect == 0 else done.stdout

    yield call
    code = "import rlkit as rl, sys, json; rl.connect(rl.ClusterSpec.make(json.loads(sys.argv[1]))).shutdown()"
    subprocess.run([sys.executable, "-c", code, json.dumps(cluster)], env=_env(home), check=True, timeout=60)


@pytest.fixture(scope="module")
def whole(drive):
    """An uninterrupted run of three steps."""
    return drive("whole")


def _env(home):
    import os

    return os.environ | {"RLKIT_HOME": str(home)}


def same_parameters(a, b):
    one, two = (load_file(str(Path(r["final"]) / "model.safetensors")) for r in (a, b))
    assert one.keys() == two.keys()
    return max(float(np.abs(one[k].astype(np.float64) - two[k].astype(np.float64)).max()) for k in one)


def test_an_uninterrupted_run_learns_and_stays_in_step(whole):
    assert whole["steps"] == [0, 1, 2]
    assert whole["versions"] == [1, 2, 3]
    assert whole["gap"] < 1e-3


@pytest.mark.parametrize("phase", PHASES)
def test_after_kill_9_a_new_kernel_attaches_and_goes_on(drive, whole, phase):
    drive(f"killed-{phase}", expect=-9, die=phase)
    after = drive(f"killed-{phase}", attach=True)
    assert after["steps"] == [0, 1, 2]
    assert after["versions"] == [1, 2, 3]
    assert same_parameters(after, whole) <= 1e-6


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupted_cell_can_be_run_again(drive, whole, phase):
    after = drive(f"interrupted-{phase}", interrupt=phase)
    assert after["interrupted"] == 1
    assert after["steps"] == [0, 1, 2]
    assert same_parameters(after, whole) <= 1e-6
