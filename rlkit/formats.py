"""From a row of a data set to a question and an answer: which columns hold them, and how the answer is written there.

`SETS` knows the public maths sets by name; any other file says its columns with ``fields``.

To add a set, add one entry to `SETS`: its name, a `Format` that says which columns hold what, where it comes from, and its place on the
Hugging Face hub when there is one. Copies of a set with other column names are further formats, tried in turn (``otherwise``). Then
``rlkit data get NAME`` fetches it, ``rlkit data list`` shows it, and `rlkit.load_tasks` and the evaluation know its name. Add a row that
you write yourself to ``ROWS`` in ``tests/unit/test_tasks.py``: a test asks for one of each set.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.errors import DataError, nearest

KEYS = ("question", "answer", "id", "solution")  # what ``fields`` may name


Ask = Callable[[Mapping[str, Any], Sequence[str]], tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Format:
    """``question`` may join columns: ``"Body+Question"``. Without ``answer`` the prompts have none.

    ``ask`` makes the question, and the options of a multiple choice, of a row and the question's columns; without it, the columns are
    joined. The options become ``Prompt.meta["choices"]``. ``lettered`` says that the answer is the letter of an option.
    ``read`` takes question and answer as written and gives them as they should be. ``keep`` names the columns that become ``Prompt.meta``;
    None: all that are neither question nor answer. ``solution`` is the column with a worked solution, which is read only when asked for,
    and ``tidy`` what is done to its text. ``otherwise`` is the format of rows that lack a column of this one.
    """

    question: str = "question"
    answer: str | None = "answer"
    id: str | None = None
    read: Callable[[str, str], tuple[str, str]] | None = None
    keep: tuple[str, ...] | None = None
    ask: Ask | None = None
    lettered: bool = False
    solution: str | None = None
    tidy: Callable[[str], str] | None = None
    otherwise: Format | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that a row must have."""
        return (*self.question.split("+"), *((self.answer,) if self.answer else ()), *((self.id,) if self.id else ()))

    def fitting(self, row: Mapping[str, Any]) -> Format:
        """This format or the first of its alternatives whose columns the row has; this one when none fits."""
        form: Format | None = self
        while form is not None:
            if all(column in row for column in form.columns):
                return form
            form = form.otherwise
        return self


@dataclass(frozen=True)
class Hub:
    """A copy of a set on the Hugging Face hub.

    ``splits`` maps a split here to those of the hub that make it up, in order; a split that is not named has no copy. ``skip`` picks the
    rows that the usual evaluation leaves out.
    """

    id: str
    config: str | None = None
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",), "test": ("test",)})
    skip: Callable[[Mapping[str, Any]], bool] | None = None

    def __str__(self) -> str:
        return f"{self.id}:{self.config}" if self.config else self.id


@dataclass(frozen=True)
class PublicSet:
    """A public set: the format of its rows, where it was published (its licence is there too), its copy on the hub if one is known."""

    form: Format
    homepage: str
    hub: Hub | None = None


@dataclass(frozen=True)
class Item:
    """One row, read. ``id`` is None when the format names no column for it."""

    question: str
    answer: str | None
    id: str | None
    meta: dict[str, Any]


def from_fields(fields: Mapping[str, str]) -> Format:
    """The format that a caller's ``fields`` describe.

    Raises:
        DataError: a key is unknown, or there is no question.
    """
    for key, column in fields.items():
        if key not in KEYS:
            raise DataError(f"fields has no key {key!r}{nearest(str(key), KEYS) or '.'} Known: {', '.join(KEYS)}.")
        if not isinstance(column, str) or not all(column.split("+")):
            raise DataError(f"fields[{key!r}] must be a column's name (a question may join some: 'Body+Question'), not {column!r}.")
    if "question" not in fields:
        raise DataError("fields must name the question's column: fields={'question': ..., 'answer': ...}.")
    return Format(fields["question"], fields.get("answer"), fields.get("id"), solution=fields.get("solution"))


