"""What an evaluation found: `Evaluation` for one set, `Evaluations` for several, as objects, tables, JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.errors import DataError
from rlkit.eval import store
from rlkit.eval.intervals import accuracy_interval, majority, pass_at_k, powers_of_two
from rlkit.reprs import html_table, number
from rlkit.rewards.equivalence import compare

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Evaluation:
    """P problems of one set, n samples each. Shares are of samples; lengths are tokens, the end-of-sequence token counted."""

    dataset: str
    split: str
    model: str
    accuracy: float  # mean over problems and samples: avg@n
    low: float  # 95 % interval of the accuracy
    high: float
    n_problems: int
    n: int  # samples a problem
    pass_at: Mapping[int, float]  # k -> pass@k, unbiased
    majority: float  # share of problems whose most frequent answer is right
    unparsed: float  # share of samples in which no final answer was found
    timed_out: float  # share of samples whose answer took too long to decide
    truncated: float  # share of samples that hit the token limit
    dropped: int  # problems that are too long for the model's context; they count as wrong
    mean_length: float
    median_length: float
    max_length: int
    tokens_per_second: float  # sampled tokens over the time spent sampling
    seconds: float  # sampling and grading, over all sittings
    policy_version: int | None  # of a live sampler
    key: str  # of the whole configuration
    config: Mapping[str, Any] = field(repr=False)
    rows: Sequence[Mapping[str, Any]] = field(repr=False)  # one a sample
    folder: Path | None = None

    @property
    def samples(self) -> pd.DataFrame:
        """One row a sample: id, sample, question, answer, response, extracted, verdict, rule, tokens, finish."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    @property
    def correct(self) -> dict[str, np.ndarray]:
        """Problem id -> (n,) bool."""
        out: dict[str, list[bool]] = {}
        for row in self.rows:
            out.setdefault(row["id"], []).append(row["verdict"] == "correct")
        return {name: np.array(values) for name, values in out.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Scalars for the event log: ``run.log(step, scored, stats, **evaluation.metrics)``."""
        found = {name: float(getattr(self, name)) for name in ("accuracy", "unparsed", "timed_out", "truncated", "mean_length")}
        return {f"eval/{self.dataset}/{name}": value for name, value in found.items()}

    def summary(self) -> dict[str, Any]:
        """Everything but the samples, ready for JSON."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("rows", "folder", "config")}
        out["pass_at"] = {str(k): v for k, v in self.pass_at.items()}
        return out | {"config": dict(self.config)}

    def report(self) -> str:
        """A page of Markdown."""
        facts = "\n".join(f"| {k} | {v} |" for k, v in self._facts())
        settings = "\n".join(f"- {k}: `{json.dumps(v, ensure_ascii=False, default=str)}`" for k, v in self.config.items())
        verdicts = {row["verdict"]: 0 for row in self.rows}
        for row in self.rows:
            verdicts[row["verdict"]] += 1
        counts = ", ".join(f"{v} {n}" for v, n in sorted(verdicts.items(), key=lambda item: -item[1]))
        return (
            f"# {self.model} on {self.dataset}/{self.split}\n\n|  |  |\n|---|---|\n{facts}\n\n"
            f"Verdicts: {counts}.\n\n## Settings\nKey `{self.key}`.\n\n{settings}\n"
        )

    def _facts(self) -> list[tuple[str, str]]:
        rows = [
            ("accuracy", f"{self.accuracy:.1%}, 95 % interval {self.low:.1%} to {self.high:.1%}"),
            ("problems x samples", f"{self.n_problems} x {self.n}"),
        ]
        if self.n > 1:
            rows += [("pass@k", ", ".join(f"pass@{k} {v:.1%}" for k, v in self.pass_at.items()))]
            rows += [(f"majority@{self.n}", f"{self.majority:.1%}")]
        rows += [
            ("no answer found", f"{self.unparsed:.1%}"),
            ("timed out", f"{self.timed_out:.1%}"),
            ("truncated", f"{self.truncated:.1%}"),
            ("response length", f"mean {number(self.mean_length)}, median {number(self.median_length)}, longest {self.max_length} tokens"),
            ("tokens/s", number(self.tokens_per_second)),
            ("time", f"{self.seconds:.1f} s"),
        ]
        if self.dropped:
            rows += [("too long for the context", f"{self.dropped} problems, counted as wrong")]
        if self.policy_version is not None:
            rows += [("policy version", str(self.policy_version))]
        return rows

    def __repr__(self) -> str:
        many = "" if self.n == 1 else f", pass@{self.n} {self.pass_at[self.n]:.1%}, majority@{self.n} {self.majority:.1%}"
        return (
            f"Evaluation({self.model} on {self.dataset}/{self.split}: {self.accuracy:.1%} correct [{self.low:.1%}, {self.high:.1%}]{many}, "
            f"{self.n_problems} problems x {self.n}, {self.mean_length:.1f} tokens)"
        )

    def _repr_html_(self) -> str:
        return html_table(("", ""), self._facts(), caption=f"{self.model} on {self.dataset}/{self.split}")


class Evaluations(Sequence[Evaluation]):
    """Several sets under one model; ``found["gsm8k"]`` or ``found[0]``."""

    def __init__(self, items: Sequence[Evaluation]) -> None:
        self.items = tuple(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            found = [item for item in self.items if item.dataset == which]
            if not found:
                raise KeyError(f"No evaluation of {which!r} here; there are {', '.join(i.dataset for i in self.items)}.")
            return found[0]
        return self.items[which]

    @property
    def mean(self) -> float:
        """The plain mean of the sets' accuracies."""
        return float(np.mean([item.accuracy for item in self.items]))

    HEADER = ("dataset", "problems", "n", "accuracy", "95 % interval", "pass@n", "maj@n", "unparsed", "timed out", "truncated", "tokens")

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                e.dataset,
                str(e.n_problems),
                str(e.n),
                f"{e.accuracy:.1%}",
                f"{e.low:.1%} to {e.high:.1%}",
                f"{e.pass_at[e.n]:.1%}",
                f"{e.majority:.1%}",
                f"{e.unparsed:.1%}",
                f"{e.timed_out:.1%}",
                f"{e.truncated:.1%}",
                f"{e.mean_length:.0f}",
            )
            for e in self.items
        ]
        return rows + ([("mean", "", "", f"{self.mean:.1%}", *[""] * 7)] if len(self.items) > 1 else [])

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.HEADER, tuple("---" for _ in self.HEADER), *self._rows()]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def __repr__(self) -> str:
        rows = [self.HEADER, *self._rows()]
        widths = [max(len(r[i]) for r in rows) for i in range(len(self.HEADER))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        return html_table(self.HEADER, self._rows(), caption=self.items[0].model if self.items else "")


def summarize(
    rows: Sequence[Mapping[str, Any]],
    *,
    dataset: str,
    split: str,
    model: str,
    n: int,
    key: str,
    config: Mapping[str, Any],
    spent: Mapping[str, float],
    policy_version: int | None = None,
    folder: Path | None = None,
) -> Evaluation:
    """The numbers of P x n rows, the n of a problem one after the other."""
    verdicts = np.array([row["verdict"] for row in rows], dtype=object).reshape(-1, n)
    correct = verdicts == "correct"
    lengths = np.array([row["tokens"] for row in rows], dtype=float)
    grouped = [rows[i : i + n] for i in range(0, len(rows), n)]
    low, high = accuracy_interval(correct)
    return Evaluation(
        dataset=dataset,
        split=split,
        model=model,
        accuracy=float(correct.mean()),
        low=low,
        high=high,
        n_problems=len(grouped),
        n=n,
        pass_at={k: pass_at_k(correct, k) for k in powers_of_two(n)},
        majority=float(np.mean([majority([r["extracted"] for r in g], [r["verdict"] == "correct" for r in g], _same) for g in grouped]))
        if n > 1
        else float(correct.mean()),
        unparsed=float((verdicts == "unparsed").mean()),
        timed_out=float((verdicts == "timeout").mean()),
        truncated=float(np.mean([row["finish"] == "length" for row in rows])),
        dropped=sum(group[0]["finish"] == "too_long" for group in grouped),
        mean_length=float(lengths.mean()),
        median_length=float(np.median(lengths)),
        max_length=int(lengths.max()),
        tokens_per_second=spent["tokens"] / spent["rollout_s"] if spent["rollout_s"] > 0 else 0.0,
        seconds=spent["rollout_s"] + spent["grading_s"],
        policy_version=policy_version,
        key=key,
        config=config,
        rows=rows,
        folder=folder,
    )


def _same(a: str, b: str) -> bool:
    """Whether two extracted answers are one, by the rules that need no symbolic work."""
    return compare(a, b)[0] is True


def load(folder: str | Path) -> Evaluation:
    """A finished evaluation from its folder.

    Raises:
        DataError: it is no such folder, or the evaluation was stopped before its end.
    """
    if not isinstance(folder, str | Path):
        raise DataError(f"load() takes an evaluation's folder; it was given {folder!r}.")
    folder = Path(folder)
    path = folder / store.SUMMARY
    if not path.is_file():
        state = (
            "was stopped before its end; run it again to finish it" if (folder / store.CONFIG).is_file() else "is no evaluation's folder"
        )
        raise DataError(f"{folder} {state} (no {store.SUMMARY} there).")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        held["pass_at"] = {int(k): v for k, v in held["pass_at"].items()}
        return Evaluation(**held, rows=tuple(store.rows_of(folder / store.SAMPLES)), folder=folder)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not what rlkit writes there: {error}.") from error
