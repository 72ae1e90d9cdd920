"""From a row of a data set to a question and an answer: which columns hold them, and how the answer is written there.

`FORMATS` knows the public maths sets by name; any other file says its columns with ``fields``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.errors import DataError, nearest

KEYS = ("question", "answer", "id")  # what ``fields`` may name


@dataclass(frozen=True)
class Format:
    """``question`` may join columns: ``"Body+Question"``. Without ``answer`` the prompts have none.

    ``read`` takes question and answer as written and gives them as they should be. ``keep`` names the columns that become ``Prompt.meta``;
    None: all that are neither question nor answer.
    """

    question: str = "question"
    answer: str | None = "answer"
    id: str | None = None
    read: Callable[[str, str], tuple[str, str]] | None = None
    keep: tuple[str, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that a row must have."""
        return (*self.question.split("+"), *((self.answer,) if self.answer else ()), *((self.id,) if self.id else ()))


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
    return Format(fields["question"], fields.get("answer"), fields.get("id"))


def read_row(row: Mapping[str, Any], form: Format, where: str) -> Item:
    """Question and answer of one row.

    Args:
        where: file and line, for messages.

    Raises:
        DataError: a column is missing, or the question or the answer is empty.
    """
    for column in form.columns:
        if column not in row:
            raise DataError(
                f"{where}: there is no field {column!r}{nearest(column, row) or '.'} The row has {', '.join(row)}; say which holds what "
                f"with fields={{'question': ..., 'answer': ...}} (leave out 'answer' when there is none)."
            )
    question = _join([_text(row[column], column, where) for column in form.question.split("+")])
    answer = _text(row[form.answer], form.answer, where) if form.answer else None
    if form.read is not None and answer is not None:
        question, answer = form.read(question, answer)
    if not question:
        raise DataError(f"{where}: the question ({form.question}) is empty.")
    if answer == "":
        raise DataError(f"{where}: the answer ({form.answer}) is empty, or not written as this set writes its answers.")
    used = {*form.columns} - ({form.id} if form.id else set())
    meta = {k: v for k, v in row.items() if (k not in used if form.keep is None else k in form.keep)}
    return Item(question, answer, _text(row[form.id], form.id, where) if form.id else None, meta)


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


def _without_unit(question: str, answer: str) -> tuple[str, str]:
    return question, re.sub(r"(?<=\S)\s*\([^()]*\)$", "", answer)


def _last_box(question: str, solution: str) -> tuple[str, str]:
    from rlkit.rewards.extract import boxed

    return question, boxed(solution) or ""


def _gaokao(question: str, answer: str) -> tuple[str, str]:
    """A few rows have the answer at the end of the question instead, or the word "solution:" after it."""
    if not answer:
        split = re.fullmatch(r"(.*?)\s*answers?:\s*(.*?)", question, re.IGNORECASE | re.DOTALL)
        question, answer = (split[1], split[2]) if split else (question, "")
    return question, answer.removesuffix("solution:").strip()


FORMATS: dict[str, Format] = {
    "aime24": Format("problem", keep=("id", "url")),
    "amc23": Format("problem", keep=("id", "url")),
    "asdiv": Format("body+question", read=_without_unit, keep=("solution_type",)),
    "college_math": Format(keep=("data_topic", "question_number")),
    "gaokao2023en": Format(read=_gaokao, keep=("source",)),
    "gsm8k": Format(read=_after_hashes, keep=()),
    "math500": Format("problem", keep=("level", "subject", "unique_id")),
    "mawps": Format("input", "target", keep=("type",)),
    "minerva_math": Format("problem", "solution", read=_last_box, keep=("type",)),
    "olympiadbench": Format("context+question", "final_answer", keep=("id", "subfield", "unit", "answer_type")),
    "sat_math": Format("question+options", "Answer", keep=("id",)),
    "svamp": Format("Body+Question", "Answer", keep=("Type", "ID")),
}
"""The public maths sets of the simpleRL-reason evaluation."""
