"""What progress says, and where."""

import sys
import types

import pytest

from rlkit import progress
from rlkit.progress import Line, NotebookLine, Progress, as_html, facts_of
from rlkit.reprs import duration


class Kept(Line):
    def __init__(self):
        self.shown, self.last = [], None

    def show(self, text, share):
        self.shown.append((text, share))

    def end(self, text, share, always):
        self.last = text if always or self.shown else None


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(t=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.t))
    return now


@pytest.fixture
def kept(monkeypatch):
    made = Kept()
    monkeypatch.setattr(progress, "line", lambda: made)
    return made


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.834, "0.83 s"),
        (1.26, "1.3 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (120, "2 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_time_left_by_the_pace(clock, kept):
    shown = Progress("rollout", 100, "sample")
    clock.t = 0.5
    shown(10)
    assert kept.shown == []  # what ends within a second shows nothing
    clock.t = 10.0
    shown(20, "5 tokens/s")
    assert kept.shown == [("rollout: 20 of 100 samples, about 40 s left (5 tokens/s)", 0.2)]
    clock.t = 20.0
    shown(20)
    assert kept.shown[-1][0] == "rollout: 20 of 100 samples, about 30 s left (5 tokens/s)"
    clock.t = 50.0
    shown.close()
    assert kept.last == "rollout: 100 of 100 samples in 50 s (5 tokens/s)"


def test_nothing_is_counted_before_there_is_something(clock, kept):
    shown = Progress("update", unit="micro-batch", usual_s=8.0)
    clock.t = 2.0
    shown()
    assert kept.shown == [("update: 2.0 s, about 6.0 s left", None)]
    shown.count((0, 4))
    shown.count((1, 4))
    assert kept.shown[-1] == ("update: 1 of 4 micro-batches, about 6.0 s left", 0.25)
    shown.close(whole=False)
    assert kept.last == "update: 1 of 4 micro-batches stopped after 2.0 s"


def test_what_was_short_leaves_nothing_unless_it_is_to_last(clock, kept):
    Progress("sync").close()
    assert kept.last is None
    Progress("sums", 3, "step", lasting=True, done=3).close()
    assert kept.last == "sums: 3 of 3 steps in 0.00 s"


def test_a_resumed_loop_counts_its_own_pace(clock, kept):
    shown = Progress("sums", 40, "step", done=30, lasting=True)
    clock.t = 4.0
    shown(32)
    assert kept.shown[-1][0] == "sums: 32 of 40 steps, about 16 s left"


def test_phases_are_said_on_the_loop_s_line_and_told_to_the_owner(clock, kept):
    told = []
    loop = Progress("sums", 2, "step")
    owner = types.SimpleNamespace(shown=loop, report=told.append)
    inner = Progress("rollout", 8, "sample", owner=owner)
    clock.t = 4.0
    inner(4)
    assert kept.shown[-1][0] == "sums: 4.0 s; rollout: 4 of 8 samples, about 4.0 s left"
    assert told == [{"done": 4, "total": 8, "unit": "sample", "left_s": 4.0}]
    assert facts_of(told[0]) == "4 of 8 samples, about 4.0 s left"
    inner.close()
    assert kept.shown[-1][0] == "sums: 4.0 s"
    count = len(kept.shown)
    Progress("reward", 8, "sample", show=False, owner=owner)(2)
    assert len(kept.shown) == count


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(clock, capsys):
    line = Line()
    for t in range(0, 40, 5):
        clock.t = float(t)
        line.show(f"at {t}", 0.1)
    line.end("done", None, False)
    assert capsys.readouterr().err == "at 15\nat 30\ndone\n"
    Line().end("short", None, False)
    assert capsys.readouterr().err == ""


def test_a_notebook_gets_one_output_that_changes(clock, monkeypatch):
    seen = []
    handle = types.SimpleNamespace(update=lambda bundle, raw: seen.append(("update", bundle)))

    def display(bundle, raw, display_id):
        seen.append(("display", bundle))
        return handle

    monkeypatch.setattr("IPython.display.display", display)
    line = NotebookLine()
    line.begin("a < b")  # as `run.start` does in the cell's thread, before the loop's has anything to say
    line.show("too soon", 0.5)
    clock.t = 1.0
    line.show("half", 0.5)
    line.end("all", 1.0, False)
    assert [(how, bundle["text/plain"]) for how, bundle in seen] == [("display", "a < b"), ("update", "half"), ("update", "all")]
    assert "a &lt; b" in seen[0][1]["text/html"]
    assert "<progress" not in seen[0][1]["text/html"] + seen[2][1]["text/html"]
    assert "value='0.500'" in as_html("half", 0.5)


def test_where_progress_is_shown(monkeypatch):
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.delenv("RLKIT_WIDGETS", raising=False)
    assert type(progress.line()) is NotebookLine
    monkeypatch.setenv("RLKIT_WIDGETS", "0")  # `rlkit run`: its log gets plain lines
    assert type(progress.line()) is Line
