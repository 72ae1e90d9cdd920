"""Parameters of a notebook: found in its cell, and values taken as the type of their default."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import ConfigError
from rlkit.parameters import UNKNOWN, check_parameters, convert, notebook_parameters


def notebook(source: str, tags: tuple[str, ...] = ("parameters",)) -> dict:
    story = {"cell_type": "markdown", "metadata": {"tags": ["parameters"]}, "source": "not = code"}
    return {"cells": [story, {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": source}]}


def test_every_assignment_is_a_parameter():
    source = "# parameters\na = 1\nb, c = 2.0, 'x'\nd: bool = True\ne = f = None\ng = -1\nh = [1, 2]\nprint(a)\n"
    expected = {"a": 1, "b": 2.0, "c": "x", "d": True, "e": None, "f": None, "g": -1, "h": [1, 2]}
    assert notebook_parameters(notebook(source)) == expected


def test_a_default_that_is_an_expression_is_unknown():
    found = notebook_parameters(notebook("a = 2 * 3\nb, c = pair()\nd: int"))
    assert found == {"a": UNKNOWN, "b": UNKNOWN, "c": UNKNOWN}


def test_other_cells_have_none():
    assert notebook_parameters(notebook("a = 1", tags=())) == {}
    assert notebook_parameters({"cells": []}) == {}


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 1, 3),
        ("3.0", 1, 3),
        ("1e3", 1, 1000),
        ("3", 1.0, 3.0),
        ("1e-4", 1.0, 1e-4),  # text to a YAML 1.1 parser
        ("-.5", 0.1, -0.5),
        ("true", False, True),
        ("7", "tiny", "7"),
        ("true", "tiny", "true"),
        ("", "tiny", ""),
        ("[1, 2]", [0], [1, 2]),
        ("[1, 2]", (0,), [1, 2]),
        ("{a: 1}", {}, {"a": 1}),
        ("3", None, 3),
        ("x", None, "x"),
        ("null", None, None),
        ("2.5", UNKNOWN, 2.5),
    ],
)
def test_text_becomes_the_type_of_the_default(text, default, value):
    got = convert("p", text, default)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("value", "default", "kind"),
    [
        ("many", 1, "int"),
        ("2.5", 1, "int"),
        ("true", 1, "int"),
        ("true", 1.0, "float"),
        ("1", True, "bool"),
        ("3", [1], "list"),
        ("null", 1, "int"),
        (3, "tiny", "str"),
    ],
)
def test_another_type_is_refused(value, default, kind):
    with pytest.raises(ConfigError, match=rf"Parameter 'p' is .*it must be a {kind}, like its default"):
        convert("p", value, default)


def test_text_that_is_no_yaml_is_refused():
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        convert("p", "[1", [0])


def test_an_unknown_parameter_names_the_nearest_and_all():
    made = notebook("steps, seed = 40, 0")
    assert check_parameters(made, {"steps": "3"}, Path("x.ipynb")) == {"steps": 3}
    with pytest.raises(ConfigError, match=r"x\.ipynb has no parameter 'step', did you mean 'steps'\? It has: steps, seed\."):
        check_parameters(made, {"step": "3"}, Path("x.ipynb"))
    with pytest.raises(ConfigError, match=r"It has none: no cell with assignments is tagged 'parameters'"):
        check_parameters({"cells": []}, {"a": "1"}, Path("x.ipynb"))
