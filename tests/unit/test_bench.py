"""`rlkit grade`: rows in, verdicts out."""

import json

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
