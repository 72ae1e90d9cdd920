"""Task sets load from every kind of place, draw in a seeded order that resumes, and name what is wrong with a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlkit.context import Owner
from rlkit.errors import DataError
from rlkit.formats import FORMATS
from rlkit.tasks import Tasks, load_tasks
from rlkit.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("arithmetic", "arithmetic_easy", "arithmetic_hard", "countdown", "word_problems")
MATHS = Path(os.environ.get("RLKIT_MATHS_DATA") or ROOT.parent / "shared" / "data")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """No test sees what this machine's user has fetched."""
    folder = tmp_path / "home"
    monkeypatch.setenv("RLKIT_HOME", str(folder))
    return folder


def write(file: Path, *rows: dict | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return file


def numbered(n: int, seed: int = 0, name: str = "set") -> Tasks:
    return Tasks(name, "train", [Prompt(str(i), ({"role": "user", "content": f"q{i}"},), str(i)) for i in range(n)], seed=seed)


def ids(prompts) -> list[int]:
    return [int(p.id) for p in prompts]


# --- where sets come from -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_load_and_their_splits_are_disjoint(name):
    train, test = load_tasks(name), load_tasks(name, "test")
    assert (train.name, train.split, test.split) == (name, "train", "test")
    assert train[17].id == f"{name}/train/17"
    assert all(p.question and p.answer and p.template == "auto" for p in train)
    assert not {p.question for p in train} & {p.question for p in test}
    assert train.fingerprint != test.fingerprint


def test_importing_tasks_loads_nothing_heavy():
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "rlkit.eval")
    code = f"import sys, rlkit.tasks; rlkit.tasks.load_tasks('arithmetic'); print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_jsonl_file_with_named_columns(tmp_path):
    file = write(
        tmp_path / "mine.jsonl",
        {"Body": "Ann has 3 pens", "Question": "How many?", "Answer": 3.0, "ID": "a", "kind": "x"},
        "",
        {"Body": "", "Question": "Half of 1?", "Answer": 0.5, "ID": "b", "kind": "y"},
    )
    tasks = load_tasks(file, fields={"question": "Body+Question", "answer": "Answer", "id": "ID"}, template="plain")
    assert [(p.id, p.question, p.answer) for p in tasks] == [
        ("mine/train/a", "Ann has 3 pens. How many?", "3"),
        ("mine/train/b", "Half of 1?", "0.5"),
    ]
    assert tasks[0].meta == {"ID": "a", "kind": "x"}
    assert tasks[0].template == tasks.template == "plain"
    assert load_tasks(file, fields={"question": "Question"})[0].answer is None


def test_a_file_named_after_its_split_takes_its_folders_name(tmp_path):
    file = write(tmp_path / "mine" / "test.jsonl", {"question": "q", "answer": "a"})
    assert load_tasks(file)[0].id == "mine/test/0"
    assert load_tasks(file.parent, "test")[0].id == "mine/test/0"
    assert load_tasks("mine", "test", data_dir=tmp_path)[0].id == "mine/test/0"
    with pytest.raises(DataError, match=r"'mine' .* has no split 'tset', did you mean 'test'"):
        load_tasks(file.parent, "tset")


