"""Unit tests have no cluster: Ray starts one by itself when it is asked for anything, and the tests after it would find that."""

import sys

import pytest


def connected():
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@pytest.fixture(autouse=True)
def no_cluster():
    before = connected()  # by a test of another folder
    yield
    assert connected() is before, "this test started a Ray"
