"""`rlkit grade`: rows in, verdicts out."""

import json
import subprocess
import sys

import pytest

from rlkit.cli import main


def grade(tmp_path, capsys, *rows, args=()):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    status = main(["grade", str(path), *args])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_verdicts_and_disagreements(tmp_path, capsys):
    status, found, err = grade(
        tmp_path,
        capsys,
        {"answer": "72", "response": "so \\boxed{72}", "expected": True},
        {"answer": "6 + 12 = 18 #### 18", "response": "the answer is 18", "dataset": "gsm8k", "id": "a", "expected": "wrong"},
        {"answer": "18", "response": "#### 18", "dataset": "gsm8k"},
        {"answer": 5, "response": "no idea", "expected": "unparsed"},
    )
    assert status == 0
    assert found == [
        {"id": 1, "verdict": "correct", "extracted": "72", "rule": "boxed/exact"},
        {"id": "a", "verdict": "correct", "extracted": "18", "rule": "phrase/exact"},
        {"id": 3, "verdict": "correct", "extracted": "18", "rule": "hash/exact"},
        {"id": 4, "verdict": "unparsed", "extracted": None, "rule": "not_found"},
    ]
    assert "4 rows: correct 3 (75.0%), wrong 0 (0.0%), unparsed 1 (25.0%)" in err
    assert "1 of 3 rows with an expectation disagree\n  a: expected wrong, graded correct by phrase/exact" in err


def test_output_and_rules(tmp_path, capsys):
    out = tmp_path / "verdicts.jsonl"
    rows = [{"answer": "72", "response": "it is 72"}]
    status, found, err = grade(tmp_path, capsys, *rows, args=("-o", str(out), "--rules", "boxed"))
    assert (status, found) == (0, [])
    assert json.loads(out.read_text())["verdict"] == "unparsed"
    assert "unparsed 1 (100.0%)" in err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "rows.jsonl, line 2: not valid JSON"),
        ({"response": "1"}, "rows.jsonl, line 2: 'answer' must be a text"),
        ({"answer": "1", "respnse": "1"}, "line 2: 'response' must be a text, did you mean 'respnse'"),
        ({"answer": "1", "response": "1", "dataset": "gsm9k"}, "there is no dataset 'gsm9k', did you mean 'gsm8k'"),
        ({"answer": "1", "response": "1", "expected": "right"}, "'expected' is 'right'; it must be true, false or one of correct"),
        ({"answer": "1", "response": "1", "choices": "abc"}, "'choices' must be a list of texts"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, capsys, row, message):
    status, _, err = grade(tmp_path, capsys, {"answer": "1", "response": "1"}, row)
    assert status == 2
    assert message in err


def test_wrong_calls(tmp_path, capsys):
    assert main(["grade", str(tmp_path / "none.jsonl")]) == 2
    assert grade(tmp_path, capsys)[0] == 2
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"answer": "1", "response": "1"}\n')
    assert main(["grade", str(rows), "-o", str(rows)]) == 2
    assert rows.read_text() == '{"answer": "1", "response": "1"}\n'
    assert main(["grade", str(rows), "--rules", "boxes"]) == 2


@pytest.mark.parametrize(
    "args", [("--rel_tol", "5"), ("--rel_tol", "nan"), ("--timeout_s", "0"), ("--timeout_s", "inf"), ("--rel_tol", "-1")]
)
def test_settings_that_would_grade_wrongly_are_refused(tmp_path, capsys, args):
    status, found, err = grade(tmp_path, capsys, {"answer": "5", "response": "\\boxed{7.3}"}, args=args)
    assert (status, found) == (2, [])
    assert "it must be" in err


@pytest.mark.parametrize("dataset", [[], {"a": 1}, 5])
def test_a_dataset_that_is_no_name_is_refused(tmp_path, capsys, dataset):
    assert grade(tmp_path, capsys, {"answer": "5", "response": "5", "dataset": dataset})[0] == 2


def test_rows_that_json_cannot_hold_or_utf8_cannot_write(tmp_path, capsys):
    assert grade(tmp_path, capsys, '{"answer": "5", "response": "5", "x": ' + "[" * 100000)[0] == 2
    out = tmp_path / "out.jsonl"
    assert grade(tmp_path, capsys, '{"answer": "1", "response": "\\\\boxed{\\ud800}", "id": "\\udfff"}', args=("-o", str(out)))[0] == 0
    assert json.loads(out.read_text()) == {
        "id": "\udfff",
        "verdict": "wrong",
        "extracted": "\ud800",
        "rule": json.loads(out.read_text())["rule"],
    }


def test_where_verdicts_cannot_be_written(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"answer": "1", "response": "1"}\n' * 20000)
    for output in (tmp_path / "missing" / "o.jsonl", tmp_path, "/dev/full"):
        done = subprocess.run([sys.executable, "-m", "rlkit.cli", "grade", rows, "-o", output], capture_output=True, text=True, check=False)
        assert (done.returncode, "cannot be written" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    piped = f"{sys.executable} -m rlkit.cli grade {rows} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
