"""One small Ray for the integration tests of a session; tests of `rlkit.connect` start their own in a subprocess."""

from __future__ import annotations

import itertools
import os

import pytest

_names = itertools.count()


@pytest.fixture(scope="session")
def ray_local(tmp_path_factory):
    import ray

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray.init(
        num_cpus=16,  # logical: the tests share two real cores
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=512 * 2**20,
        logging_level="warning",
        log_to_driver=True,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def owner(ray_local):
    """A fresh namespace; every actor started in it is ended after the test."""
    from rlkit import actors
    from rlkit.context import Owner

    made = Owner(f"test-{os.getpid()}-{next(_names)}", seed=0)
    yield made
    actors.end([h for h in (actors.find(n, made.namespace) for n in actors.names(made.namespace)) if h is not None])
