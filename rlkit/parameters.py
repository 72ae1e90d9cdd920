"""Parameters of a notebook: which it has, and values for them checked against their defaults."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlkit.errors import ConfigError, nearest

UNKNOWN = object()  # the default of a parameter is an expression: any value may replace it


def notebook_parameters(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """name -> default of every assignment in the cell tagged ``parameters``; a default that is no literal is `UNKNOWN`.

    Tuple assignments (``a, b = 1, 2``) count as one parameter a name.
    """
    cells = (c for c in notebook["cells"] if c["cell_type"] == "code" and "parameters" in c["metadata"].get("tags", ()))
    found: dict[str, Any] = {}
    for statement in ast.parse(next(cells, {"source": ""})["source"]).body:
        pairs: list[tuple[ast.expr, ast.expr]]
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            pairs = [(statement.target, statement.value)]
        elif isinstance(statement, ast.Assign):
            pairs = [pair for target in statement.targets for pair in _pairs(target, statement.value)]
        else:
            continue
        found |= {target.id: _literal(value) for target, value in pairs if isinstance(target, ast.Name)}
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    if isinstance(target, ast.Tuple):
        return [(t, ast.Name("unknown")) for t in target.elts]
    return [(target, value)]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def convert(name: str, value: Any, default: Any) -> Any:
    """``value`` as the type of the parameter's default. Text is read as YAML would, unless the default is text.

    Raises:
        ConfigError: it has another type.
    """
    if isinstance(value, str) and not isinstance(default, str):
        value = _from_text(name, value)
    if default is UNKNOWN or default is None:
        return value
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, int) and not isinstance(default, bool) and isinstance(value, float) and value.is_integer():
        return int(value)
    kind: Any = (list, tuple) if isinstance(default, list | tuple) else type(default)
    if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, kind):
        raise ConfigError(f"Parameter {name!r} is {value!r}; it must be a {type(default).__name__}, like its default {default!r}.")
    return value


def _from_text(name: str, text: str) -> Any:
    for number in (int, float):  # YAML reads 1e-4 as text
        try:
            return number(text)
        except ValueError:
            continue
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"Parameter {name!r}: {text!r} cannot be read as YAML.") from error


def check_parameters(notebook: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """``given``, converted.

    Raises:
        ConfigError: a name that the notebook does not have (with the nearest one), or a value of another type than its default.
    """
    known = notebook_parameters(notebook)
    for name in given:
        if name not in known:
            has = f"It has: {', '.join(known)}." if known else "It has none: no cell with assignments is tagged 'parameters'."
            raise ConfigError(f"{path} has no parameter {name!r}{nearest(name, known) or '.'} {has}")
    return {name: convert(name, value, known[name]) for name, value in given.items()}
