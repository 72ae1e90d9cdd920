"""Static pictures: well-formed SVG that says what it shows."""

from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from rlkit.widgets.picture import Curve, Span, chart, chips, decimate, duration, lanes, last_finite, runs

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture, tag):
    return ET.fromstring(picture.svg).findall(f".//{SVG}{tag}")


def test_a_curve_is_drawn_from_left_to_right_and_its_last_value_told():
    picture = chart("Reward", [Curve("mean", np.arange(3.0), np.array([0.0, 0.5, 1.0]))], width=300)
    (line,) = drawn(picture, "polyline")
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    # Left edge 40, right 292; floor 150 - 18 = 132, ceiling 22 + 4 = 26.
    assert points == [(40.0, 132.0), (166.0, 79.0), (292.0, 26.0)]
    assert picture.alt == "Reward: mean 1"
    assert "".join(ET.fromstring(picture.svg).itertext()).count("Reward") == 2  # its title, and the words for readers that cannot see it


def test_gaps_break_the_line_and_what_is_not_finite_is_counted():
    y = np.array([1.0, 2.0, math.nan, 3.0, 4.0, math.inf, 5.0])
    picture = chart("x", [Curve("x", np.arange(7.0), y)])
    assert len(drawn(picture, "polyline")) == 2
    assert len(drawn(picture, "circle")) == 1  # a point alone
    assert "1 values not finite" in picture.alt
    assert "1 not finite" in picture.svg
    assert "inf" not in picture.svg.replace("not finite", "")
    assert "nan" not in picture.svg.lower()


@pytest.mark.parametrize("y", [[], [math.nan, math.nan], [math.inf]])
def test_nothing_to_draw_is_said(y):
    picture = chart("KL", [Curve("kl", np.arange(float(len(y))), np.array(y))])
    assert drawn(picture, "polyline") == []
    assert re.search("nothing logged yet|none finite", picture.svg)


def test_a_constant_and_a_single_point_have_a_place():
    assert len(drawn(chart("KL", [Curve("kl", np.arange(4.0), np.zeros(4))]), "polyline")) == 1
    assert len(drawn(chart("KL", [Curve("kl", np.zeros(1), np.ones(1))]), "circle")) == 1


def test_a_single_point_in_seconds_since_1970_has_a_place_too():
    for drawing in (
        chart("CPU", [Curve("cpu", np.array([1.7e9]), np.array([25.0]))]),
        lanes("phases", [("rollout", "#000", [(1.7e9, 1.7e9)])], ("", "")),
    ):
        assert "nan" not in str(drawing)


def test_a_band_lies_around_its_curve():
    picture = chart("r", [Curve("r", np.arange(2.0), np.ones(2), np.full(2, 0.5))])
    (band,) = drawn(picture, "polygon")
    assert len(band.get("points").split()) == 4
    assert "0.5" in picture.svg  # the lowest value of the axis
    assert "1.5" in picture.svg


def test_spans_lie_behind_and_are_cut_to_the_chart():
    picture = chart(
        "CPU", [Curve("cpu", np.array([0.0, 10.0]), np.ones(2))], spans=[Span(-5, 5, "#0072B2"), Span(20, 30, "#009E73")], width=300
    )
    paths = [p.get("d") for p in drawn(picture, "path") if p.get("fill-opacity")]
    assert paths == ["M40.0 22H166.0V132H40.0z"]


def test_decimation_keeps_extremes_ends_and_gaps():
    y = np.sin(np.arange(100_000) / 1000)
    y[31_415] = 50.0
    y[60_000:61_000] = np.nan
    kept = decimate(y, pixels=200)
    assert len(kept) <= 400
    assert 31_415 in kept
    assert (np.diff(kept) > 0).all()
    assert np.isnan(y[kept]).any()
    assert kept[0] < 500
    assert kept[-1] > 99_500
    assert decimate(np.arange(10.0)).tolist() == list(range(10))


def test_a_long_history_makes_a_small_picture():
    y = np.random.default_rng(0).standard_normal(100_000)
    assert len(chart("noise", [Curve("noise", np.arange(1e5), y)]).svg) < 12_000


def test_an_image_carries_all_it_needs_and_no_script():
    html = chart("<script>alert(1)</script>", [Curve("a'b", np.arange(2.0), np.ones(2))]).img()
    assert "<script" not in html
    svg = base64.b64decode(re.search(r"base64,([^']+)", html).group(1)).decode()
    assert "<script" not in svg
    assert ET.fromstring(svg).tag == f"{SVG}svg"
    assert re.search(r"alt='[^']*a&#x27;b 1", html)


def test_lanes_and_chips():
    picture = lanes(
        "Phases", [("rollout", "#0072B2", [(0.0, 5.0), (8.0, 10.0)]), ("update", "#009E73", [(5.0, 8.0)])], ("a", "b"), width=596
    )
    first, second = (p.get("d") for p in drawn(picture, "path"))
    assert first == "M88.0 22h250.0v12H88.0zM488.0 22h100.0v12H488.0z"  # 500 pixels for 10 s
    assert second == "M338.0 38h150.0v12H338.0z"
    assert picture.alt == "Phases: rollout, update"
    assert "no phase" in lanes("Phases", [], ("", "")).svg
    health = chips([("KL", "0.9", "bad"), ("Reward", "± 0.3", "good")])
    assert health.alt == "Health: KL 0.9 (bad), Reward ± 0.3 (good)"
    assert "✕ KL 0.9" in health.svg  # told without colour


def test_small_helpers():
    assert runs(np.array([True, True, False, True])) == [(0, 2), (3, 4)]
    assert last_finite(np.array([1.0, math.nan])) == 1.0
    assert last_finite(np.array([math.nan])) is None
    assert [duration(s) for s in (0.4, 75, 725, 12_000, math.nan)] == ["0 s", "75 s", "12 min 5 s", "3 h 20 min", "0 s"]
