"""Columns of numbers, and their way to the browser."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from rlkit.widgets.series import NOT_FINITE, Table, finite, pack, unpack


def test_rows_are_added_and_a_new_column_is_missing_before_it():
    table = Table(("step",))
    for step in range(600):  # more than it has room for at first
        table.append({"step": step} | ({"late": 2.0 * step} if step >= 400 else {}))
    assert len(table) == 600
    assert table["step"].tolist() == list(range(600))
    assert np.isnan(table["late"][:400]).all()
    assert table["late"][400:].tolist() == [2.0 * s for s in range(400, 600)]
    assert np.isnan(table["never"]).all()
    assert len(table["never"]) == 600


def test_a_cut_forgets_rows_and_what_the_browser_has_of_them():
    table = Table(("step", "v"))
    for step in range(10):
        table.append({"step": step, "v": NOT_FINITE if step > 6 else step})
    table.tell()
    assert not table.news
    assert table.not_finite == {"v": 3}
    table.cut(8)
    assert table.news  # it has rows that no longer count
    assert (table.n, table.told, table.not_finite) == (8, 8, {"v": 1})
    table.cut(5)
    assert table.not_finite == {}
    table.append({"step": 5})
    assert math.isnan(table["v"][5])  # nothing of the old row 5 is left
    table.tell()
    assert not table.news
    table.cut(100)
    assert table.n == 6


def test_thinning_keeps_the_newest_quarter_and_half_of_the_rest():
    table = Table(("t",))
    for t in range(100):
        table.append({"t": t})
    table.thin(100)
    assert len(table) == 100
    table.thin(99)
    assert table["t"].tolist() == [*range(0, 75, 2), *range(75, 100)]
    assert table.told == 0
    table.append({"t": 100})
    assert table["t"][-1] == 100


def test_rows_are_little_endian_float64_row_by_row():
    table = Table(("a", "b"))
    table.append({"a": 1.0, "b": 2.0})
    table.append({"a": 3.0})
    assert table.rows(0)[:24] == struct.pack("<3d", 1.0, 2.0, 3.0)
    assert math.isnan(struct.unpack("<d", table.rows(1)[8:])[0])
    assert table.rows(2) == b""


@pytest.mark.parametrize(("value", "kept"), [(1, 1.0), (-2.5, -2.5), (None, NOT_FINITE), (math.nan, NOT_FINITE), (-math.inf, NOT_FINITE)])
def test_what_is_not_finite_is_flagged(value, kept):
    assert finite(value) == kept


def test_packing_keeps_times_exactly_and_values_to_sixteen_bits():
    times = 1.8e9 + 0.123 * np.arange(1000)
    assert (unpack(pack(times, exact=True), 1000, exact=True) == times).all()
    values = np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-30, 30).repeat(17)[:1000]
    got = unpack(pack(values), 1000)
    assert (np.abs(got / values - 1) <= 2.0**-16).all()  # half a unit of the 16th bit, and float32's own rounding
    # By hand: 1 + 2^-16 has a mantissa of 0x000080; its lowest byte is rounded up into the next.
    assert unpack(pack(np.array([1 + 2.0**-16])), 1)[0] == 1 + 2.0**-15
    assert unpack(pack(np.array([1 + 2.0**-18])), 1)[0] == 1.0


def test_packing_keeps_gaps_and_flags():
    got = unpack(pack(np.array([math.nan, math.inf, -math.inf, 0.0, 3e38, 1e300])), 6)
    assert math.isnan(got[0])
    assert got[1:4].tolist() == [math.inf, -math.inf, 0.0]
    assert got[4] == pytest.approx(3e38, rel=1e-4)
    assert got[5] == math.inf  # beyond float32
    assert unpack(pack(np.array([])), 0).tolist() == []


def test_a_hundred_thousand_points_on_eight_curves_are_below_three_megabytes_even_as_noise():
    noise = np.random.default_rng(1).standard_normal(100_000)
    assert 8 * len(pack(noise)) + 2 * len(pack(1.8e9 + np.arange(100_000) * 1.7, exact=True)) < 3_000_000
