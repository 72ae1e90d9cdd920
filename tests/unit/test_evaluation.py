"""Keys, stored samples, numbers and comparisons of evaluations; no engine."""

import errno
import functools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from rlkit.errors import ConfigError, DataError, RewardError
from rlkit.eval import compare, evaluate, load, register_metric
from rlkit.eval.evaluation import _runs, _settings
from rlkit.eval.metrics import METRICS, _verdict, grade_responses
from rlkit.eval.result import Evaluations, summarize
from rlkit.eval.spec import EvalSpec, cache_key, code_of
from rlkit.eval.store import Store
from rlkit.rewards.extract import RULES
from rlkit.rewards.grading import Verdict
from rlkit.tasks import Tasks
from rlkit.types import Prompt


def row(name, verdict="correct", sample=0, extracted="1", **changes):
    base = {"id": name, "sample": sample, "question": f"q {name}", "answer": "1", "response": "r", "tokens": 4, "finish": "stop"}
    return base | {"verdict": verdict, "extracted": extracted, "rule": "boxed/exact"} | changes


def evaluation(rows, n=1, **changes):
    spent = {"rollout_s": 2.0, "grading_s": 0.5, "tokens": 100}
    given = {"dataset": "d", "split": "test", "model": "m", "key": "k", "config": {"spec": {}}, "spent": spent} | changes
    return summarize(rows, n=n, **given)


