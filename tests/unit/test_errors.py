"""The exception tree: drawn completely in its docstring, and every error survives the way from a worker to the notebook."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from rlkit import errors

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, Exception)}


def drawn() -> dict[str, str | None]:
    """name -> parent, as the docstring's tree shows them by indentation."""
    stack: list[tuple[int, str]] = []
    found: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4}[│ ├└─]*)(\w+Error)\b", line)
        if not match:
            continue
        depth = len(match[1])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        found[match[2]] = stack[-1][1] if stack else None
        stack.append((depth, match[2]))
    return found


def test_the_docstring_draws_the_whole_tree():
    actual = {name: None if cls is errors.RlkitError else cls.__bases__[0].__name__ for name, cls in CLASSES.items()}
    assert drawn() == actual


def test_builtin_bases_are_the_ones_drawn():
    for name, builtin in re.findall(r"(\w+Error)\s+\((\w+)\)", errors.__doc__ or ""):
        assert builtin in [base.__name__ for base in CLASSES[name].__bases__]
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.ConnectError, ConnectionError)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_can_be_pickled(name):
    error = CLASSES[name]("what was found, what is allowed: 3")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error) == "what was found, what is allowed: 3"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_has_a_docstring(name):
    assert (CLASSES[name].__doc__ or "").endswith(".")


def test_nearest_guesses_only_when_close():
    assert errors.nearest("temprature", ["temperature", "top_p"]) == ", did you mean 'temperature'?"
    assert errors.nearest("xyz", ["temperature", "top_p"]) == ""
    assert errors.nearest("x", []) == ""
