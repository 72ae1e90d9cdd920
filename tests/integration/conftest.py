"""One local cluster for the integration tests of a session, started the way a notebook starts it.

Tests that start or kill clusters do that in processes of their own, with a folder of their own.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has it ignored
_names = itertools.count()
# Ray's CPUs are logical: the tests share two real cores, and no test may wait for a place.
SHARED: dict[str, Any] = {
    "name": "tests",
    "num_cpus": 16,
    "num_gpus": 0,
    "object_store_gib": 0.5,
    "dashboard": False,
    "sampler": {"cpus_per_engine": 0.1, "threads": 1, "max_model_len": 128, "kv_cache_gib": 0.25},
    "learner": {"cpus_per_rank": 0.1, "threads": 1},
}


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory):
    """``local_cluster(storage=...)``: the session's cluster with these settings."""
    import rlkit as rl

    before = {k: v for k, v in os.environ.items() if k.startswith(("RAY_", "RLKIT_"))}
    os.environ["RLKIT_HOME"] = str(tmp_path_factory.mktemp("home"))
    spec = rl.ClusterSpec.make(SHARED)
    cluster = rl.connect(spec)
    yield lambda **changes: rl.connect(spec, **changes)
    cluster.shutdown()
    for key in [k for k in os.environ if k.startswith(("RAY_", "RLKIT_"))]:
        del os.environ[key]
    os.environ.update(before)


@pytest.fixture(scope="session")
def ray_local(local_cluster):
    """Ray, connected to the session's cluster."""
    import ray

    return ray


@pytest.fixture
def owner(ray_local):
    """A fresh namespace; every actor started in it is ended after the test."""
    from rlkit import actors
    from rlkit.context import Owner

    made = Owner(f"test-{os.getpid()}-{next(_names)}", seed=0)
    yield made
    actors.end(actors.started_with(made.namespace, ""))