def read_row(row: Mapping[str, Any], form: Format, where: str, *, solutions: bool = False) -> Item:
    """Question and answer of one row.

    Args:
        where: file and line, for messages.
        solutions: keep the worked solution as ``meta["solution"]``, when the set has one.

    Raises:
        DataError: a column is missing, the question or the answer is empty, or a multiple choice has no such option.
    """
    form = form.fitting(row)
    needed = (*form.columns, *((form.solution,) if form.solution and solutions else ()))
    for column in needed:
        if column not in row:
            raise DataError(
                f"{where}: there is no field {column!r}{nearest(column, row) or '.'} The row has {', '.join(row)}; say which holds what "
                f"with fields={{'question': ..., 'answer': ...}} (leave out 'answer' when there is none)."
            )
    question, choices = _question(row, form, where)
    answer = _text(row[form.answer], form.answer, where) if form.answer else None
    if form.read is not None and answer is not None:
        question, answer = form.read(question, answer)
    if not question:
        raise DataError(f"{where}: the question ({form.question}) is empty.")
    if answer == "":
        raise DataError(f"{where}: the answer ({form.answer}) is empty, or not written as this set writes its answers.")
    if form.lettered and answer not in _LETTERS[: len(choices)]:
        raise DataError(f"{where}: the answer ({form.answer}) is {answer!r}; the options are {', '.join(_LETTERS[: len(choices)])}.")
    used = {*form.columns, form.solution} - {form.id}
    meta = {k: v for k, v in row.items() if (k not in used if form.keep is None else k in form.keep)}
    if choices:
        meta["choices"] = choices
    if solutions and form.solution:
        text = _text(row[form.solution], form.solution, where)
        meta["solution"] = text if form.tidy is None else form.tidy(text)
    return Item(question, answer, _text(row[form.id], form.id, where) if form.id else None, meta)


def _question(row: Mapping[str, Any], form: Format, where: str) -> tuple[str, tuple[str, ...]]:
    columns = form.question.split("+")
    if form.ask is None:
        return _join([_text(row[column], column, where) for column in columns]), ()
    try:
        return form.ask(row, columns)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _text(value: Any, column: str, where: str) -> str:
    """Numbers without a needless ``.0``; several values joined with commas; a missing value is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, str | int):
        return str(value).strip()
    if isinstance(value, list | tuple):
        return ", ".join(_text(v, column, where) for v in value)
    raise DataError(f"{where}: the field {column!r} holds a {type(value).__name__}; it should be text, a number or a list of them.")


def _join(parts: list[str]) -> str:
    """Parts of a question with a space between; one that ends with a letter or digit gets a full stop."""
    parts = [p for p in parts if p]
    return " ".join(p + "." if p[-1].isalnum() and p is not parts[-1] else p for p in parts)


def _after_hashes(question: str, answer: str) -> tuple[str, str]:
    return question, answer.rpartition("####")[2].strip() if "####" in answer else ""


def _without_marks(solution: str) -> str:
    """Without the calculator's marks: ``2 + 3 = <<2+3=5>>5`` is ``2 + 3 = 5``."""
    return re.sub(r"<<[^<>]*>>", "", solution)


def _without_unit(question: str, answer: str) -> tuple[str, str]:
    """``9 (apples)`` is 9; the brackets of ``-(1/3)`` and ``(1, 2)`` belong to the answer."""
    return question, re.sub(r"(?<=[\w.%])\s*\([^()]*\)$", "", answer)


def _several_answers(row: Mapping[str, Any]) -> bool:
    return ";" in str(row.get("answer"))


def _last_box(question: str, solution: str) -> tuple[str, str]:
    from rlkit.rewards.extract import boxed

    return question, boxed(solution) or ""


def _gaokao(question: str, answer: str) -> tuple[str, str]:
    """A few rows have the answer at the end of the question instead, or the word "solution:" after it."""
    if not answer:
        split = re.fullmatch(r"(.*?)\s*answers?:\s*(.*?)", question, re.IGNORECASE | re.DOTALL)
        question, answer = (split[1], split[2]) if split else (question, "")
    return question, answer.removesuffix("solution:").strip()


