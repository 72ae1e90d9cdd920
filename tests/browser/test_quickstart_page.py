"""The quickstart in JupyterLab: opened, run from its first cell to its last, read in the page."""

from __future__ import annotations

from urllib.parse import urlsplit

from board import Board
from lab import ROOT
from playwright.sync_api import expect

TINY = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "test_problems": 16}


def test_the_quickstart_runs_in_jupyterlab(lab, open_notebook):
    notebook = open_notebook(lab.copy(ROOT / "notebooks" / "01_quickstart.ipynb", **TINY))
    notebook.run_all()
    notebook.wait_idle(240)
    assert all(notebook.counts()), notebook.counts()
    expect(notebook.cell("rl.headless.result(")).to_contain_text('"steps": 3')
    board = Board(notebook, "display(RewardCurves(run")
    assert board.wait_points(TINY["steps"]) == TINY["steps"]
    assert board.curve("Reward") == [0, 1, 2]
    assert {urlsplit(url).hostname for url in notebook.requests if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
    assert notebook.faults() == []
    lab.end_sessions()
    assert lab.kernels() == []
