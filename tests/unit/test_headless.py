"""Headless runs, as far as no kernel is needed: results as JSON, bad notebooks refused, failures told in a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import nbformat
import numpy as np
import pytest
from papermill.exceptions import PapermillExecutionError

from rlkit import headless
from rlkit.config import SampleSpec
from rlkit.errors import ConfigError


def printed(capsys, values):
    headless.result(values)
    return json.loads(capsys.readouterr().out)


def test_outside_a_kernel_a_result_is_one_json_line(capsys):
    headless.result({"task": "arithmetic", "accuracy_after": 0.98})
    assert capsys.readouterr().out == '{"task": "arithmetic", "accuracy_after": 0.98}\n'


def test_values_become_what_json_can_hold(capsys):
    values = {
        "np": np.float32(0.5),
        "int": np.int64(3),
        "array": np.arange(3),
        "nan": float("nan"),
        "inf": [np.float64("inf"), 1.0],
        "path": Path("runs/x"),
        "spec": SampleSpec(n=2, stop="."),
        "none": None,
        "flag": np.bool_(True),
        "nested": {"a": (1, 2)},
    }
    got = printed(capsys, values)
    assert got.pop("spec")["stop"] == ["."]
    assert got == {
        "np": 0.5,
        "int": 3,
        "array": [0, 1, 2],
        "nan": None,
        "inf": [None, 1.0],
        "path": "runs/x",
        "none": None,
        "flag": True,
        "nested": {"a": [1, 2]},
    }


def test_what_json_cannot_hold_is_named():
    with pytest.raises(ConfigError, match=r"result's 'a\.b\[1\]' is a set"):
        headless.result({"a": {"b": [1, {2}]}})


def test_a_missing_or_broken_notebook_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"No notebook at .*none\.ipynb"):
        headless.run_notebook(tmp_path / "none.ipynb")
    broken = tmp_path / "broken.ipynb"
    broken.write_text("not json")
    with pytest.raises(ConfigError, match=r"broken\.ipynb is not a notebook"):
        headless.run_notebook(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"broken\.ipynb is not a notebook"):
        headless.run_notebook(broken)
    broken.write_text('{"some": "json"}')
    with pytest.raises(ConfigError, match=r"broken\.ipynb is not a notebook"):
        headless.run_notebook(broken)


def test_the_source_is_never_overwritten(tmp_path):
    path = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), path)
    with pytest.raises(ConfigError, match="would overwrite"):
        headless.run_notebook(path, output=tmp_path / "." / "n.ipynb")


@dataclass
class Fake:
    cells: list


def test_the_last_result_wins():
    def cell(*outputs):
        return {"outputs": [{"data": {headless.RESULT_MIME: o}} for o in outputs]}

    assert headless._find_result(Fake([cell({"a": 1}), {"source": "text"}, cell({"a": 2}, {"a": 3})])) == {"a": 3}
    assert headless._find_result(Fake([cell()])) is None


def test_a_failure_is_told_in_four_lines():
    traceback = [
        "\x1b[31m----\x1b[39m",
        "\x1b[31mConfigError\x1b[39m   Traceback (most recent call last)",
        "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39mIn[3]\x1b[32m, line 2\x1b[39m\n      1 x = 1\n----> 2 f(x)",
        "\x1b[36mFile \x1b[39m\x1b[32m/lib/a.py:12\x1b[39m, in f(x)\n",
        "\x1b[36mFile \x1b[39m\x1b[32m/lib/b.py:7\x1b[39m, in Spec._need(self)\n",
        "\x1b[31mConfigError\x1b[39m: bad",
    ]
    error = PapermillExecutionError(5, 3, "x = 1\nf(x)", "ConfigError", "bad", traceback)
    assert headless._failure(error, Path("n.ipynb"), Path("runs/out.ipynb")).splitlines() == [
        "Cell In[3] of n.ipynb failed: ConfigError: bad",
        "    line 2: f(x)",
        "    raised at /lib/b.py:7, in Spec._need",
        "The notebook up to there, with the whole traceback: runs/out.ipynb",
    ]
