"""Unit tests have no cluster: Ray starts one by itself when it is asked for anything, and the tests after it would find that."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_cluster():
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized(), "this test started a Ray"
