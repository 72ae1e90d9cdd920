"""A source of a run on disk: cut and damaged lines, rewinds, a run that is started afresh, none at all."""

import json
import math

import pandas as pd
import pytest

from rlkit import watch
from rlkit.errors import RunError
from rlkit.eventlog import SAMPLE_COLUMNS, History, is_event, line_of, read_events
from rlkit.tail import parse, read_whole_lines


def step(number, **metrics):
    return {"kind": "step", "t": 10.0 + number, "step": number, "version": number + 1, "metrics": metrics, "positions": {}}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "sums"
    made.mkdir()
    write(made, {"kind": "open", "t": 1.0, "name": "sums", "seed": 0}, step(0, a=1.0))
    return made


def write(folder, *events, file="events.jsonl", mode="a"):
    with (folder / file).open(mode) as out:
        out.writelines(line_of(e) for e in events)


def test_every_event_comes_once_and_new_ones_later(folder):
    source = watch.source(folder)
    first = source.poll()
    assert [e["kind"] for e in first.events] == ["open", "step"]
    assert first.state.committed == 0
    assert (first.stale, first.state.live, first.state.control) == (None, False, "unknown")  # a folder does not say
    assert not source.poll()
    write(folder, step(1), step(2))
    assert [e["step"] for e in source.poll().events] == [1, 2]
    assert (source.name, source.folder) == ("sums", folder)
    assert watch.source(str(folder)).poll().events[0]["name"] == "sums"
    assert watch.source(source) is source


def test_a_cut_last_line_comes_when_it_is_whole(folder):
    source = watch.source(folder)
    whole = line_of(step(1)).encode()
    with (folder / "events.jsonl").open("ab") as out:
        out.write(whole[:20])
    assert len(source.poll().events) == 2
    assert not source.poll()
    with (folder / "events.jsonl").open("ab") as out:
        out.write(whole[20:])
    assert [e["step"] for e in source.poll().events] == [1]


def test_a_damaged_line_is_left_out_and_said(folder):
    with (folder / "events.jsonl").open("ab") as out:
        out.write(b'{"kind": "st\xff\n[1]\n')
    write(folder, step(1))
    events = watch.source(folder).poll().events
    assert [e["kind"] for e in events] == ["open", "step", "note", "note", "step"]
    assert "A line of events.jsonl is damaged and was left out" in events[2]["text"]


def test_values_that_are_not_finite_are_null(folder):
    write(folder, step(1, a=math.nan, b=math.inf))
    assert watch.source(folder).poll().events[-1]["metrics"] == {"a": None, "b": None}


def test_after_a_rewind_the_later_steps_do_not_count(folder):
    write(folder, step(1), step(2), {"kind": "rewind", "t": 5.0, "step": 0, "why": "x"}, step(1, a=9.0))  # and its time goes backwards
    changes = watch.source(folder).poll()
    assert changes.state.committed == 1
    history = History()
    for event in changes.events:
        history.add(event)
    assert {s: e["metrics"] for s, e in history.steps.items()} == {0: {"a": 1.0}, 1: {"a": 9.0}}


def test_a_run_that_is_started_afresh_in_the_same_folder_begins_with_a_rewind(folder):
    source = watch.source(folder)
    source.poll()
    (folder / "events.jsonl").rename(folder / "old.jsonl")
    write(folder, {"kind": "open", "t": 50.0, "name": "sums", "seed": 1})
    changes = source.poll()
    assert changes.restarted
    assert [e["kind"] for e in changes.events] == ["rewind", "open"]
    assert changes.state.committed == -1
    assert not source.poll().restarted


def test_monitor_samples_are_read_beside(folder):
    sample = {"t": 1.0, "node": "a", "cpu": 5.0, "gpus": []}
    with (folder / "monitor.jsonl").open("w") as out:
        out.write(json.dumps(sample) + "\n" + json.dumps(sample)[:9])
    assert watch.source(folder).poll().monitor == [sample]


def test_samples_of_a_step_or_why_there_are_none(folder):
    (folder / "samples").mkdir()
    row = dict.fromkeys(SAMPLE_COLUMNS, "x") | {"reward": 1.0, "n_tokens": 2, "tokens": [1, 2], "logprobs": [-0.1, -0.2]}
    pd.DataFrame([row]).to_parquet(folder / "samples" / "step-000000.parquet")
    source = watch.source(folder)
    assert list(source.samples(0)["reward"]) == [1.0]
    with pytest.raises(RunError, match=r"No samples of step 7 at .*step-000007"):
        source.samples(7)


