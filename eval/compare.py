"""Two evaluations of the same problems: the paired difference, and which problems flipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlkit.errors import DataError
from rlkit.eval.intervals import paired, sign_test
from rlkit.eval.result import Evaluation, load
from rlkit.reprs import html_table


@dataclass(frozen=True)
class Comparison:
    """b against a, over the problems that both have."""

    a: Evaluation
    b: Evaluation
    n_problems: int
    before: float  # accuracy of a on the problems that both have
    after: float  # accuracy of b on them
    difference: float  # mean accuracy of b less that of a
    low: float  # 95 % interval of the difference, paired by problem
    high: float
    p_value: float  # of an exact two-sided sign test on the problems that changed
    gained: tuple[str, ...]  # ids of problems that b does better
    lost: tuple[str, ...]  # ids of problems that b does worse

    def flipped(self) -> list[dict[str, str]]:
        """Each changed problem with its question, the gold answer and one response of either side."""
        sides = []
        for evaluation in (self.a, self.b):
            rows: dict[str, dict[str, str]] = {}
            for row in evaluation.rows:
                rows.setdefault(row["id"], dict(row))
            sides.append(rows)
        before, after = sides
        return [
            {
                "id": name,
                "change": change,
                "question": before[name]["question"],
                "answer": before[name]["answer"],
                "a": before[name]["response"],
                "b": after[name]["response"],
            }
            for change, names in (("gained", self.gained), ("lost", self.lost))
            for name in names
        ]

    def __repr__(self) -> str:
        return (
            f"Comparison({self.a.dataset}: {self.before:.1%} -> {self.after:.1%}, {self.difference:+.1%} "
            f"[{self.low:+.1%}, {self.high:+.1%}] on {self.n_problems} problems, {len(self.gained)} gained, {len(self.lost)} lost, "
            f"p {self.p_value:.2g})"
        )

    def _repr_html_(self) -> str:
        shown = [(f["change"], f["id"], f["question"], f["answer"], f["a"][-200:], f["b"][-200:]) for f in self.flipped()[:20]]
        table = html_table(("", "problem", "question", "gold", f"a: {self.a.model}", f"b: {self.b.model}"), shown)
        more = len(self.gained) + len(self.lost) - len(shown)
        return f"<p>{self!r}</p>{table}" + (f"<p>… {more} more in .flipped()</p>" if more > 0 else "")


def compare(a: Evaluation | str | Path, b: Evaluation | str | Path) -> Comparison:
    """Compare two evaluations, or their folders. A problem flipped when its share of right samples differs.

    Raises:
        DataError: different sets, a problem whose question or answer differs, or nothing in common.
    """
    for x in (a, b):
        if not isinstance(x, Evaluation | str | Path):
            raise DataError(f"compare() takes two evaluations of one set each, or their folders; it was given {type(x).__name__}.")
    a, b = (x if isinstance(x, Evaluation) else load(x) for x in (a, b))
    if (a.dataset, a.split) != (b.dataset, b.split):
        raise DataError(f"These are different sets: {a.dataset}/{a.split} and {b.dataset}/{b.split}.")
    left, right = a.correct, b.correct
    texts = [{row["id"]: (row["question"], row["answer"]) for row in e.rows} for e in (a, b)]
    common = [name for name in left if name in right]
    changed = [name for name in common if texts[0][name] != texts[1][name]]
    if changed:
        raise DataError(f"{len(changed)} problems have the same id and another question or answer, the first of them {changed[0]!r}.")
    if not common:
        raise DataError("The two evaluations have no problem in common.")
    before = np.array([left[name].mean() for name in common])
    after = np.array([right[name].mean() for name in common])
    difference, low, high = paired(before, after)
    gained = tuple(name for name, x, y in zip(common, before, after, strict=True) if y > x)
    lost = tuple(name for name, x, y in zip(common, before, after, strict=True) if y < x)
    chance = sign_test(len(gained), len(lost))
    return Comparison(a, b, len(common), float(before.mean()), float(after.mean()), difference, low, high, chance, gained, lost)