# --- settings and keys


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 1.0}, "has no setting 'temprature', did you mean 'temperature'"),
        ({"n": 4}, "1 at temperature 0"),
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "at least 0"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"rules": ("boxd",)}, "no extraction rule 'boxd', did you mean 'boxed'"),
        ({"shots": -1}, "at least 0"),
        ({"limit": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        _settings(settings)


def test_settings_of_evaluation_and_engine_are_told_apart():
    spec, engine = _settings({"n": 2, "temperature": 1.0, "engine": "hf", "seed": 3})
    assert (spec.n, spec.seed, engine) == (2, 3, {"engine": "hf"})


FACTS = {"model": {"fingerprint": "f"}, "data": "d", "engine": {"engine": "vllm", "versions": {"torch": "2"}}, "code": None}


@pytest.mark.parametrize(
    "change",
    [
        {"spec": EvalSpec(seed=1)},
        {"spec": EvalSpec(template="plain")},
        {"spec": EvalSpec(max_tokens=100)},
        {"spec": EvalSpec(limit=5)},
        {"spec": EvalSpec(rules=("boxed",))},
        {"model": {"fingerprint": "g"}},
        {"data": "e"},
        {"engine": {"engine": "hf", "versions": {"torch": "2"}}},
        {"engine": {"engine": "vllm", "versions": {"torch": "3"}}},
        {"code": "def f(): ..."},
    ],
)
def test_each_part_of_the_configuration_changes_the_key(change):
    before = cache_key(EvalSpec(), **FACTS)
    facts = {k: v for k, v in (FACTS | change).items() if k != "spec"}
    assert cache_key(change.get("spec", EvalSpec()), **facts) != before
    assert cache_key(EvalSpec(), **FACTS) == before


def test_the_graders_version_changes_the_key(monkeypatch):
    before = cache_key(EvalSpec(), **FACTS)
    monkeypatch.setattr("rlkit.eval.spec.VERSION", -1)
    assert cache_key(EvalSpec(), **FACTS) != before


def test_a_functions_text_identifies_it():
    assert "is_even" in code_of(is_even)
    made = eval("lambda r, p: 'a' in r")  # one without source
    other = eval("lambda r, p: 'b' in r")
    assert code_of(made) != code_of(other)


# --- stored samples


def test_whole_problems_are_kept_and_half_ones_dropped(tmp_path):
    first = Store(tmp_path / "e", "k", {}, n=2)
    with first.open():
        first.append([row("a"), row("a", sample=1), row("b")], 1.5, 0.25)
    with (tmp_path / "e" / "samples.jsonl").open("a") as out:
        out.write('{"id": "b", "sam')  # the process was killed while writing
    again = Store(tmp_path / "e", "k", {}, n=2)
    with again.open() as done:
        assert list(done) == ["a"]
        assert again.spent == {"rollout_s": 1.5, "grading_s": 0.25, "tokens": 12}
        again.append([row("b"), row("b", sample=1)], 1.0, 0.0)
    with Store(tmp_path / "e", "k", {}, n=2).open() as done:
        assert sorted(done) == ["a", "b"]
    with Store(tmp_path / "e", "k", {}, n=2).open(resume=False) as done:
        assert done == {}
    with Store(tmp_path / "e", "k", {}, n=2).open() as done:
        assert done == {}


def test_another_key_is_never_read(tmp_path):
    with Store(tmp_path / "e", "k", {}, n=1).open():
        pass
    with pytest.raises(DataError, match="holds another evaluation"), Store(tmp_path / "e", "other", {}, n=1).open():
        pass


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with Store(tmp_path / "e", "k", {}, n=1).open():
        pass
    (tmp_path / "e" / "samples.jsonl").write_text('{"id": \n' + json.dumps(row("a")) + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl, line 1: not valid JSON"), Store(tmp_path / "e", "k", {}, n=1).open():
        pass


def test_two_processes_do_not_share_a_folder(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom rlkit.eval.store import Store\n"
        "with Store(Path(sys.argv[1]), 'k', {}, n=1).open():\n    print('open', flush=True)\n    sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path / "e"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "open\n"
    with pytest.raises(DataError, match="Another process is evaluating"), Store(tmp_path / "e", "k", {}, n=1).open():
        pass
    other.communicate()
    with Store(tmp_path / "e", "k", {}, n=1).open() as done:
        assert done == {}


def test_runs_of_places():
    assert list(_runs([3, 4, 5, 9])) == [(3, 6), (9, 10)]
    assert list(_runs([0])) == [(0, 1)]
    assert list(_runs([])) == []


# --- numbers


def test_numbers_by_hand():
    rows = [
        row("a"), row("a", "wrong", 1, "2"), row("a", "correct", 2), row("a", "wrong", 3, "3", finish="length", tokens=8),
        row("b", "unparsed", 0, None), row("b", "timeout", 1, "9^9"), row("b", "wrong", 2, "5"), row("b", "wrong", 3, "5"),
    ]  # fmt: skip
    found = evaluation(rows, n=4)
    assert found.accuracy == 0.25
    assert found.pass_at == {1: 0.25, 2: pytest.approx(0.5 * (1 - 1 / 6)), 4: 0.5}
    assert found.majority == 0.5
    assert (found.unparsed, found.timed_out, found.truncated) == (1 / 8, 1 / 8, 1 / 8)
    assert (found.mean_length, found.median_length, found.max_length) == (4.5, 4, 8)
    assert (found.tokens_per_second, found.seconds, found.n_problems, found.n) == (50, 2.5, 2, 4)
    assert found.metrics["eval/d/accuracy"] == 0.25
    assert list(found.samples["verdict"])[:2] == ["correct", "wrong"]
    for text in (repr(found), found.report(), found._repr_html_()):
        assert "25.0%" in text
    table = Evaluations([found, evaluation([row("x"), row("y")], dataset="e")])
    assert table["e"].accuracy == 1
    assert table.mean == 0.625
    assert "| d | 2 | 4 | 25.0% |" in table.markdown()
    assert "62.5%" in repr(table)


def test_a_problem_that_is_too_long_counts_as_wrong():
    found = evaluation([row("a"), row("b", "unparsed", 0, None, finish="too_long", tokens=0, response="")])
    assert (found.accuracy, found.dropped) == (0.5, 1)
    assert "too long for the context" in found.report()


def test_load_gives_back_what_was_written(tmp_path):
    store = Store(tmp_path / "e", "k", {"spec": {}}, n=1)
    with store.open():
        store.append([row("a"), row("b", "wrong")], 1.0, 0.5)
        with pytest.raises(DataError, match="was stopped before its end"):
            load(tmp_path / "e")
        made = evaluation([row("a"), row("b", "wrong")], folder=tmp_path / "e")
        store.finish(made.summary(), made.report())
    found = load(tmp_path / "e")
    assert (found.summary(), list(found.rows)) == (made.summary(), list(made.rows))
    with pytest.raises(DataError, match="is no evaluation's folder"):
        load(tmp_path)


# --- comparing


def test_compare_lists_what_flipped():
    a = evaluation([row("a"), row("b", "wrong"), row("c", "wrong"), row("d")])
    b = evaluation([row("a"), row("b"), row("c"), row("d", "wrong"), row("x")], model="n")
    found = compare(a, b)
    assert (found.n_problems, found.gained, found.lost) == (4, ("b", "c"), ("d",))
    assert found.difference == 0.25
    assert found.low < 0 < found.high
    assert found.p_value == 1.0
    assert [f["change"] for f in found.flipped()] == ["gained", "gained", "lost"]
    assert "2 gained, 1 lost" in repr(found)
    assert "q b" in found._repr_html_()


def test_what_cannot_be_compared_is_refused():
    a = evaluation([row("a")])
    with pytest.raises(DataError, match="different sets"):
        compare(a, evaluation([row("a")], dataset="other"))
    with pytest.raises(DataError, match="no problem in common"):
        compare(a, evaluation([row("b")]))
    with pytest.raises(DataError, match="another question or answer, the first of them 'a'"):
        compare(a, evaluation([row("a", answer="2")]))


# --- metrics of one's own


def is_even(response, prompt):
    return int(response) % 2 == 0


def prompts(*names, answer="1"):
    return [Prompt(name, ({"role": "user", "content": "?"},), answer) for name in names]


SETTINGS = {"timeout_s": 5.0, "rel_tol": 1e-4}


def test_a_metric_decides_in_place_of_the_grader():
    found = grade_responses(["2", "3"], prompts("a", "b"), RULES, metric=is_even, **SETTINGS)
    assert [v.verdict for v in found] == ["correct", "wrong"]
    full = grade_responses(["2"], prompts("a"), RULES, metric=lambda r, p: Verdict("unparsed", r, "mine"), **SETTINGS)
    assert full == [Verdict("unparsed", "2", "mine")]


def test_a_metric_that_fails_or_hangs():
    with pytest.raises(RewardError, match=r"'is_even' failed on problem 'b'.*invalid literal"):
        grade_responses(["2", "x"], prompts("a", "b"), RULES, metric=is_even, **SETTINGS)
    with pytest.raises(RewardError, match="returned None for problem 'a'"):
        grade_responses(["2"], prompts("a"), RULES, metric=lambda r, p: None, **SETTINGS)

    def hangs(response, prompt):
        while response == "2":
            pass
        return True

    found = grade_responses(["2", "3"], prompts("a", "b"), RULES, metric=hangs, timeout_s=0.5, rel_tol=0)
    assert [v.verdict for v in found] == ["timeout", "correct"]


def test_register_metric(monkeypatch):
    monkeypatch.setattr("rlkit.eval.metrics.METRICS", METRICS.copy())
    register_metric("mine", is_even)
    with pytest.raises(ConfigError, match="must be a function"):
        register_metric("mine", "accuracy")
    METRICS.pop("mine", None)


def test_a_problem_without_an_answer_is_named():
    with pytest.raises(RewardError, match="Problem 'a' has no answer"):
        grade_responses(["2"], prompts("a", answer=None), RULES, **SETTINGS)


# --- what was once wrong


def test_what_a_metric_closes_over_identifies_it():
    def longer(than):
        return lambda response, prompt: len(response) > than

    assert code_of(longer(1)) != code_of(longer(2))
    assert code_of(longer(1)) == code_of(longer(1))
    with pytest.raises(ConfigError, match="cannot be sent to a grading process"):
        code_of(functools.partial(is_even, threading.Lock()))


def test_a_line_cut_inside_of_a_character_is_passed_over(tmp_path):
    with Store(tmp_path / "e", "k", {}, n=1).open():
        pass
    whole = json.dumps(row("a", question="多少"), ensure_ascii=False).encode()
    for cut in (whole[:-1], whole[: whole.index("少".encode()) + 1]):
        (tmp_path / "e" / "samples.jsonl").write_bytes(whole + b"\n" + cut)
        with Store(tmp_path / "e", "k", {}, n=1).open() as done:
            assert list(done) == ["a"]


@pytest.mark.parametrize("line", ["5", "{}", json.dumps(row("a") | {"tokens": None}), json.dumps({"idd": "x"})])
def test_what_is_no_sample_is_named(tmp_path, line):
    with Store(tmp_path / "e", "k", {}, n=1).open():
        pass
    (tmp_path / "e" / "samples.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"line 1: no sample of an evaluation"), Store(tmp_path / "e", "k", {}, n=1).open():
        pass


def test_a_problem_whose_samples_are_numbered_wrongly_is_sampled_again(tmp_path):
    store = Store(tmp_path / "e", "k", {}, n=2)
    with store.open():
        store.append([row("a"), row("a"), row("b"), row("b", sample=1)], 1.0, 0.0)
    with Store(tmp_path / "e", "k", {}, n=2).open() as done:
        assert list(done) == ["b"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Store(tmp_path / "e", "k", {}, n=1).open():
        before = sorted(p.name for p in (tmp_path / "e").iterdir())
        monkeypatch.setattr("os.replace", full)
        with pytest.raises(DataError, match="cannot be written: No space left on device"):
            Store(tmp_path / "e", "k", {}, n=1).finish({}, "")
        assert sorted(p.name for p in (tmp_path / "e").iterdir()) == before


@pytest.mark.parametrize("value", [np.True_, np.bool_(True)])
def test_numpys_truth_is_taken(value):
    assert _verdict(value, "m", prompts("a")[0]).verdict == "correct"


def test_a_verdict_that_is_none_is_refused():
    with pytest.raises(RewardError, match="returned Verdict"):
        _verdict(Verdict("banana", None, "m"), "m", prompts("a")[0])


@pytest.mark.parametrize("data", [None, 5, [5], {"a": 1}])
def test_what_is_no_data_set_is_refused(data):
    with pytest.raises(DataError, match="takes a set's name, a path, a Tasks, or a list of these"):
        evaluate("tiny", data)


def test_wrong_values_are_refused_before_a_sample_is_drawn():
    unanswered = Tasks("mine", "test", [*prompts("a", "b"), *prompts("z", answer=None)])
    with pytest.raises(RewardError, match="Problem 'z' has no answer"):
        evaluate("nowhere", unanswered)
    with pytest.raises(ConfigError, match="A metric must be a function"):
        evaluate("nowhere", unanswered, metric=5)
    with pytest.raises(ConfigError, match="output is empty"):
        evaluate("nowhere", unanswered, output="")
    with pytest.raises(ConfigError, match="the first argument is the data set's name"):
        register_metric(5, is_even)
    for wrong in ({"timeout_s": float("inf")}, {"temperature": float("inf")}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError):
            _settings(wrong)
    with pytest.raises(DataError, match="takes two evaluations of one set"):
        compare(None, evaluation([row("a")]))
    with pytest.raises(DataError, match="takes an evaluation's folder"):
        load(None)


def test_accuracies_of_a_comparison_are_those_of_the_common_problems():
    found = compare(evaluation([row("a"), row("b", "wrong")]), evaluation([row("a")]))
    assert (found.before, found.after, found.difference) == (1.0, 1.0, 0.0)
    assert "100.0% -> 100.0%" in repr(found)