# --- multiple choice ---------------------------------------------------------------------------------------------------------------------

_LETTERS = tuple(string.ascii_uppercase)
_MARKS = {"(": ("\\(", "\\)\\s*"), ")": ("", "\\)\\s*"), ".": ("", "\\.\\s+")}  # before and after the letter: (A) x, A) x, A. x


def options(value: Any) -> tuple[str, ...]:
    """The options of a multiple choice, from a list of them or from a text such as ``A) 1 B) 2``; none when there is nothing.

    Raises:
        DataError: the text does not have at least two options, or one of them is empty.
    """
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return ()
    if isinstance(value, list | tuple):
        found = [_text(v, "options", "a list") for v in value]
        marked = [_split(v, _LETTERS[i : i + 1]) for i, v in enumerate(found)]
        found = [m[0] for m in marked if m] if all(marked) else found
    else:
        text = str(value).strip()
        found = _split(text, _LETTERS)
    if len(found) < 2 or not all(found):
        raise DataError(f"the options {str(value)!r} are not written as 'A) ... B) ...', nor as a list.")
    return tuple(found)


def _split(text: str, letters: Sequence[str]) -> list[str]:
    """The texts after the marks of ``letters``, as many as stand there in order; all marks are written as the first one is."""
    first = re.match(rf"(\()?{letters[0]}([).])", text)
    if first is None:
        return []
    before, after = _MARKS["(" if first[1] else first[2]]
    found: list[str] = []
    start = 0
    for letter in letters:
        hit = re.compile(rf"(?:^|(?<=\s)){before}{letter}{after}").search(text, start)
        if hit is None:
            break
        if found:
            found[-1] = text[start : hit.start()].strip()
        found.append("")
        start = hit.end()
    found[-1:] = [text[start:].strip()] if found else []
    return found


def _with_options(question: str, choices: Sequence[str]) -> str:
    return "\n".join([question, *(f"{letter}) {text}" for letter, text in zip(_LETTERS, choices, strict=False))])


