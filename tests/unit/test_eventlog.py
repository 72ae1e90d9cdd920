"""The event log: what it adds up to, and what a crash leaves."""

import json

import numpy as np
import pytest

from rlkit.errors import ConfigError, RunError
from rlkit.eventlog import History, line_of, read_events, sample_rows
from rlkit.types import Prompt, RolloutShard, ScoreShard


def history(*events):
    out = History()
    for event in events:
        out.add(event)
    return out


def step(n, version, **more):
    return {"kind": "step", "step": n, "version": version, "metrics": {}, "positions": {"tasks": {"at": n}}} | more


def test_a_run_without_steps_has_committed_none():
    assert history({"kind": "open", "seed": 3}).committed == -1


def test_steps_count_up_and_the_last_one_is_the_position():
    h = history({"kind": "begin", "step": 0, "version": 0}, step(0, 1), {"kind": "begin", "step": 1, "version": 1}, step(1, 2))
    assert h.committed == 1
    assert h.begun == {0: 0, 1: 1}
    assert h.steps[1]["positions"] == {"tasks": {"at": 1}}


def test_a_rewind_takes_back_the_steps_after_it():
    h = history(step(0, 1), step(1, 2), step(2, 3), {"kind": "rewind", "step": 0})
    assert h.committed == 0
    h.add(step(1, 2, metrics={"again": 1}))
    assert h.committed == 1
    assert h.steps[1]["metrics"] == {"again": 1}


def test_rewind_to_the_start():
    assert history(step(0, 1), {"kind": "rewind", "step": -1}).committed == -1


def test_lines_round_trip(tmp_path):
    path = tmp_path / "events.jsonl"
    event = {"kind": "step", "step": 1, "metrics": {"a": np.float32(0.5), "bad": float("nan"), "inf": np.float64("inf")}, "t": 1.5}
    path.write_text(line_of(event))
    assert read_events(path) == [{"kind": "step", "step": 1, "metrics": {"a": 0.5, "bad": None, "inf": None}, "t": 1.5}]


def test_a_last_line_that_a_crash_cut_short_is_ignored_and_repaired(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(line_of({"kind": "open", "seed": 0}) + '{"kind": "ste')
    assert [e["kind"] for e in read_events(path)] == ["open"]
    assert path.read_text().endswith('{"kind": "ste')  # reading alone changes nothing
    read_events(path, repair=True)
    assert path.read_text() == line_of({"kind": "open", "seed": 0})


def test_a_damaged_line_that_is_not_even_text_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"open"}\n\xff\xfe\n{"kind":"note"}\n')
    with pytest.raises(RunError, match=r"line 2 is not JSON.*resume=False"):
        read_events(path)
    path.write_bytes('{"kind":"note","text":"a\u2028b"}\n'.encode())  # a line separator of Unicode ends no line of JSON
    assert read_events(path)[0]["text"] == "a\u2028b"


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(line_of({"kind": "open", "seed": 0}) + "garbage\n" + line_of({"kind": "note"}))
    with pytest.raises(RunError, match=r"events.jsonl, line 2"):
        read_events(path)


def test_a_line_that_is_no_event_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"no": "kind"}) + "\n")
    with pytest.raises(RunError, match="line 1 is not an event"):
        read_events(path)


def test_sample_rows_hold_one_sample_each():
    prompt = Prompt("p0", ({"role": "user", "content": "1+1"},), answer="2")
    shard = RolloutShard(
        prompts=(prompt,),
        prompt_tokens=(np.array([1, 2, 3], np.int32),),
        tokens=np.array([7, 8, 9], np.int32),
        lengths=np.array([[1, 2]], np.int32),
        logprobs=np.array([-0.5, -1.0, -2.0], np.float32),
        texts=("2", "3!"),
        finish_reasons=("stop", "length"),
    )
    score = ScoreShard(np.array([[1.0, 0.0]], np.float32), {"math": np.array([[1.0, 0.0]], np.float32)}, ("correct", "wrong"), ("2", "3"))
    first, second = sample_rows(4, shard, score)
    assert (first["step"], first["prompt_id"], first["question"], first["answer"]) == (4, "p0", "1+1", "2")
    assert (first["tokens"], second["tokens"]) == ([7], [8, 9])
    assert (second["logprobs"], second["finish_reason"], second["verdict"]) == ([-1.0, -2.0], "length", "wrong")
    assert (first["reward"], second["reward/math"]) == (1.0, 0.0)


def test_run_names_become_folders_so_they_are_plain():
    from rlkit.checkpoints import check_name

    assert check_name("quick-start_1.2") == "quick-start_1.2"
    for bad in ("", "../x", "a b", "-x", "a/b", "x" * 101, None):
        with pytest.raises(ConfigError, match="run's name"):
            check_name(bad)


def test_checkpoints_are_found_and_pruned_oldest_first(tmp_path):
    from rlkit import checkpoints

    for n in (2, 10, 5):
        checkpoints.path_of(tmp_path, n).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000011.tmp").mkdir()
    assert checkpoints.found(tmp_path) == [2, 5, 10]
    assert checkpoints.prune(tmp_path, 0) == []
    assert checkpoints.prune(tmp_path, 2) == [2]
    assert checkpoints.found(tmp_path) == [5, 10]
    assert (tmp_path / "checkpoints" / ".step-000011.tmp").exists()
