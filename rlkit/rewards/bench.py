"""The bench on which a grader is tried before anybody trains on it: rows with answers and responses in, verdicts out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.errors import ConfigError, DataError, nearest
from rlkit.formats import FORMATS
from rlkit.rewards.grading import REL_TOL, TIMEOUT_S, VERDICTS, Verdict, grade_many

BLOCK = 2000  # rows that are graded together
FIELDS = ("answer", "response", "dataset", "id", "expected", "choices")


@dataclass
class Tally:
    """Counts over all rows, and the rows on which the grader and ``expected`` disagree."""

    verdicts: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    expected: int = 0  # rows that say what they expect
    disagreements: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.verdicts.values())

    def lines(self) -> list[str]:
        """The summary, for people."""
        counts = ", ".join(f"{name} {self.verdicts[name]} ({self.verdicts[name] / self.rows:.1%})" for name in VERDICTS)
        out = [f"{self.rows} rows: {counts}", "decided by " + ", ".join(f"{rule} {n}" for rule, n in self.rules.most_common())]
        if self.expected:
            out.append(f"{len(self.disagreements)} of {self.expected} rows with an expectation disagree")
            for d in self.disagreements:
                said = f"expected {d['expected']}, graded {d['verdict']} by {d['rule']}"
                out.append(f"  {d['id']}: {said}; extracted {_short(d['extracted'])}, gold {_short(d['answer'])}")
        return out


def grade_rows(rows: Iterable[tuple[Mapping[str, Any], str]], tally: Tally, **settings: Any) -> Iterator[dict[str, Any]]:
    """``{"id", "verdict", "extracted", "rule"}`` for each row, in order; ``tally`` is filled on the way.

    ``rows`` are (row, where it stands); a row has ``answer`` and ``response``, and may have ``dataset`` (its way of writing gold answers is
    then known), ``id`` (else its number), ``expected`` (a verdict, or true and false for correct and wrong) and ``choices``. ``settings``
    are those of `grade_many`.

    Raises:
        DataError: a row without an answer or a response, or with another value than these; says where.
    """
    check_settings(**{k: v for k, v in settings.items() if k in ("timeout_s", "rel_tol")})
    block: list[dict[str, Any]] = []
    for number, (row, where) in enumerate(rows, 1):
        block.append(_read(row, where, number))
        if len(block) == BLOCK:
            yield from _grade(block, tally, settings)
            block = []
    yield from _grade(block, tally, settings)


def check_settings(timeout_s: float = TIMEOUT_S, rel_tol: float = REL_TOL) -> None:
    """Raises:
    ConfigError: a limit of time that is none, or a tolerance that takes different numbers for equal.
    """
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be a finite number above 0.")
    if not 0 <= rel_tol < 1:
        raise ConfigError(f"rel_tol is {rel_tol!r}; it must be from 0 to below 1.")


def _grade(block: Sequence[dict[str, Any]], tally: Tally, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    responses, answers, choices = ([row[name] for row in block] for name in ("response", "answer", "choices"))
    verdicts = grade_many(responses, answers, choices=choices, **settings)
    for row, verdict in zip(block, verdicts, strict=True):
        yield _count(row, verdict, tally)


def _count(row: Mapping[str, Any], verdict: Verdict, tally: Tally) -> dict[str, Any]:
    out = {"id": row["id"], "verdict": verdict.verdict, "extracted": verdict.extracted, "rule": verdict.rule}
    tally.verdicts[verdict.verdict] += 1
    tally.rules[verdict.rule] += 1
    if row["expected"] is not None:
        tally.expected += 1
        if row["expected"] != verdict.verdict:
            tally.disagreements.append(out | {"expected": row["expected"], "answer": row["answer"]})
    return out


def _read(row: Mapping[str, Any], where: str, number: int) -> dict[str, Any]:
    texts = {}
    for name in ("answer", "response"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and name == "answer":
            value = json.dumps(value)
        if not isinstance(value, str):
            near = nearest(name, [key for key in row if key not in FIELDS])
            raise DataError(f"{where}: {name!r} must be a text{near or ';'} the row has {', '.join(row) or 'nothing'}.")
        texts[name] = value
    choices = row.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(c, str) for c in choices)):
        raise DataError(f"{where}: 'choices' must be a list of texts, A first.")
    return {
        "answer": _gold(texts["answer"], row.get("dataset"), where),
        "response": texts["response"],
        "id": row.get("id", number),
        "expected": _expected(row.get("expected"), where),
        "choices": choices,
    }


def _gold(answer: str, dataset: Any, where: str) -> str:
    """The gold answer; taken out of the set's way of writing it where it stands so."""
    if dataset is None:
        return answer
    if not isinstance(dataset, str) or dataset not in FORMATS:
        raise DataError(f"{where}: there is no dataset {dataset!r}{nearest(str(dataset), FORMATS) or '.'} Known: {', '.join(FORMATS)}.")
    read = FORMATS[dataset].read
    return (read("", answer)[1] or answer) if read is not None else answer


def _expected(value: Any, where: str) -> str | None:
    if value is None or (isinstance(value, str) and value in VERDICTS):
        return value
    if isinstance(value, bool | int) and value in (0, 1):
        return "correct" if value else "wrong"
    raise DataError(f"{where}: 'expected' is {value!r}; it must be true, false or one of {', '.join(VERDICTS)}.")


def _short(text: str | None, width: int = 80) -> str:
    return "nothing" if text is None else repr(text if len(text) <= width else text[: width - 1] + "…")
