"""Numbers for people, and tables that cannot be broken out of."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.background import Background
from rlkit.reprs import gib, html_table, number
from rlkit.watch import Changes, RunState, Source
from rlkit.weights import SyncStats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000123, "1.23e-04"),
        (-0.000123, "-1.23e-04"),
        (0.001, "0.001"),
        (0.12345, "0.123"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.9, "1,000"),
        (1000, "1,000"),
        (15300, "15,300"),
        (-15300.4, "-15,300"),
        (2_500_000.0, "2,500,000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_gib():
    assert gib(3 * 2**30) == "3.0 GiB"
    assert gib(2**29) == "0.5 GiB"


def test_every_object_has_an_html_part_and_a_text_part():
    """What a notebook saves of an object is a picture or a table and text, also where nothing but the repr is worth showing."""
    for name in (
        "Run",
        "Sampler",
        "Learner",
        "Reference",
        "Cluster",
        "Tasks",
        "Rollouts",
        "Scored",
        "Batch",
        "UpdateStats",
        "Prompt",
        "Sample",
    ):
        shown = getattr(rlkit, name)
        assert callable(shown._repr_html_), name
        assert shown.__repr__ is not object.__repr__, name
    for shown in (SyncStats, Background, RunState, Changes, Source):
        assert callable(shown._repr_html_), shown
        assert shown.__repr__ is not object.__repr__, shown
    stats = rlkit.UpdateStats(3, {"policy/loss": 0.5}, 1.0)
    assert stats._repr_html_() == f"<code style='white-space:pre-wrap'>{stats!r}</code>"
    assert "<b>" not in rlkit.Prompt("<b>", ())._repr_html_()


def test_html_table_escapes_every_cell():
    table = html_table(("<h>",), [("<script>alert(1)</script>",), (3,)], caption="a & b")
    assert "<script>" not in table
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in table
    assert "&lt;h&gt;" in table
    assert "a &amp; b" in table
    assert table.count("<tr>") == 3  # the header and two rows
