"""The widget's side in the kernel: what it says to a page, when its thread and its comm are there, and that they go."""

from __future__ import annotations

import threading
import time
import zlib

import numpy as np
import pytest
from ipywidgets.widgets import widget as ipywidget
from logs import Log

from rlkit.widgets import Dashboard, RewardCurves, RolloutBrowser
from rlkit.widgets import view as views
from rlkit.widgets.series import unpack
from rlkit.widgets.view import View


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "sums")


@pytest.fixture
def sent(monkeypatch):
    """What views send: (content, buffers). Their threads' ticks come by hand: `tick`."""
    monkeypatch.setattr(views, "TICK_S", 3600.0)
    out = []
    monkeypatch.setattr(View, "send", lambda self, content, buffers=None: out.append((content, buffers or [])))
    return out


@pytest.fixture(autouse=True)
def closed():
    """No view outlives its test, even one that failed."""
    yield
    for widget in list(ipywidget._instances.values()):
        if isinstance(widget, View):
            widget.panel.close()


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("rlkit-view")]


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def hello(view, page="a", **more):
    view._message(view, {"kind": "hello", "page": page} | more, [])


def tick(panel):
    panel.read()
    panel.open_view()._tick()


def test_state_holds_the_program_and_no_data(log, sent):
    log.steps(1000)
    board = Dashboard(log.folder)
    state = board.open_view().get_state()
    assert "export default" in state["_esm"]
    assert ".rlkit-view" in state["_css"]
    assert [part["kind"] for part in state["spec"]["parts"]] == ["controls", "health", "curves", "machines", "phases", "rollouts"]
    assert len(str(state)) < 100_000
    board.close()


def test_a_hello_is_answered_with_everything_and_plotly_only_if_asked(log, sent):
    log.steps(300)
    log.step(300, reward_mean=None)
    panel = RewardCurves(log.folder)
    hello(panel.open_view())
    ((start, buffers),) = sent
    about = start["tables"]["0 steps"]
    assert (start["kind"], about["n"]) == ("start", 301)
    at = {name: i for i, name in enumerate(about["columns"])}
    assert unpack(buffers[at["step"]], 301, exact=about["exact"][at["step"]]).tolist() == list(range(301))
    rewards = unpack(buffers[at["reward/mean"]], 301)
    assert rewards[:300] == pytest.approx(np.arange(300) / 100, rel=1e-4)
    assert rewards[300] == np.inf
    sent.clear()
    hello(panel.open_view(), page="b", library=True)
    assert [content["kind"] for content, _ in sent] == ["library", "start"]
    assert b"plotly.js v" in zlib.decompress(sent[0][1][0])[:200]
    panel.close()


def test_a_hello_that_is_said_again_is_answered_once(log, sent):
    panel = RewardCurves(log.folder)
    for _ in range(3):
        hello(panel.open_view(), nonce=0.25)
    hello(panel.open_view(), nonce=0.5)
    assert [content["kind"] for content, _ in sent] == ["start", "start"]
    panel.close()


def test_a_tick_carries_the_new_rows_only(log, sent):
    log.steps(3)
    panel = RewardCurves(log.folder)
    hello(panel.open_view())
    sent.clear()
    tick(panel)
    assert sent == []
    log.steps(5, since=3)
    tick(panel)
    ((content, buffers),) = sent
    assert content["kind"] == "tick"
    assert content["tables"]["0 steps"] == {"from": 3, "n": 5}
    rows = np.frombuffer(buffers[0]).reshape(2, -1)
    assert rows[:, 0].tolist() == [3, 4]
    assert rows[:, 2].tolist() == [0.03, 0.04]
    panel.close()


def test_a_new_metric_and_a_rewind_are_told(log, sent):
    log.steps(3)
    panel = RewardCurves(log.folder)
    hello(panel.open_view())
    sent.clear()
    log.step(3, reward_mean=0.1, eval_accuracy=0.5)
    tick(panel)
    assert "eval/accuracy" in sent[-1][0]["tables"]["0 steps"]["columns"]
    log.write({"kind": "rewind", "t": 1050.0, "step": 0})
    tick(panel)
    assert sent[-1][0]["tables"]["0 steps"] == {"from": 1, "n": 1}
    log.step(1, reward_mean=0.2)
    tick(panel)
    assert sent[-1][0]["tables"]["0 steps"] == {"from": 1, "n": 2}
    panel.close()


def test_many_new_rows_go_packed(log, sent):
    panel = RewardCurves(log.folder)
    hello(panel.open_view())
    log.steps(views.PACK_ROWS + 1)
    tick(panel)
    assert [content["kind"] for content, _ in sent] == ["start", "start"]
    panel.close()


