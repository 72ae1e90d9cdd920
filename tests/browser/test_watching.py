"""A run watched in JupyterLab: one story on the real tiny loop, told in order. Every test goes on where the one before it stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pandas as pd
import pytest
from board import Board, Log
from lab import ROOT, Lab
from page import DARK, LIGHT, Notebook, picture
from playwright.sync_api import Browser, expect

NAME = "watched"
ENDLESS = {"steps": 4000, "prompts_per_step": 4, "group_size": 4, "max_tokens": 32}
BOARD = "board = Dashboard(run)"
ATTACH = f"""import rlkit as rl
from rlkit.widgets import Dashboard

again = rl.attach({NAME!r})
Dashboard(again)"""
PLAIN = """tasks, sampler, learner = rl.load_tasks("arithmetic"), again.sampler(), again.learner()
for step in again.steps(again.committed + 1000, progress=False):
    scored = rl.score(sampler.generate(tasks.batch(4), n=4, max_tokens=32, progress=False), rl.rewards.Math())
    stats = learner.update(rl.advantages(scored, "grpo"))
    sampler.sync(learner)
    again.log(step, scored, stats)
print("the loop ended after", again.committed)"""


@pytest.fixture(scope="module")
def story(lab: Lab, browser: Browser) -> Iterator[SimpleNamespace]:
    """The lesson, opened and run up to the cell that closes the run."""
    context = browser.new_context()
    path = lab.copy(ROOT / "notebooks" / "03_watch_a_run.ipynb", more=[ATTACH], **ENDLESS)
    notebook = Notebook(context, lab, path)
    notebook.run_above("folder = run.folder")
    yield SimpleNamespace(context=context, path=path, notebook=notebook, log=Log(lab.notebooks / "runs" / NAME), lab=lab)
    context.close()
    lab.end_sessions()


def test_curves_gain_points_while_the_cell_runs(story):
    notebook = story.notebook
    notebook.wait(lambda: notebook.app("return document.querySelectorAll('.rlkit-view').length"), "the dashboard", 120)
    board = story.board = Board(notebook, BOARD)
    first = board.wait_points(1)
    more = board.wait_points(first + 2)
    assert notebook.running() > 0
    drawn = board.curve("Reward")
    assert drawn == list(range(len(drawn)))
    assert more <= len(drawn) <= len(story.log.steps())
    notebook.wait(lambda: len(board.curve("Entropy")) >= more, "another metric's curve")
    notebook.wait(lambda: len(board.curve("CPU")) >= 2, "samples of the machine")
    expect(board.root).to_contain_text("No GPU: the curves are those of the CPU side.")
    assert "step" in board.state()


def test_pause_single_step_and_resume(story):
    board, log = story.board, story.log
    board.press("Pause", "The loop pauses after this step.")
    board.wait_state("paused")
    held = log.steps()
    assert len(log.events("begin")) == len(held)  # no step is half done
    board.notebook.page.wait_for_timeout(3000)  # several steps' time
    assert log.steps() == held
    board.press("Single step", "One step, then a pause.")
    board.notebook.wait(lambda: len(log.steps()) > len(held), "the single step")
    board.wait_state("paused")
    board.notebook.page.wait_for_timeout(3000)
    assert len(log.steps()) == len(held) + 1
    board.wait_points(len(held) + 1)
    board.press("Resume", "The loop goes on.")
    board.wait_points(len(held) + 3)


def test_a_checkpoint_is_one_click_away(story):
    board, log = story.board, story.log
    board.press("Checkpoint now", "A checkpoint will be written after this step.")
    board.notebook.wait(lambda: log.events("checkpoint"), "the checkpoint")
    written = log.events("checkpoint")[0]
    assert (log.folder / written["path"]).is_dir()
    board.wait_points(written["step"] + 2)  # the loop goes on


def test_a_rollout_is_one_click_away(story):
    board = story.board
    rollouts = board.root.locator("[data-kind='rollouts']")
    frame = pd.read_parquet(story.log.folder / "samples" / "step-000000.parquet")
    prompts = list(frame["prompt_id"].unique())
    rollouts.get_by_label("Step", exact=True).fill("0")
    rollouts.get_by_label("Step", exact=True).press("Enter")
    group = rollouts.locator(".rlkit-group[role='option']")  # a select's entries are options too
    expect(group.nth(1)).to_contain_text(frame[frame["prompt_id"] == prompts[1]]["question"].iloc[0], timeout=60_000)
    expect(group).to_have_count(len(prompts))
    group.nth(1).hover()
    board.notebook.page.mouse.down()  # the field of the step is left by it
    board.notebook.page.wait_for_timeout(1000)
    board.notebook.page.mouse.up()
    rows = frame[frame["prompt_id"] == prompts[1]]
    sample = rollouts.locator(".rlkit-sample")
    expect(sample).to_have_count(len(rows), timeout=60_000)
    assert sample.locator("pre").all_inner_texts() == list(rows["response"])
    for n, row in enumerate(rows.itertuples()):
        header = sample.nth(n).locator("header")
        expect(header).to_contain_text(row.verdict)
        expect(header).to_contain_text(f"{row.n_tokens} tokens")
        expect(header).to_contain_text("advantage")
    sample.first.get_by_text("tokens and log-probs").click()
    token = sample.first.locator(".rlkit-tokens span")
    expect(token).to_have_count(int(rows["n_tokens"].iloc[0]), timeout=60_000)
    assert "".join(token.all_inner_texts()).startswith(rows["response"].iloc[0])
    expect(sample.first).to_contain_text("Least expected, by log-prob:")
    wrong = frame[frame["verdict"] == "wrong"]["prompt_id"].nunique()
    rollouts.get_by_role("combobox").select_option("wrong")
    expect(group).to_have_count(int(wrong))
    rollouts.get_by_role("combobox").select_option("all")
    rollouts.get_by_role("button", name="This prompt in other steps").click()
    expect(rollouts.locator(".rlkit-across")).to_contain_text("step 0", timeout=60_000)
    group.nth(1).click()  # the group alone again
    expect(rollouts.locator(".rlkit-across")).to_have_count(0, timeout=60_000)
    sample.first.get_by_text("tokens and log-probs").click()
    expect(token.first).to_be_visible(timeout=60_000)


def test_a_chip_says_what_it_means_and_a_curve_obeys_the_keyboard(story):
    board = story.board
    board.root.get_by_role("button", name="Groups without spread").click()
    expect(board.root.get_by_role("region", name="Explanation")).to_contain_text("What to try")
    assert len(board.curve("Clip fraction")) == 0
    board.root.locator(".rlkit-choose summary").click()
    board.root.get_by_label("Clip fraction").check()
    board.root.locator(".rlkit-choose summary").click()
    board.notebook.wait(lambda: len(board.curve("Clip fraction")) > 1, "the curve that was chosen")
    plot = board.chart("Reward").locator(".rlkit-plot")
    whole = board.points()
    plot.focus()
    plot.press("+")
    board.notebook.wait(lambda: 0 < board.points() < whole, "a part of the curve")
    plot.press("Home")
    board.notebook.wait(lambda: board.points() >= whole, "the whole curve")


def test_stop_ends_an_async_loop_and_the_next_cells_run(story):
    board, notebook = story.board, story.notebook
    board.press("Stop after this step", "The loop ends after this step.")
    expect(notebook.cell("background = run.start(loop)")).to_contain_text("Background(run 'watched', running)", timeout=60_000)
    assert len(story.log.steps()) < ENDLESS["steps"] // 2
    assert notebook.errors() == []
    board.wait_points(len(story.log.steps()) + 2)  # the loop in the thread goes on


@pytest.mark.parametrize("width", [1200, 600])
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_both_themes_at_both_widths(story, theme, width):
    board, notebook = story.board, story.notebook
    notebook.page.set_viewport_size({"width": width, "height": 3000 if width > 1000 else 5500})  # a chart out of sight is not drawn
    board.show()
    notebook.theme(theme)
    expect(board.root.locator(".rlkit-sample").first).to_be_visible()
    notebook.wait(lambda: luminance(board.look(INK)) > 0.5 if theme == DARK else luminance(board.look(INK)) < 0.5, "plots in the theme")
    notebook.wait(lambda: board.look(FITS), "plots as wide as their frames")
    assert board.look("return root.scrollWidth <= root.clientWidth && !/null|undefined|NaN/.test(root.innerText)")
    board.root.screenshot(path=picture(f"dashboard-{'dark' if theme == DARK else 'light'}-{width}"))


def test_the_page_is_closed_and_opened_again_during_the_run(story):
    story.notebook.page.set_viewport_size({"width": 1200, "height": 900})
    story.notebook.theme(LIGHT)
    story.notebook.save()
    story.notebook.close()
    closed_at = len(story.log.steps())
    deadline = time.monotonic() + 60
    while len(story.log.steps()) < closed_at + 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(story.log.steps()) >= closed_at + 2, "the run stopped with the page"
    story.notebook = Notebook(story.context, story.lab, story.path)
    story.board = Board(story.notebook, BOARD)
    seen = story.board.wait_points(closed_at + 2)
    assert story.board.curve("Reward")[:seen] == list(range(seen))
    story.board.wait_points(seen + 2)


def test_another_kernel_watches_and_stops_the_run(story):
    other = Notebook(story.context, story.lab, story.lab.new("other.ipynb", ATTACH, PLAIN))
    other.run(ATTACH)
    other.wait_idle()
    board = Board(other, ATTACH)
    seen = board.wait_points(len(story.log.steps()))
    board.wait_points(seen + 2)
    board.press("Stop after this step", "The loop ends after this step.")
    asked = time.time()
    board.wait_state("stopped|no loop is running")
    story.notebook.wait_idle()
    done = story.log.steps()
    assert [event for event in story.log.events("begin") if event["t"] > asked] == []
    assert len(story.log.events("begin")) == len(done)  # the current step was finished
    assert len(done) < ENDLESS["steps"]
    assert board.wait_points(len(done)) == len(done)
    assert story.board.wait_points(len(done)) == len(done)  # the first page knows it too
    story.other, story.done = other, done


def test_after_a_restart_of_the_kernel_the_whole_history_is_there(story):
    story.notebook.restart()
    dead = Board(story.notebook, BOARD)
    dead.show()
    gone = "The kernel of this view is gone"
    story.notebook.wait(lambda: gone in dead.badges(), "the badge of a view whose kernel was restarted")
    assert dead.points() == len(story.done)
    rollouts = dead.root.locator("[data-kind='rollouts']")
    rollouts.get_by_role("button", name="Newest").click()
    expect(rollouts.locator("[role='status']")).to_contain_text(gone)
    assert story.notebook.faults() == []
    story.notebook.run(ATTACH)
    story.notebook.wait_idle()
    board = Board(story.notebook, ATTACH)
    assert board.wait_points(len(story.done)) == len(story.done)
    assert board.curve("Reward") == story.done
    story.notebook.save()
    story.notebook.close()
    story.notebook = Notebook(story.context, story.lab, story.path)
    old = story.notebook.cell(BOARD)  # its widget went with the kernel: the picture is in its place, as it was at the end
    expect(old.locator(".rlkit-picture").first).to_be_visible()
    expect(old.locator(".rlkit-picture img[alt^='Reward:']")).to_be_visible()
    story.board = Board(story.notebook, ATTACH)
    assert story.board.wait_points(len(story.done)) == len(story.done)


def test_a_plain_loop_is_watched_and_stopped_while_its_cell_runs(story):
    notebook, log = story.other, story.log
    notebook.run(PLAIN)
    board = Board(notebook, ATTACH)
    board.wait_points(len(story.done) + 2, 120)
    assert notebook.running() == 1
    board.press("Stop after this step", "The loop ends after this step.")
    notebook.wait_idle()
    story.done = log.steps()
    assert len(story.done) < 1000
    expect(notebook.cell(PLAIN)).to_contain_text(f"the loop ended after {len(story.done) - 1}")
    assert board.wait_points(len(story.done)) == len(story.done)
    assert story.board.wait_points(len(story.done)) == len(story.done)


def test_where_a_busy_kernel_hears_nobody_a_button_says_so_and_an_interrupt_is_safe(story):
    busy, log = story.other, story.log
    busy.restart()
    busy.app("app.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = 'disabled'")  # as before JupyterLab 4.4
    busy.run(ATTACH)
    busy.wait_idle()
    board = Board(busy, ATTACH)
    board.wait_points(len(story.done))
    busy.run(PLAIN)
    board.wait_points(len(story.done) + 2, 120)  # it is told what is new
    board.press("Pause", "The kernel is busy with a cell that does not yield", whole=False)
    busy.menu("Kernel", "Interrupt Kernel")
    busy.wait(lambda: any("KeyboardInterrupt" in error for error in busy.errors()), "the interrupt")
    expect(board.root.locator("[data-kind='controls'] [role='status']")).to_contain_text("No loop over run", timeout=60_000)
    before = len(log.steps())
    busy.run(PLAIN)  # the step that the interrupt left is finished or undone, and the loop goes on
    board.wait_points(before + 2, 120)
    story.board.press("Stop after this step", "The loop ends after this step.")  # in the other page
    busy.wait_idle()
    story.done = log.steps()
    assert story.done == list(range(len(story.done)))
    assert board.wait_points(len(story.done)) == len(story.done)
    assert story.board.wait_points(len(story.done)) == len(story.done)


def test_a_cluster_that_goes_away_leaves_a_stale_badge_and_no_error(story):
    story.lab.end_clusters()
    for notebook, board in ((story.notebook, story.board), (story.other, Board(story.other, ATTACH))):
        board.show()
        notebook.wait(lambda board=board: "stale: last read" in board.badges(), "the badge", 60)
        assert board.points() == len(story.done)
        assert notebook.errors() == []
        assert notebook.faults() == []


INK = "return root.querySelector('.rlkit-plot').layout.font.color"
FITS = (
    "return [...root.querySelectorAll('.rlkit-plot')].every(p => {"
    " const drawn = p.querySelector('.main-svg'); return drawn && Math.abs(drawn.clientWidth - p.clientWidth) < 2; })"
)


def luminance(color: str) -> float:
    """Of a CSS colour as JupyterLab's themes write it: 0 black, 1 white."""
    numbers = [float(n) for n in re.findall(r"[\d.]+", color)] if color.startswith("rgb") else [int(c, 16) for c in hexes(color)]
    alpha = numbers[3] if len(numbers) > 3 else 1.0
    return sum(numbers[:3]) / 3 / 255 if alpha else 0.0


def hexes(color: str) -> list[str]:
    digits = color.lstrip("#")
    return [d * 2 for d in digits[:3]] if len(digits) < 6 else [digits[i : i + 2] for i in (0, 2, 4)]