def test_parquet_gives_what_jsonl_gives(tmp_path):
    rows = [{"question": f"q{i}", "answer": i, "level": i % 3} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", *rows)
    one, two = load_tasks(tmp_path / "rows.parquet"), load_tasks(tmp_path / "rows.jsonl")
    assert list(one) == list(two)
    assert one.fingerprint == two.fingerprint
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        load_tasks(tmp_path / "bad.parquet")


def test_limit_and_level_choose_rows(tmp_path):
    file = write(tmp_path / "rows.jsonl", *({"question": f"q{i}", "answer": "a", "level": i % 3} for i in range(9)))
    assert [p.id for p in load_tasks(file, limit=2)] == ["rows/train/0", "rows/train/1"]
    assert [p.meta["level"] for p in load_tasks(file, level=2)] == [2, 2, 2]
    assert [p.id for p in load_tasks(file, level=range(1, 3), limit=3)] == ["rows/train/1", "rows/train/2", "rows/train/4"]
    with pytest.raises(DataError, match=r"no row of level 7; its levels are \[0, 1, 2\]"):
        load_tasks(file, level=7)
    with pytest.raises(DataError, match="limit is 0"):
        load_tasks(file, limit=0)
    with pytest.raises(DataError, match="no field 'level'"):
        load_tasks("countdown", level=1)


def test_a_hub_id_without_a_network_says_so(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"'openai/gsm8k:main' is no file or folder here.*Couldn't reach"):
        load_tasks("openai/gsm8k:main")


def test_a_hub_set_is_read_in_its_known_format(monkeypatch):
    asked = []

    def load(repo, config, split):
        asked.append((repo, config, split))
        return datasets.Dataset.from_list([{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = load_tasks("openai/gsm8k:main", "test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (prompt.id, prompt.answer) == ("openai/gsm8k:main/test/0", "2")


# --- the public maths sets ----------------------------------------------------------------------------------------------------------

ROWS = {  # rows made up for this test, in each set's format: (row, question, answer)
    "aime24": ({"problem": "P", "answer": "204", "solution": "S", "question": "P", "id": 60}, "P", "204"),
    "amc23": ({"problem": "P", "answer": 27.0, "question": "P", "id": 0}, "P", "27"),
    "asdiv": ({"body": "B.", "question": "Q?", "answer": "9 (red apples)"}, "B. Q?", "9"),
    "college_math": ({"question": "Q", "answer": " $10-4 n$ "}, "Q", "$10-4 n$"),
    "gaokao2023en": ({"question": "Find it.answers: $\\frac{3}{10}$", "answer": ""}, "Find it.", "$\\frac{3}{10}$"),
    "gsm8k": ({"question": "Q", "answer": "a #### b\n#### 70,000"}, "Q", "70,000"),
    "math500": ({"problem": "P", "answer": "p - q", "solution": "S", "level": 2}, "P", "p - q"),
    "math": (
        {"problem": "P", "level": "Level 3", "type": "Algebra", "solution": "\\fbox{1}, so \\boxed{\\frac{1}{2}}."},
        "P",
        "\\frac{1}{2}",
    ),
    "mawps": ({"input": "I", "target": 0.25}, "I", "0.25"),
    "minerva_math": ({"problem": "P", "solution": "\\boxed{1}, no: \\boxed{\\frac{1}{2}} m"}, "P", "\\frac{1}{2}"),
    "olympiadbench": ({"context": None, "question": "Q", "final_answer": ["$2$", "3"]}, "Q", "$2$, 3"),
    "sat_math": ({"question": "Q:", "options": "A) 1 B) 2", "Answer": "B"}, "Q:\nA) 1\nB) 2", "B"),
    "svamp": ({"Body": "B", "Question": "Q?", "Answer": 145.0}, "B. Q?", "145"),
    "tabmwp": (
        {
            "question": "Which is cheaper?",
            "choices": ["pen", "cup"],
            "answer": "pen",
            "unit": None,
            "table_title": "Prices",
            "table": "pen | $1\ncup | $3",
            "ques_type": "multi_choice",
            "ans_type": "extractive_text",
            "solution": "S",
        },
        "Table: Prices\npen | $1\ncup | $3\n\nWhich is cheaper?\nChoose one of:\n- pen\n- cup",
        "pen",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_each_public_set(name, tmp_path):
    row, question, answer = ROWS[name]
    write(tmp_path / name / "test.jsonl", row)
    (prompt,) = load_tasks(name, "test", data_dir=tmp_path)
    assert (prompt.question, prompt.answer) == (question, answer)
    assert "solution" not in prompt.meta


def one(name: str, folder: Path, row: dict, **how) -> Prompt:
    write(folder / name / "test.jsonl", row)
    (prompt,) = load_tasks(name, "test", data_dir=folder, **how)
    return prompt


def test_asdiv_units_leave_other_brackets_alone(tmp_path):
    answers = {"5:45": "5:45", "(1, 2)": "(1, 2)", "14  (seats)": "14", "-(1/3)": "-(1/3)", "50% (of them)": "50%"}
    write(tmp_path / "asdiv" / "test.jsonl", *({"body": "B.", "question": "Q?", "answer": a} for a in answers))
    assert [p.answer for p in load_tasks("asdiv", "test", data_dir=tmp_path)] == list(answers.values())


@pytest.mark.parametrize(
    "written",
    [
        "A) $x<3$ B) set A is (B) at most C) 7. D) 1,000",
        "(A)$x<3$ (B)set A is (B) at most (C)7. (D)1,000",
        "A. $x<3$ B. set A is (B) at most C. 7. D. 1,000",
        ["$x<3$", "set A is (B) at most", "7.", "1,000"],
        ["A) $x<3$", "B) set A is (B) at most", "C) 7.", "D) 1,000"],
    ],
)
def test_options_of_a_multiple_choice(tmp_path, written):
    if isinstance(written, str) and written.startswith("("):
        written = written.replace("is (B) at", "is B) at")  # a mark within an option cannot be told from the mark
    prompt = one("sat_math", tmp_path, {"id": 1, "question": "Q?", "options": written, "Answer": "(C)"})
    assert (prompt.meta["choices"][0], prompt.meta["choices"][2:], prompt.answer) == ("$x<3$", ("7.", "1,000"), "C")
    assert len(prompt.meta["choices"]) == 4
    assert prompt.question.startswith("Q?\nA) $x<3$\nB) set A is")
    assert prompt.question.endswith("at most\nC) 7.\nD) 1,000")


def test_the_math_reward_knows_the_options(tmp_path):
    from rlkit import rewards
    from rlkit.types import Sample

    prompt = one("sat_math", tmp_path, {"question": "Q?", "options": "A) 1,190 B) 1,900 C) 2,900", "Answer": "C"})
    empty = np.zeros(0)
    texts = ["\\boxed{C}", "\\boxed{2,900}", "\\boxed{1,900}", "\\boxed{B}"]
    samples = [Sample(prompt, i, text, empty, empty, "stop") for i, text in enumerate(texts)]
    assert rewards.Math().score([prompt] * 4, samples).verdicts == ("correct", "correct", "wrong", "wrong")


def test_the_hub_s_names_for_sat_math(tmp_path):
    prompt = one("sat_math", tmp_path, {"Question": "Q?", "Possible Answers": "A) 1 B) 2", "Answer": "A"})
    assert (prompt.question, prompt.meta) == ("Q?\nA) 1\nB) 2", {"choices": ("1", "2")})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Q", "options": "1, 2", "Answer": "A"}, r"line 1: the options '1, 2' are not written as"),
        ({"question": "Q", "options": None, "Answer": "A"}, r"line 1: the options \(options\) are empty"),
        ({"question": "Q", "options": "A) 1 B) 2", "Answer": "C"}, r"line 1: the answer \(Answer\) is 'C'; the options are A, B\."),
        ({"question": "", "options": "A) 1 B) 2", "Answer": "A"}, r"line 1: the question \(question\+options\) is empty"),
        ({"question": "Q", "Answer": "A"}, r"line 1: there is no field 'options'"),
    ],
)
def test_a_multiple_choice_that_is_none(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        one("sat_math", tmp_path, row)


def test_tables_with_and_without_title_unit_and_options(tmp_path):
    row = {"question": "How much is it?", "table": "pen | $1", "answer": "1,000.50", "choices": None, "unit": "$", "table_title": None}
    prompt = one("tabmwp", tmp_path, row | {"ans_type": "decimal_number", "row_num": 1})
    assert (prompt.question, prompt.answer) == ("Table:\npen | $1\n\nHow much is it? (unit: $)", "1,000.50")
    assert prompt.meta == {"unit": "$", "ans_type": "decimal_number"}
    assert one("tabmwp", tmp_path, row | {"choices": ["yes", "no"], "answer": "no"}).meta["choices"] == ("yes", "no")
    assert one("tabmwp", tmp_path, {"question": "Q?", "table": "T", "answer": 3}).question == "Table:\nT\n\nQ?"
    with pytest.raises(DataError, match="line 1: the table is empty"):
        one("tabmwp", tmp_path, row | {"table": " "})


def test_solutions_are_kept_when_asked_for(tmp_path):
    row = {"question": "Q", "answer": "1 + 1 = <<1+1=2>>2, and 2 < 3\n#### 2"}
    assert one("gsm8k", tmp_path, row, solutions=True).meta == {"solution": "1 + 1 = 2, and 2 < 3\n#### 2"}
    assert one("gsm8k", tmp_path, row).meta == {}
    for name in ("math", "math500", "minerva_math"):
        meta = one(name, tmp_path, {"problem": "P", "solution": "It is \\boxed{4}.", "answer": "4"}, solutions=True).meta
        assert meta["solution"] == "It is \\boxed{4}."
    assert "solution" not in one("mawps", tmp_path, {"input": "I", "target": 1}, solutions=True).meta
    file = write(tmp_path / "mine.jsonl", {"question": "Q", "why": "W"})
    fields = {"question": "question", "solution": "why"}
    assert load_tasks(file, fields=fields, solutions=True)[0].meta == {"solution": "W"}
    assert load_tasks(file, fields=fields)[0].meta == {}
    with pytest.raises(DataError, match="no field 'because'"):
        load_tasks(file, fields=fields | {"solution": "because"}, solutions=True)


def test_math_levels_count_as_numbers(tmp_path):
    rows = [{"problem": f"P{i}", "solution": f"\\boxed{{{i}}}", "level": f"Level {i}", "type": "Algebra"} for i in range(1, 6)]
    write(tmp_path / "math" / "train.jsonl", *rows, rows[0] | {"level": "Level ?"})
    tasks = load_tasks("math", data_dir=tmp_path, level=range(3, 6))
    assert [(p.answer, p.meta["level"]) for p in tasks] == [("3", "Level 3"), ("4", "Level 4"), ("5", "Level 5")]
    assert len(load_tasks("math", data_dir=tmp_path, level="Level ?")) == 1


def test_where_a_set_is_looked_for(tmp_path, home):
    write(home / "data" / "gsm8k" / "test.jsonl", {"question": "in the cache", "answer": "#### 1"})
    write(home / "data" / "arithmetic" / "test.jsonl", {"question": "in the cache", "answer": "1"})
    write(home / "data" / "arithmetic" / "extra.jsonl", {"question": "only in the cache", "answer": "1"})
    write(tmp_path / "mine" / "gsm8k" / "train.jsonl", {"question": "mine", "answer": "#### 2"})
    assert load_tasks("gsm8k", "test")[0].question == "in the cache"
    assert load_tasks("gsm8k", data_dir=tmp_path / "mine")[0].question == "mine"
    assert load_tasks("gsm8k", "test", data_dir=tmp_path / "mine")[0].question == "in the cache"
    assert load_tasks("arithmetic", "test")[0].question != "in the cache"
    assert load_tasks("arithmetic", "extra")[0].question == "only in the cache"
    with pytest.raises(
        DataError, match=r"'gsm8k' in .* has no split 'train': it has test\. Fetch it \(rlkit data get gsm8k --split train\)"
    ):
        load_tasks("gsm8k")
    with pytest.raises(
        DataError, match=r"No copy of its split 'test' on the Hugging Face hub is known: put its rows at DIR/mawps/test\.jsonl"
    ):
        load_tasks("mawps", "test")


if MATHS.is_dir():

    def test_all_rows_of_the_public_sets_load():
        sets = {name: load_tasks(name, "test", data_dir=MATHS) for name in FORMATS if (MATHS / name).is_dir()}
        assert len(sets) == 12
        assert sum(map(len, sets.values())) == 11_351
        for tasks in sets.values():
            assert all(p.question.strip() and p.answer and p.answer.strip() for p in tasks)
        assert not [p for p in sets["gsm8k"] if not p.answer.lstrip("-").replace(",", "").replace(".", "").isdigit()]
        assert not [p for p in sets["minerva_math"] if "boxed" in p.answer]
        assert {len(p.meta["choices"]) for p in sets["sat_math"]} == {4}
        assert {p.answer for p in sets["sat_math"]} == set("ABCD")

    def test_the_solutions_of_the_public_sets():
        for name in ("gsm8k", "math500", "minerva_math"):
            for p in load_tasks(name, "test", data_dir=MATHS, solutions=True):
                assert p.meta["solution"]
                assert "<<" not in p.meta["solution"] or name != "gsm8k"


# --- what is refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "q"', r"rows\.jsonl, line 2: not valid JSON"),
        ("[1]", r"rows\.jsonl, line 2: a JSON list where an object"),
        ({"qestion": "q", "answer": "a"}, r"line 2: there is no field 'question', did you mean 'qestion'.*The row has qestion, answer"),
        ({"question": "q"}, r"line 2: there is no field 'answer'"),
        ({"question": "  ", "answer": "a"}, r"line 2: the question \(question\) is empty"),
        ({"question": "q", "answer": None}, r"line 2: the answer \(answer\) is empty"),
        ('{"question": "q", "answer": NaN}', r"line 2: the answer \(answer\) is empty"),
        ({"question": "q", "answer": {"a": 1}}, r"line 2: the field 'answer' holds a dict"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, message):
    with pytest.raises(DataError, match=message):
        load_tasks(write(tmp_path / "rows.jsonl", {"question": "q", "answer": "a"}, bad))


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "\xff", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"line 1: not valid JSON: 'utf-8' codec"):
        load_tasks(tmp_path / "rows.jsonl")


def test_empty_and_doubled(tmp_path):
    with pytest.raises(DataError, match="rows/train is empty"):
        load_tasks(write(tmp_path / "rows.jsonl"))
    row = {"question": "q", "answer": "a", "key": 1}
    with pytest.raises(DataError, match="2 ids more than once, the first of them 'rows/train/1'"):
        load_tasks(write(tmp_path / "rows.jsonl", row, row, row), fields={"question": "question", "id": "key"})


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(DataError, match=r"no task set 'arithmetics', did you mean 'arithmetic'\?"):
        load_tasks("arithmetics")
    with pytest.raises(DataError, match=r"'gsm8k' is not shipped .*data_dir=DIR"):
        load_tasks("gsm8k")
    with pytest.raises(DataError, match=r"no file .*absent\.jsonl"):
        load_tasks(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="neither JSONL nor Parquet"):
        load_tasks(write(tmp_path / "rows.csv", "a,b"))
    with pytest.raises(DataError, match="is no folder"):
        load_tasks("arithmetic", data_dir=tmp_path / "absent")
    with pytest.raises(DataError, match="'chta', did you mean 'chat'"):
        load_tasks("arithmetic", template="chta")
    with pytest.raises(DataError, match="no key 'anwser', did you mean 'answer'"):
        load_tasks("arithmetic", fields={"question": "q", "anwser": "a"})
    with pytest.raises(DataError, match="must name the question"):
        load_tasks("arithmetic", fields={"answer": "a"})


# --- order --------------------------------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_prompt_once_and_no_batch_has_one_twice():
    tasks = numbered(10)
    drawn = [ids(tasks.batch(4)) for _ in range(25)]  # ten epochs
    assert all(len(set(batch)) == 4 for batch in drawn)
    flat = [i for batch in drawn for i in batch]
    epochs = [flat[k : k + 10] for k in range(0, 100, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_a_batch_of_nearly_all():
    tasks = numbered(5)
    for _ in range(20):
        assert len(set(ids(tasks.batch(4)))) == 4
    assert sorted(ids(tasks.batch(5))) == list(range(5))


def test_the_order_follows_the_seed():
    assert ids(numbered(50, seed=1).batch(50)) == ids(numbered(50, seed=1).batch(50))
    assert ids(numbered(50, seed=1).batch(50)) != ids(numbered(50, seed=2).batch(50))


def test_a_position_is_restored_at_any_point():
    tasks = numbered(7)
    for _ in range(12):
        saved = json.loads(json.dumps(tasks.state()))
        expected = [ids(tasks.batch(3)) for _ in range(4)]
        again = numbered(7)
        again.load_state(saved)
        assert [ids(again.batch(3)) for _ in range(4)] == expected
        tasks.load_state(saved)
        tasks.batch(3)


def test_a_position_of_another_set_is_refused():
    tasks = numbered(7)
    with pytest.raises(DataError, match="belongs to another task set: its fingerprint"):
        tasks.load_state(numbered(8).state())
    with pytest.raises(DataError, match="its seed is 1"):
        tasks.load_state(numbered(7, seed=1).state())
    with pytest.raises(DataError, match="no position"):
        tasks.load_state({"epoch": 0})


def test_a_run_hears_of_the_set_before_the_first_draw():
    class Resumed(Owner):
        heard: list = []  # noqa: RUF012

        def register_stateful(self, key, thing):
            self.heard.append((key, thing.state()))
            thing.load_state(saved)

    before = numbered(9, name="heard")
    before.batch(4)
    saved = before.state()
    owner = Resumed("tasks-test")
    tasks = numbered(9, name="heard")
    owner.step = 0
    try:
        drawn = ids(tasks.batch(2))
    finally:
        owner.step = None
    assert [key for key, _ in owner.heard] == ["tasks/heard/train"]
    assert owner.heard[0][1]["at"] == 0
    assert drawn == ids(before.batch(2))
    tasks.batch(2)  # outside a step: nobody to tell
    assert len(owner.heard) == 1


def test_take_and_index_move_nothing():
    tasks = numbered(6)
    assert ids(tasks.take(2)) == [0, 1]
    assert ids(tasks.take(2, start=4)) == [4, 5]
    assert (tasks[-1].id, ids(tasks[1:3]), len(tasks), ids(tasks)) == ("5", [1, 2], 6, list(range(6)))
    assert tasks.state() == numbered(6).state()
    for n, start in ((7, 0), (2, 5), (0, 0), (1, -1)):
        with pytest.raises(DataError, match="set/train has 6"):
            tasks.take(n, start)
    for n in (0, 7):
        with pytest.raises(DataError, match="from 1 to 6 prompts"):
            tasks.batch(n)


def test_reprs_show_the_set_and_escape_it():
    tasks = Tasks("set", "test", [Prompt(str(i), ({"role": "user", "content": "1 < 2?"},), "yes", meta={"level": 3}) for i in range(8)])
    assert repr(tasks) == "Tasks(set/test, 8 prompts, template 'auto', seed 0, epoch 0)"
    page = tasks._repr_html_()
    assert "1 &lt; 2?" in page
    assert "level" in page
    assert "3 more" in page
