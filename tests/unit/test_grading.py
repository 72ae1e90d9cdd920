"""The grader against a table written by hand, hostile answers, and where answers stand in a response."""

from __future__ import annotations

import time

import pytest

from rlkit.errors import ConfigError
from rlkit.rewards.extract import extract
from rlkit.rewards.grading import grade, grade_many, shared_pool

SAME = [  # (answer, gold), decided without a worker process
    ("72", "72"), ("1,234", "1234"), ("1{,}234", "1234"), ("12,345,678", "12345678"), ("+5", "5"), ("-5", "-5"), ("−5", "-5"),
    ("5.0", "5"), ("5.", "5"), ("007", "7"), (".5", "0.5"), ("0.50", "0.5"), ("1/2", "0.5"), ("0.5", "1/2"), ("2/4", "1/2"),
    (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\frac12", "1/2"), (r"\frac{3}4", "0.75"), (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"), (r"1\frac{1}{2}", "1.5"), ("1 1/2", "3/2"), ("0.3333", "1/3"), ("0.6667", r"\frac{2}{3}"),
    ("50%", "0.5"), (r"50\%", "50"), (r"50\%", r"50\%"), ("12.5%", "1/8"), ("$18", "18"), (r"\$18.00", "18"), ("18 dollars", "18"),
    ("$18", "18 dollars"), ("€5", "5"), ("5 cm", "5"), (r"5\text{ cm}", "5"), (r"5~\mathrm{cm}", "5"), ("5cm", "5 centimeters"),
    ("12 apples", "12"), (r"90^\circ", "90"), ("90°", "90"), (r"90^{\circ}", "90"), ("90 degrees", "90"), (r"3.2 \text{ m}^2", "3.2"),
    ("1.5e3", "1500"), (r"1.5 \times 10^{3}", "1500"), (r"1.5\cdot10^3", "1500"), ("10^6", "1000000"), (r"2 \times 10^{-3}", "0.002"),
    ("3 million", "3000000"), ("$x=5$", "5"), ("x = 5", "5"), ("5", "x=5"), ("f(x) = 2", "2"), (r"\theta = 30^\circ", "30"),
    ("The area = 12", "12"), ("**42**", "42"), ("$42$", "42"), (r"\(42\)", "42"), ("42.", "42"), ("(42)", "42"), ("{42}", "42"),
    ("A", "A"), ("(A)", "A"), ("a", "A"), ("A.", "A"), ("A) 12 cm", "A"), (r"\text{A}", "A"), (r"\textbf{(A)}", "A"), ("B", "(B)"),
    ("Yes", "yes"), (r"\text{Evelyn}", "Evelyn"), ("evelyn", r"\text{Evelyn}"), ("the east", "east"), ("Monday.", "monday"),
    ("(1,2)", "(1, 2)"), (r"\left(1, 2\right)", "(1,2)"), ("(0.5, 3)", r"(\frac{1}{2}, 3)"), ("[1,2)", "[1, 2)"),
    (r"(-\infty, 3]", r"(-\infty,3]"), ("1 and 2, 3", "1,2,3"), ("10^{500}", "10^{500}"),
    ("1, 2, 3", "3, 2, 1"), ("1 and 2", "2, 1"), (r"\{1,2\}", r"\{2, 1\}"), ("1,2", r"\{1,2\}"), (r"\pm 3", "3, -3"), ("x = 1, 2", "1,2"),
    ("（1，2）", "(1,2)"), ("５".replace("５", "5") + "。", "5"), ("[1, 2, 3]", "[1,2,3]"),
]  # fmt: skip
DIFFERENT = [
    ("71", "72"), ("-5", "5"), ("1234", "12345"), ("1,2", "12"), ("0.5", "0.51"), ("1/2", "1/3"), ("0.33", "1/3"), ("10001", "10000"),
    ("3.14", "3.1416"), ("100000", "100001"), ("50%", "5"), ("0.5%", "0.5001"), ("5 cm", "5 m"), ("5 kg", "5 g"), ("5 million", "5"),
    ("1.5e4", "1500"), ("1e999999999", "5"), ("1e400", "1e401"), (r"\frac{1}{0}", "0"), ("x = 5", "6"), ("x=5", "y=5"), ("B", "A"),
    ("(B)", "A"), ("C. 12", "A"), ("no", "yes"), ("north", "east"), ("yes", "5"), ("hello world", "5"), ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"), ("10^{99999999}", "5"), ("9" * 250, "9" * 251),
    ("(1,2]", "(1,2)"), ("(1,2,3)", "(1,2)"), ("1, 2", "1, 2, 3"), ("1, 1", "1, 2"), (r"\{1,2\}", r"\{1,3\}"), (r"\pm 3", "3"),
    ("(1,2)", "(1,3)"), ("5x", "5"), ("500", "5"), ("0.05", "5"), ("2.0001", "2.1"), ("", "5"),
]  # fmt: skip
SYMBOLIC_SAME = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{8}", r"2\sqrt{2}"), ("2\\pi", r"\pi \cdot 2"), ("x^2+2x+1", "(x+1)^2"),
    ("2^{10}", "1024"), (r"\sqrt{16}", "4"), (r"\frac{x}{2}", "0.5x"), (r"\sin^2 x + \cos^2 x", "1"), ("a+b", "b+a"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"(\sqrt{4}, 3)", "(2, 3)"), (r"2\pm 1", "1, 3"), (r"\left[\frac{\sqrt{4}}{4}, 1\right]", "[0.5, 1]"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty, 1)"), (r"\sqrt[3]{27}", "3"), ("y = 2x + 1", "y=1+2x"),
    (r"\log_2 8", "3"), (r"3\text{i}", "3i"), (r"5!", "120"), (r"\binom{5}{2}", "10"),
]  # fmt: skip
SYMBOLIC_DIFFERENT = [
    (r"\sqrt{2}", r"\sqrt{3}"), ("x^2+1", "x^2+2"), (r"2\pi", r"3\pi"), (r"\frac{\pi}{2}", r"\frac{\pi}{3}"), ("x+y", "x-y"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"(\sqrt{4}, 3)", "(3, 2)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"), (r"__import__('os').system('x')", "5"),
]  # fmt: skip