def test_a_run_on_disk_has_no_controls(folder):
    with pytest.raises(RunError, match="no loop here to stop"):
        watch.source(folder).control("stop")


def test_a_closed_source_finds_nothing_more(folder):
    source = watch.source(folder)
    source.close()
    write(folder, step(1))
    assert not source.poll()
    assert "closed" in repr(source)


def test_a_run_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match=r"There is no run at .*nowhere: that folder has no events\.jsonl"):
        watch.source(tmp_path / "nowhere")
    with pytest.raises(RunError, match="takes a Run, a Cluster, a run's folder or the name"):
        watch.source(7)
    with pytest.raises(RunError, match="Nor is there one on disk"):
        watch.source("x" * 5000)
    with pytest.raises(RunError, match="There is no run at ~nobody-of-that-name/runs"):
        watch.source("~nobody-of-that-name/runs")
    (tmp_path / "odd" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(RunError, match=r"that folder has no events\.jsonl, or cannot be read"):
        watch.source(tmp_path / "odd")


def test_a_log_that_vanishes_while_it_is_watched(folder):
    source = watch.source(folder)
    source.poll()
    (folder / "events.jsonl").unlink()
    assert not source.poll()


def test_a_long_log_is_read_in_chunks_of_whole_lines(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"12345\n" * 3 + b"1234567890\n" + b"12")
    assert read_whole_lines(path, 0, 7) == b"12345\n"
    assert read_whole_lines(path, 18, 7) == b"1234567890\n"  # longer than what is asked for
    assert read_whole_lines(path, 29, 7) == b""
    assert read_whole_lines(path, 29, 2) == b""
    assert read_whole_lines(tmp_path / "none", 0, 7) == b""
    assert parse(b"", "x", is_event) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "step", "t": 1.0},
        {"kind": "step", "step": 1},
        {"kind": "step", "t": 1.0, "step": 1, "metrics": None},
        {"kind": "step", "t": 1.0, "step": 1, "metrics": {"x": 10**400}},
        {"kind": "step", "t": 1.0, "step": 1, "metrics": {"x": "high"}},
        {"kind": "phase", "t": 1.0},
        {"kind": "phase", "t": 1.0, "phase": "rollout", "seconds": "long"},
        {"kind": "part", "t": 1.0},
        {"kind": "rewind", "t": 1.0},
        {"kind": "note", "t": "now"},
        {"kind": "note", "t": 1e300},
        {"kind": "phase", "t": 1.0, "phase": "rollout", "seconds": 1.0, "t_start": -1e300},
        {"kind": 3},
    ],
)
def test_a_line_that_is_json_but_no_event_is_left_out_and_told(folder, line):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    write(folder, step(1, a=0.5))
    events = watch.source(folder).poll().events
    assert [e["step"] for e in events if e["kind"] == "step"][-1] == 1
    assert any(e["kind"] == "note" and "damaged" in e["text"] for e in events)
    with pytest.raises(RunError, match=r"line \d+ is not an event"):
        read_events(folder / "events.jsonl")


@pytest.mark.parametrize("gpus", [5, [7], [{"roles": 5}], {"a": 1}])
def test_a_monitor_s_line_that_is_none_is_left_out(folder, gpus):
    with (folder / "monitor.jsonl").open("a") as file:
        file.write(json.dumps({"node": "a", "t": 1.0, "gpus": gpus}) + "\n" + json.dumps({"node": "a", "t": 2.0, "gpus": None}) + "\n")
    assert [sample["t"] for sample in watch.source(folder).poll().monitor] == [2.0]


def test_samples_that_cannot_be_read_are_an_error_of_the_run(folder):
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / "step-000000.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(RunError, match="samples of step 0 cannot be read"):
        watch.source(folder).samples(0)


def test_a_log_longer_than_a_chunk_comes_in_one_poll(folder, monkeypatch):
    monkeypatch.setattr("rlkit.feeds.CHUNK", 300)
    write(folder, *(step(i, a=float(i)) for i in range(1, 200)))
    assert [e["step"] for e in watch.source(folder).poll().events[1:]] == list(range(200))
