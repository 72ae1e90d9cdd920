"""The recorder without its cluster: what it keeps of values that are not finite, of a tokenizer, and of a folder that is gone."""

import json
import math
import shutil

import numpy as np
import pytest

from rlkit.errors import RunError
from rlkit.eventlog import EVENTS_FILE
from rlkit.recorder import Recorder


@pytest.fixture
def recorder(tmp_path):
    return Recorder("kept", str(tmp_path / "kept"), seed=0)


def test_values_are_told_as_the_file_has_them(recorder):
    recorder.append(0, [{"kind": "step", "step": 0, "metrics": {"a": math.inf, "b": np.float32("nan"), "c": np.float64(0.5)}}])
    told = recorder.read()[-1]
    assert told["metrics"] == {"a": None, "b": None, "c": 0.5}
    assert json.loads((recorder.folder / EVENTS_FILE).read_text().splitlines()[-1]) == told


def test_a_folder_that_was_deleted_is_said_at_the_next_event(recorder):
    shutil.rmtree(recorder.folder)
    with pytest.raises(RunError, match="was deleted while the run is alive"):
        recorder.append(0, [{"kind": "note", "text": "lost"}])
    with pytest.raises(RunError, match="The samples of step 3 cannot be kept: the folder of run 'kept'"):
        recorder.write_samples(3, [], [])
    with pytest.raises(RunError, match="was deleted"):
        recorder.check_log()  # asked before a checkpoint is written
    assert not recorder.folder.exists()


def test_a_tokenizer_is_kept_where_there_is_one(recorder):
    recorder.keep_tokenizer(b"")
    assert recorder.read_tokenizer() is None
    recorder.keep_tokenizer(b"{}")
    assert recorder.read_tokenizer() == b"{}"
    assert sorted(path.name for path in recorder.folder.iterdir()) == ["events.jsonl", "monitor.jsonl", "tokenizer.json"]
