"""The generated sets: made again byte for byte, splits apart, every answer right by another way of working it out."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "eval" / "data"
NAMES = ("arithmetic", "arithmetic_easy", "arithmetic_hard", "countdown", "word_problems")


@pytest.fixture
def make_data(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_data

    yield make_data
    sys.modules.pop("make_data")


def rows(name, split):
    return [json.loads(line) for line in (DATA / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def problem(name, row):
    """What makes two rows the same problem, read off the question."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", row["question"]))
    if name == "countdown":
        return tuple(sorted(numbers[:-1])), numbers[-1]
    if name == "word_problems":
        return re.sub(
            r"\d+|[A-Z]\w+|\b(apples|books|buttons|cards|coins|marbles|pencils|shells|stamps|stickers)\b", "_", row["question"]
        ), numbers
    return (tuple(sorted(numbers[:2])), numbers[2:], re.sub(r"\d+", "n", row["question"]))


def test_the_script_makes_the_shipped_files_again(make_data, tmp_path):
    make_data.write(tmp_path)
    made = {str(f.relative_to(tmp_path)): f.read_bytes() for f in sorted(tmp_path.rglob("*.jsonl"))}
    assert sorted(made) == sorted(f"{name}/{split}.jsonl" for name in NAMES for split in ("test", "train"))
    for file, text in made.items():
        assert text == (DATA / file).read_bytes(), file


@pytest.mark.parametrize("name", NAMES)
def test_no_problem_is_there_twice(name):
    train, test = rows(name, "train"), rows(name, "test")
    assert (len(train), len(test)) == (2000, 256)
    found = Counter(problem(name, row) for row in train + test)
    assert max(found.values()) == 1
    assert len({row["id"] for row in train + test}) == 2256


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_easy", "arithmetic_hard"])
def test_arithmetic_answers(name):
    levels = {"arithmetic": {4}, "arithmetic_easy": {1, 2, 3}, "arithmetic_hard": {5, 6, 7}}[name]
    for split in ("train", "test"):
        assert {row["level"] for row in rows(name, split)} == levels
        for row in rows(name, split):
            expression = re.fullmatch(r"What is ([\d+\-*() ]+)\?", row["question"])[1]
            assert int(row["answer"]) == eval(expression)  # only digits and operators, as just matched


def test_arithmetic_is_three_digit_sums():
    for row in rows("arithmetic", "test"):
        assert re.fullmatch(r"What is [1-9]\d\d \+ [1-9]\d\d\?", row["question"])


def test_countdown_solutions():
    for row in rows("countdown", "train") + rows("countdown", "test"):
        assert re.fullmatch(r"[\d+\-*/() ]+", row["solution"])
        assert eval(row["solution"]) == row["target"] == int(row["answer"])
        assert sorted(int(n) for n in re.findall(r"\d+", row["solution"])) == sorted(row["numbers"])
        assert all(re.search(rf"\b{n}\b", row["question"]) for n in (*row["numbers"], row["target"]))


SOLVED = {  # a phrase of the story -> its numbers, in the order they are told -> the answer
    r"gives \w+ \d+ more": lambda a, b: a + b,
    r"gave \d+ of them": lambda a, b: a - b,
    r"in each \w+\. ": lambda a, b: a * b,
    r"equally among": lambda a, b: a // b,
    r"buys \d+ packs": lambda a, packs, each: a + packs * each,
    r"cents are left": lambda a, things, price: a - things * price,
    r"times as many": lambda a, times: a * (times + 1),
    r"get off": lambda a, off, on: a - off + on,
    r"fence": lambda a, b: 2 * a + 2 * b,
    r"pages on Monday": lambda a, b, days: a + b * days,
}


def test_word_problem_answers():
    used = Counter()
    for row in rows("word_problems", "train") + rows("word_problems", "test"):
        (phrase,) = [p for p in SOLVED if re.search(p, row["question"])]
        used[phrase] += 1
        assert SOLVED[phrase](*(int(n) for n in re.findall(r"\d+", row["question"]))) == int(row["answer"]) >= 0, row
    assert set(used) == set(SOLVED)
