"""Owners: names, seeds and phases."""

from __future__ import annotations

import time

import pytest

from rlkit.context import Owner, active_owner, derive_seed, owner_of


def test_an_owner_is_found_by_its_name_and_the_latest_wins():
    first, second = Owner("ctx-a"), Owner("ctx-a")
    assert owner_of("ctx-a") is second is not first
    assert owner_of("ctx-none") is None
    assert owner_of(None) is None


def test_the_namespace_carries_the_prefix():
    assert Owner("ctx-b").namespace == "rlkit-ctx-b"


def test_seeds_differ_by_call_step_and_seed_and_repeat_for_the_same():
    def seeds(seed, step):
        owner = Owner("ctx-seeds", seed)
        owner.step = step
        return [owner.call_seed() for _ in range(3)]

    assert seeds(0, 1) == seeds(0, 1)
    every = seeds(0, None) + seeds(0, 0) + seeds(0, 1) + seeds(1, 0)
    assert len(set(every)) == 12


def test_derived_seeds_are_31_bit_and_do_not_change_between_releases():
    assert all(0 <= derive_seed(i, -1) < 2**31 for i in range(100))
    assert derive_seed(0, 0, 0) != derive_seed(0, 0) != derive_seed(0)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    # A run that is resumed with a later release must draw the same samples.
    assert [derive_seed(0, 0, 0), derive_seed(7, -1, 3), derive_seed(2**40, 5)] == [788445325, 542288081, 1336711234]


def test_a_phase_measures_its_time_also_when_it_fails():
    owner = Owner("ctx-phase")
    with owner.phase("rollout") as facts:
        time.sleep(0.02)
        facts["tokens"] = 7
    assert facts["tokens"] == 7
    assert 0.02 <= facts["seconds"] < 1
    with pytest.raises(ZeroDivisionError), owner.phase("update") as facts:
        _ = 1 / 0
    assert facts["seconds"] >= 0


def test_the_active_owner_is_the_one_inside_a_step():
    owner = Owner("ctx-active")
    assert active_owner() is not owner
    owner.step = 3
    assert active_owner() is owner
    later = Owner("ctx-later")
    later.step = 0
    assert active_owner() is later
    later.step = owner.step = None
    assert active_owner() not in (owner, later)
