"""Every lesson runs from its first cell to its last, headless, with parameters small enough for a test."""

from pathlib import Path

import nbformat
import pytest

from rlkit import localhead
from rlkit.headless import run_notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TINY = {"steps": 2, "test_problems": 16, "prompts_per_step": 4, "group_size": 4}
WORDS = {"config": "laptop", "model": "tiny", "train_sets": "word_problems", "train_split": "train", "test_sets": "word_problems"}
SMALL = {
    "01_quickstart.ipynb": TINY,
    "02_evaluate.ipynb": TINY | {"samples": 2},
    "07_word_problems_on_a_gpu.ipynb": TINY | WORDS | {"max_tokens": 32},
}


def test_every_notebook_has_small_parameters():
    assert sorted(p.name for p in NOTEBOOKS.glob("*.ipynb")) == sorted(SMALL)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_notebook_runs(name, tmp_path, monkeypatch):
    for key in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("RLKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    try:
        done = run_notebook(NOTEBOOKS / name, SMALL[name], output=tmp_path / name)
    finally:
        for head in localhead.living():  # of a notebook that failed before its last cell
            localhead.stop(head.name)
    assert done.result is not None
    assert done.result["engine"] == "vllm"
    assert done.result["steps"] == SMALL[name]["steps"]
    cells = nbformat.read(tmp_path / name, as_version=4).cells
    errors = [o for c in cells for o in c.get("outputs", []) if o["output_type"] == "error"]
    assert not errors