def test_facts_are_told_when_they_change(log, sent):
    board = Dashboard(log.folder)
    hello(board.open_view())
    assert sent[-1][0]["facts"]["part 1"]["constant"]["level"] == "none"
    for step in range(3):
        log.step(step, reward_mean=0.0, reward_std=0.0)
    tick(board)
    assert sent[-1][0]["facts"]["part 1"]["constant"] == {"level": "bad", "value": "all 0"}
    log.step(3, reward_mean=0.0, reward_std=0.0)
    tick(board)
    assert "part 1" not in sent[-1][0]["facts"]
    board.close()


def test_questions_are_answered_and_errors_are_answers(log, sent):
    log.steps(2)
    log.samples(0)
    panel = RolloutBrowser(log.folder)
    view = panel.open_view()
    ask = {"kind": "ask", "page": "a", "id": 7, "part": 0, "what": "step"}
    view._message(view, ask | {"step": 0}, [])
    assert sent[-1][0]["kind"] == "reply"
    assert len(sent[-1][0]["groups"]) == 2
    view._message(view, ask | {"step": 1}, [])
    assert "No samples of step 1" in sent[-1][0]["error"]
    view._message(view, ask | {"part": 9}, [])
    assert sent[-1][0] == {"kind": "reply", "id": 7, "error": "There is no part 9."}
    panel.close()


def test_a_page_that_was_opened_later_gets_the_picture_to_save(log, sent):
    panel = RewardCurves(log.folder)
    panel.shown.append(type("Shown", (), {"redraw": lambda self: None})())  # it is in a notebook
    hello(panel.open_view(), page="first")
    panel.redraw()
    assert [content["kind"] for content, _ in sent] == ["start"]
    hello(panel.open_view(), page="later")
    log.steps(2)
    panel.close()
    picture = sent[-1][0]
    assert picture["kind"] == "picture"
    assert panel.mark in picture["data"]["text/html"]
    assert "2 steps" in picture["data"]["text/plain"]


# --- threads and comms -------------------------------------------------------------------------------------------------------------------


def test_fifty_dashboards_opened_and_closed_leave_nothing(log):
    log.steps(20)
    before = set(ipywidget._instances)
    for _ in range(50):
        board = Dashboard(log.folder)
        hello(board.open_view())
        board.close()
    assert threads() == []
    assert set(ipywidget._instances) == before


def test_the_thread_sends_what_is_new_while_a_page_looks(log, monkeypatch):
    monkeypatch.setattr(views, "TICK_S", 0.01)
    sent = []
    monkeypatch.setattr(View, "send", lambda self, content, buffers=None: sent.append(content))
    panel = RewardCurves(log.folder)
    hello(panel.open_view())
    log.steps(3)
    until(lambda: any(c["kind"] == "tick" and "0 steps" in c["tables"] for c in sent))
    panel.close()
    assert threads() == []


def test_after_the_last_bye_the_thread_ends_and_a_new_hello_starts_it(log, monkeypatch):
    monkeypatch.setattr(views, "TICK_S", 0.01)
    monkeypatch.setattr(views, "LEFT_S", 0.05)
    panel = RewardCurves(log.folder)
    view = panel.open_view()
    hello(view, page="a")
    hello(view, page="b")
    view._message(view, {"kind": "bye", "page": "a"}, [])
    time.sleep(0.2)
    assert threads()
    view._message(view, {"kind": "bye", "page": "b"}, [])
    until(lambda: not threads())
    assert view.comm is not None  # a page can come back
    log.steps(2)
    hello(view, page="c")
    assert threads()
    assert not panel.closed
    panel.close()


def test_a_view_that_is_taken_out_of_its_notebook_is_closed(log, monkeypatch):
    monkeypatch.setattr(views, "TICK_S", 0.01)
    monkeypatch.setattr(views, "LEFT_S", 0.05)
    panel = RewardCurves(log.folder)
    view = panel.open_view()
    hello(view)
    view._message(view, {"kind": "bye", "page": "a", "removed": True}, [])
    until(lambda: panel.closed and not threads())
    assert view.comm is None


def test_a_view_that_nobody_shows_stops_reading(log, monkeypatch):
    monkeypatch.setattr(views, "TICK_S", 0.01)
    monkeypatch.setattr(views, "SILENT_S", 0.1)
    monkeypatch.setattr(views, "LEFT_S", 0.05)
    panel = RewardCurves(log.folder)
    view = panel.open_view()
    until(lambda: not threads())
    hello(view)  # a page that is closed without a word
    assert threads()
    until(lambda: not threads())
    assert not panel.closed
    panel.close()


def test_messages_after_the_end_are_nothing(log, sent):
    panel = RewardCurves(log.folder)
    view = panel.open_view()
    panel.close()
    hello(view)
    assert sent == []
    assert threads() == []


def test_plotly_comes_from_the_installed_package():
    assert zlib.decompress(views.plotly_js()).lstrip().startswith(b"/**\n* plotly.js v")
    assert len(views.plotly_js()) < 2_000_000


def test_the_program_asks_no_other_server():
    program = views.program()
    assert "http://" not in program
    assert "https://" not in program
