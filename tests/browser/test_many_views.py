"""Runs on disk in JupyterLab: a long one, two beside each other, many views in one notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from board import Board
from page import Notebook, picture
from playwright.sync_api import expect

LONG = 100_000
BESIDE_PLOTLY = 3 * 2**20  # bytes that opening a long history may cost
METRICS = (
    "reward/mean",
    "reward/std",
    "length/mean",
    "policy/entropy",
    "policy/kl",
    "policy/grad_norm",
    "policy/clip_fraction",
    "time/update",
)


def write_run(folder: Path, steps: int, lr: float, lift: float = 0.0) -> None:
    """A run's log of ``steps`` steps with eight metrics; the reward is `lift` and a sawtooth of 1,000 steps, with one spike at step 777."""
    folder.mkdir(parents=True)
    events = [
        {"kind": "open", "t": 1000.0, "name": folder.name, "seed": 0},
        {"kind": "part", "t": 1000.5, "name": "learner", "model": "tiny", "spec": {"lr": lr, "zero_stage": 2}, "seconds": 1.0},
    ]
    for step in range(steps):
        values = {name: (step * (i + 1) % 1000) / 1000 for i, name in enumerate(METRICS)} | {"reward/mean": lift + step % 1000 / 2000}
        if step == 777:
            values["reward/mean"] = 5.0
        events.append({"kind": "step", "t": 1001.0 + step, "step": step, "version": step + 1, "updates": 1, "metrics": values})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def frames(notebook: Notebook) -> list[int]:
    """Sizes of what the page gets over its sockets from now on; it is loaded again for that."""
    sizes: list[int] = []
    notebook.page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: sizes.append(len(frame))))
    notebook.page.reload(wait_until="domcontentloaded")
    notebook.wait_open()
    return sizes


def test_a_hundred_thousand_steps_are_drawn_with_as_many_points_as_the_page_has(lab, open_notebook):
    write_run(lab.notebooks / "runs" / "long", LONG, 1e-4)
    imports = "from rlkit.widgets import Dashboard, RewardCurves"
    notebook = open_notebook(lab.new("long.ipynb", imports, "RewardCurves('runs/long', ['reward'])", "Dashboard('runs/long')"))
    received = frames(notebook)
    notebook.run(imports)
    notebook.run("RewardCurves('runs/long', ['reward'])")
    notebook.wait_idle()
    first = Board(notebook, "RewardCurves('runs/long', ['reward'])")
    first.show()
    notebook.wait(lambda: first.look("return root.dataset.points") == str(LONG), "the whole history")
    notebook.wait(lambda: first.points() > 100, "the curve")
    assert first.points() < 5000
    top = "return Math.max(...[...root.querySelectorAll('.rlkit-plot')][0].data.flatMap(t => t.hoverinfo === 'skip' ? [] : [...t.y]))"
    assert first.look(top) == pytest.approx(5.0, abs=0.01)  # a spike of one step is there
    opened = sum(received)
    notebook.run("Dashboard('runs/long')")
    notebook.wait_idle()
    whole = Board(notebook, "Dashboard('runs/long')")
    whole.show()
    notebook.wait(lambda: whole.look("return root.dataset.points") == str(LONG), "the whole history")
    notebook.wait(lambda: len(whole.curve("Entropy")) > 100, "another curve")
    assert 200_000 < sum(received) - opened < BESIDE_PLOTLY  # plotly.js is in the page already
    plot = first.chart("Reward").locator(".rlkit-plot")
    first.show()
    plot.focus()
    for _ in range(8):
        plot.press("+")
    notebook.wait(
        lambda: 0 < max(first.curve("Reward"), default=LONG) - min(first.curve("Reward"), default=0) < LONG / 50, "a small part of it"
    )
    plot.press("Home")
    notebook.wait(lambda: max(first.curve("Reward"), default=0) == LONG - 1, "the whole curve")
    assert notebook.faults() == []
    lab.end_sessions()


def test_two_runs_over_each_other(lab, open_notebook):
    write_run(lab.notebooks / "runs" / "slow", 40, 1e-4)
    write_run(lab.notebooks / "runs" / "fast", 60, 3e-4, lift=0.3)
    code = "from rlkit.widgets import compare\n\ncompare('runs/slow', 'runs/fast')"
    notebook = open_notebook(lab.new("compare.ipynb", code))
    notebook.run_all()
    notebook.wait_idle()
    board = Board(notebook, code)
    board.wait_points(40)
    lines = "return [...root.querySelectorAll('.rlkit-plot')][0].data.filter(t => t.hoverinfo !== 'skip').map(t => [t.name, t.x.length])"
    assert board.look(lines) == [["slow", 40], ["fast", 60]]
    says = "read from its folder, which does not say whether it runs"
    assert board.state() == f"slow: {says}; 40 steps are complete — fast: {says}; 60 steps are complete"
    row = board.root.locator("[data-kind='differences'] tbody tr")
    expect(row).to_have_count(1)
    assert row.locator("th, td").all_inner_texts() == ["learner.lr", "0.0001", "0.0003"]
    board.root.screenshot(path=picture("compare"))
    assert notebook.faults() == []
    lab.end_sessions()


OPENED = """import gc, threading
from IPython import get_ipython
from IPython.display import display
from rlkit.widgets import Dashboard

def held():
    gc.collect()
    return len(get_ipython().kernel.comm_manager.comms), sorted(t.name for t in threading.enumerate() if t.name.startswith("rlkit"))

boards = []
before = held()"""
TEN = """for i in range(10):  # the {n} of five: JupyterLab shows fifty outputs a cell
    boards.append(Dashboard("runs/fifty"))
    display(boards[-1])"""
CLOSED = """opened = held()
for board in boards:
    board.close()
after = held()
print("opened", opened[0] - before[0] >= 50, len(opened[1]) - len(before[1]) >= 50, "left", after == before)"""


def test_fifty_dashboards_opened_and_closed_leave_nothing(lab, open_notebook):
    write_run(lab.notebooks / "runs" / "fifty", 30, 1e-4)
    tens = [TEN.format(n=n) for n in ("first", "second", "third", "fourth", "last")]
    notebook = open_notebook(lab.new("fifty.ipynb", OPENED, *tens, CLOSED))
    notebook.run(OPENED)
    for ten in tens:
        notebook.run(ten)
        notebook.wait_idle()
        expect(notebook.cell(ten).locator(".rlkit-view")).to_have_count(10, timeout=60_000)
    notebook.run(CLOSED)
    notebook.wait_idle()
    expect(notebook.cell("after = held()")).to_contain_text("opened True True left True")
    assert notebook.faults() == []
    lab.end_sessions()