def box(answer: str) -> str:
    return f"Therefore \\boxed{{{answer}}}."


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_same(answer, gold):
    found = grade(box(answer), gold)
    assert found.verdict == "correct", found
    assert not found.rule.endswith("symbolic")


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different(answer, gold):
    found = grade(box(answer), gold)
    assert found.verdict == ("wrong" if answer else "unparsed"), found


def test_symbolic_table():
    cases = [(c, "correct") for c in SYMBOLIC_SAME] + [(c, "wrong") for c in SYMBOLIC_DIFFERENT]
    found = grade_many([box(a) for (a, _), _ in cases], [g for (_, g), _ in cases], timeout_s=10)
    wrong = [(c, want, v) for (c, want), v in zip(cases, found, strict=True) if v.verdict != want]
    assert not wrong


def test_plain_grading_starts_no_process():
    before = shared_pool().started
    for answer, gold in SAME + DIFFERENT[:20]:
        grade(box(answer), gold)
    assert shared_pool().started == before


EXTRACTED = [
    (r"So \boxed{5}.", "5", "boxed"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", "boxed"), 
    (r"\boxed 7", "7", "boxed"),
    (r"\fbox{9}", "9", "boxed"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"), (r"\boxed{a} and \boxed{b", "a", "boxed"),
    (r"\boxed{\boxed{3}}", "3", "boxed"), (r"\boxed{\text{(A)}}", r"\text{(A)}", "boxed"),
    ("<think>4</think><answer>5</answer>", "5", "answer_tag"), ("<answer>1</answer> no: <answer> 2 </answer>", "2", "answer_tag"),
    ("<answer>cut off 5", "5", "last_number"), ("work\n#### 18", "18", "hash"), ("#### 1\n#### 2\nend 3", "2", "hash"), 
    ("####42", "42", "hash"),
    ("The answer is 12.", "12", "phrase"), ("The final answer is: $x=5$. Done 9", "$x=5$", "phrase"), ("Answer: **B**", "B", "phrase"),
    ("The answer is 3.5 cm. Yes.", "3.5 cm", "phrase"), ("答案是 5。", "5", "phrase"), ("答案：7", "7", "phrase"),
    ("He has 3 + 4 = 7 apples", "7", "last_number"), ("costs $1,234.50 now", "$1,234.50", "last_number"), ("it is -3", "-3", "last_number"),
    ("10-5", "5", "last_number"), ("about 1/2 of it", "1/2", "last_number"), ("50% of x1", "50%", "last_number"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer", "rule"), EXTRACTED)
def test_extract(response, answer, rule):
    assert extract(response) == (answer, rule)


@pytest.mark.parametrize(
    "response", ["", "   ", "no number here", r"\boxed{}", r"\boxed{\frac{}", r"\boxed{}}{{}", "x1 y2z", "####", "<answer></answer>"]
)
def test_nothing_to_extract(response):
    assert extract(response) is None
    assert grade(response, "5") == ("unparsed", None, "not_found")


def test_rules_limit_where_an_answer_may_stand():
    text = "#### 4\nThe answer is 5"
    assert extract(text) == ("4", "hash")
    assert extract(text, ("phrase",)) == ("5", "phrase")
    assert extract(text, ("boxed",)) is None
    assert grade(text, "5", rules=("phrase", "boxed")).verdict == "correct"
    with pytest.raises(ConfigError, match="no extraction rule 'hsh', did you mean 'hash'"):
        grade(text, "5", rules=("hsh",))
    with pytest.raises(ConfigError, match="rules is empty"):
        grade(text, "5", rules=())


def test_tolerance_is_a_setting():
    assert grade(box("0.33"), "1/3").verdict == "wrong"
    assert grade(box("0.33"), "1/3", rel_tol=0.02).verdict == "correct"
    assert grade(box("0.33333"), "1/3", rel_tol=0).verdict == "wrong"


CHEAP_HOSTILE = [
    r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", r"\boxed{" * 50_000, "x" * 1_000_000, "9" * 1_000_000, 
    r"\boxed{" + "9" * 60_000 + "}",
    "1," * 500_000 + "x", "1,111" * 100_000 + "x", "\x00\x01\x1b[31m\boxed{5}\x7f", "}" * 100_000, "answer is " * 50_000, "#" * 200_000,
    "<answer>" * 50_000, r"\boxed{" + "(" * 1500 + "}", "$" * 100_000, r"\boxed{" + " and ".join("x" * 300) + "}", "-" * 100_000,
    r"\boxed{1e999999999}", r"\boxed{10^{99999999}}", r"\boxed{" + "a" * 1900 + "=5}", r"\boxed{" + "cm " * 300 + "}", "\ud800 5",
]  # fmt: skip


@pytest.mark.parametrize("response", CHEAP_HOSTILE, ids=range(len(CHEAP_HOSTILE)))
def test_hostile_text_is_read_in_no_time(response):
    start = time.monotonic()
    extract(response)
    grade(response, "17")
    assert time.monotonic() - start < 3.0


def test_hostile_expressions_cost_one_time_limit_each_and_nothing_else():
    bombs = [r"9^{9^{9^{9}}}", r"\sqrt{" * 30 + "2" + "}" * 30, r"\frac{1}{" * 30 + "2" + "}" * 30]
    fair = [(rf"\sqrt{{{4 * k * k}}}+x", f"{2 * k}+x") for k in range(1, 6)]
    grade(box("x+1"), "1+x")  # processes are warm
    responses = [box(b) for b in bombs] + [box(a) for a, _ in fair]
    found = grade_many(responses, ["5"] * len(bombs) + [g for _, g in fair], timeout_s=2)
    assert found[0].verdict == "timeout"
    assert all(v.verdict in ("wrong", "timeout") for v in found[: len(bombs)])
    assert [v.verdict for v in found[len(bombs) :]] == ["correct"] * len(fair)
