"""Every lesson runs from its first cell to its last, headless, with parameters small enough for a test."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter

from rlkit import localhead
from rlkit.headless import run_notebook
from rlkit.reprs import number

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TINY = {"steps": 2, "test_problems": 16, "prompts_per_step": 4, "group_size": 4}
WORDS = {"config": "laptop", "model": "tiny", "train_sets": "word_problems", "train_split": "train", "test_sets": "word_problems"}
SMALL = {
    "01_quickstart.ipynb": TINY,
    "02_evaluate.ipynb": TINY | {"samples": 2},
    "03_watch_a_run.ipynb": {"steps": 2, "prompts_per_step": 4, "group_size": 4},
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
    assert (tmp_path / name).stat().st_size < 500_000
    assert_a_page_without_scripts_has_the_curves(tmp_path / name)


def assert_a_page_without_scripts_has_the_curves(path):
    """What a viewer shows: each picture as it was at the end, from the file alone, and no trace of a widget."""
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    assert not any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in outputs)
    if not any("Dashboard" in c.source or "RewardCurves" in c.source for c in notebook.cells):
        return
    page, _ = HTMLExporter().from_notebook_node(notebook)
    read = Reader()
    read.feed(page)
    read.close()
    assert not [source for source in read.pictures.values() if not source.startswith("data:image/svg+xml;base64,")]
    charts = {alt: source for alt, source in read.pictures.items() if alt.startswith("Reward:")}
    assert charts, list(read.pictures)
    events = [json.loads(line) for line in next((path.parent / "runs").glob("*/events.jsonl")).read_text().splitlines()]
    last = number([event["metrics"]["reward/mean"] for event in events if event["kind"] == "step"][-1])
    for alt, source in charts.items():
        assert last in alt
        assert f">{last}<" in base64.b64decode(source.partition(",")[2]).decode()


class Reader(HTMLParser):
    """The pictures of a page, as one sees them whose browser runs no scripts."""

    def __init__(self):
        super().__init__()
        self.pictures = {}  # what is said of it -> where it is

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.pictures[dict(attrs).get("alt", "")] = dict(attrs)["src"]