def _choice(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Columns: question, options."""
    question, choices = _text(row[columns[0]], columns[0], "the row"), options(row[columns[1]])
    if not choices:
        raise DataError(f"the options ({columns[1]}) are empty.")
    return _with_options(question, choices) if question else "", choices


def _letter(question: str, answer: str) -> tuple[str, str]:
    return question, answer.strip("(). ").upper()


def _table(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Columns: question, table. The title, the unit of the answer and the options stand with them when the row has them."""
    question, table, title, unit = (_text(row.get(name), name, "the row") for name in (*columns, "table_title", "unit"))
    if not question or not table:
        raise DataError(f"the {'question' if table else 'table'} is empty.")
    choices = options(row.get("choices"))
    listed = "".join(f"\n- {text}" for text in choices)  # without letters: the answer is the text
    head = f"Table: {title}\n{table}" if title else f"Table:\n{table}"
    asked = question + (f" (unit: {unit})" if unit else "") + (f"\nChoose one of:{listed}" if listed else "")
    return f"{head}\n\n{asked}", choices


# --- the public sets ---------------------------------------------------------------------------------------------------------------------

_TEST_IS_TRAIN = {"test": ("train",)}  # a test set whose only split on the hub is called "train"

SETS: dict[str, PublicSet] = {
    "aime24": PublicSet(
        Format("problem", keep=("id", "url")),
        "https://artofproblemsolving.com/wiki/index.php/AIME_Problems_and_Solutions",
        Hub("HuggingFaceH4/aime_2024", splits=_TEST_IS_TRAIN),
    ),
    "amc23": PublicSet(
        Format("problem", keep=("id", "url"), otherwise=Format(keep=("id", "url"))),
        "https://artofproblemsolving.com/wiki/index.php/AMC_12_Problems_and_Solutions",
        Hub("math-ai/amc23", splits={"test": ("test",)}),
    ),
    "asdiv": PublicSet(
        Format("body+question", read=_without_unit, keep=("solution_type",)),
        "https://github.com/chaochun/nlu-asdiv-dataset",
        Hub("EleutherAI/asdiv", splits={"test": ("validation",)}, skip=_several_answers),
    ),
    "college_math": PublicSet(
        Format(keep=("data_topic", "question_number")),
        "https://arxiv.org/abs/2403.02884",
        Hub("di-zhang-fdu/College_Math_Test", splits={"test": ("test",)}),
    ),
    "gaokao2023en": PublicSet(
        Format(read=_gaokao, keep=("source",)),
        "https://github.com/MARIO-Math-Reasoning/MARIO_EVAL",
        Hub("MARIO-Math-Reasoning/Gaokao2023-Math-En", splits=_TEST_IS_TRAIN),
    ),
    "gsm8k": PublicSet(
        Format(read=_after_hashes, keep=(), solution="answer", tidy=_without_marks),
        "https://github.com/openai/grade-school-math",
        Hub("openai/gsm8k", "main"),
    ),
    "math": PublicSet(
        Format(
            "problem",
            keep=("level", "type", "subject"),
            solution="solution",
            otherwise=Format("problem", "solution", read=_last_box, keep=("level", "type", "subject"), solution="solution"),
        ),
        "https://github.com/hendrycks/math",
        Hub("DigitalLearningGmbH/MATH-lighteval"),
    ),
    "math500": PublicSet(
        Format("problem", keep=("level", "subject", "unique_id"), solution="solution"),
        "https://github.com/openai/prm800k",
        Hub("HuggingFaceH4/MATH-500", splits={"test": ("test",)}),
    ),
    "mawps": PublicSet(Format("input", "target", keep=("type",)), "https://github.com/sroy9/mawps"),
    "minerva_math": PublicSet(
        Format("problem", "solution", read=_last_box, keep=("type",), solution="solution"),
        "https://arxiv.org/abs/2206.14858",
        Hub("knoveleng/Minerva-Math", splits=_TEST_IS_TRAIN),
    ),
    "olympiadbench": PublicSet(
        Format("context+question", "final_answer", keep=("id", "subfield", "unit", "answer_type")),
        "https://github.com/OpenBMB/OlympiadBench",
        Hub("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", splits=_TEST_IS_TRAIN),
    ),
    "sat_math": PublicSet(
        Format(
            "question+options",
            "Answer",
            ask=_choice,
            read=_letter,
            lettered=True,
            keep=("id",),
            otherwise=Format("Question+Possible Answers", "Answer", ask=_choice, read=_letter, lettered=True, keep=("id",)),
        ),
        "https://huggingface.co/datasets/mcaleste/sat_multiple_choice_math_may_23",
        Hub("mcaleste/sat_multiple_choice_math_may_23", splits=_TEST_IS_TRAIN),
    ),
    "svamp": PublicSet(
        Format("Body+Question", "Answer", keep=("Type", "ID")),
        "https://github.com/arkilpatel/SVAMP",
        Hub("ChilleD/SVAMP", splits={"test": ("train", "test")}),  # the usual evaluation asks all 1,000
    ),
    "tabmwp": PublicSet(
        Format("question+table", ask=_table, keep=("ques_type", "ans_type", "unit", "grade")),
        "https://github.com/lupantech/PromptPG",
    ),
}
"""The public maths sets of the simpleRL-reason evaluation, and MATH."""

FORMATS: dict[str, Format] = {name: each.form for name, each in SETS.items()}


def of_hub_id(hub_id: str) -> Format:
    """The format of a copy on the hub, by its id ("org/name" or "org/name:config"): that of `SETS`, or of a set with its name."""
    repo = hub_id.partition(":")[0]
    named = repo.partition("/")[2].lower().replace("-", "_")
    known = (each.form for each in SETS.values() if each.hub is not None and each.hub.id.lower() == repo.lower())
    return next(known, FORMATS.get(named, Format()))
