"""The grader on the gold answers of the public maths sets: against themselves, rewritten, and against other rows' answers.

    python benchmarks/gold_answers.py --data_dir DIR [--sets math500,gsm8k] [--write]

`own`: each gold in ``\\boxed{}`` against itself, which must be "correct". That is equal as text, so `rewritten` says the same gold in
other words: each of `REWRITES` that applies, also "correct". `other`: each gold boxed against the golds 1 and 7 rows further on in the same
set, which must be "wrong".

Another row's gold may be the same answer by chance (half of gsm8k is below 100), so pairs that are the same are skipped, by a check that
shares no code with the grader: the letters and digits of both are the same whatever their order (``x+1`` and ``1+x``), or both are plain
numbers, fractions or percents of the same value to Python's `float`. It is coarse on purpose: it may skip a pair that differs (``12``
and ``21``), which costs a case, and it lets through equal pairs that are written very differently, which then show as exceptions.

Results hold counts, row ids and rules; never a row's text.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine

import rlkit as rl
from rlkit.rewards.grading import VERSION, grade_many

SETS = (
    "aime24", "amc23", "asdiv", "college_math", "gaokao2023en", "gsm8k", "math500", "mawps", "minerva_math", "olympiadbench", "sat_math",
    "svamp",
)  # fmt: skip
SHIFTS = (1, 7)
TARGETS = {"own": 99.5, "rewritten": 99.0, "other": 99.5}  # percent, of each set


class Case(NamedTuple):
    """``name`` of a rewrite or a shift; ``want`` is the verdict."""

    row: str
    name: str
    response: str
    gold: str
    want: str


# --- the same gold in other words --------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_PROSE = re.compile(r"\\text|\\mathrm|[A-Za-z]{2,} [A-Za-z]|(?<![\\A-Za-z])(?!sin|cos|tan|log|ln|sec|csc|cot)[A-Za-z]{3,}")


def _box(text: str) -> str:
    return f"We conclude that the result is \\boxed{{{text}}}."


def _bare(gold: str) -> str:
    """The gold without one pair of dollars around it."""
    whole = gold.startswith("$") and gold.endswith("$") and gold.count("$") == 2
    return gold[1:-1].strip() if whole else gold


def _spaces(gold: str) -> str:
    if _PROSE.search(gold) or "$" in _bare(gold):
        return gold
    return re.sub(r"(?<=[^\s{(\[,^_eE])([-+=])(?=[^\s])", r" \1 ", re.sub(r",(?!\d{3}(?!\d))", r" , ", gold))


def _squeezed(gold: str) -> str:
    """Without the spaces that LaTeX does not need."""
    return gold if _PROSE.search(gold) else re.sub(r"(?<=[-+=,(){}\d]) +(?=[-+=(){}]|\\)|(?<=[-+=({}]) +", "", gold)


def _slash(gold: str) -> str:
    return re.sub(r"^(\$?-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}(\$?)$", r"\1\2/\3\4", gold)


def _reversed(gold: str) -> str:
    text = _bare(gold)
    if (
        "," not in text
        or re.search(r"[()\[\]]|\\text|\\\{|\\cup|\\begin|[A-Za-z]{2} |=|\\!|\d,\d{3}(?!\d)", text)
        or text.count("{") != text.count("}")
    ):
        return gold
    parts = re.split(r",(?![^{}]*\})", text)
    return ", ".join(p.strip() for p in reversed(parts))


def _words(gold: str) -> str:
    return rf"\text{{{gold}}}" if re.fullmatch(r"[A-Za-z]+(?: [A-Za-z]+)*", gold) else gold


REWRITES: dict[str, Callable[[str], str]] = {
    "dfrac": lambda g: re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", g),
    "tfrac": lambda g: re.sub(r"\\frac(?![a-zA-Z])", r"\\tfrac", g),
    "slash": _slash,
    "spaces": _spaces,
    "squeezed": _squeezed,
    "thin_space": lambda g: re.sub(r"(?<=\S) ?([+=]) ?(?=\S)", r" \\, \1 \\; ", g) if not _PROSE.search(g) else g,
    "dollars": lambda g: f"$${_bare(g)}$$" if "$" not in _bare(g) else g,
    "parens": lambda g: rf"\({_bare(g)}\)" if "$" not in _bare(g) else g,
    "bold": lambda g: f"**{g}**",
    "stop": lambda g: f"{g}." if not g.endswith(".") else g,
    "left_right": lambda g: re.sub(r"(?<!\\left)([(\[])(.*)(?<!\\right)([)\]])", r"\\left\1\2\\right\3", g) if "\\left" not in g else g,
    "no_left_right": lambda g: re.sub(r"\\(left|right)(?![a-zA-Z])\s?", "", g),
    "text": _words,
    "unit": lambda g: rf"{g}\text{{ units}}" if _INTEGER.fullmatch(g) else g,
    "equation": lambda g: f"n = {g}" if _NUMBER.fullmatch(g) else g,
    "decimal": lambda g: f"{g}.0" if _INTEGER.fullmatch(g) else g,
    "separators": lambda g: f"{int(g):,}" if _INTEGER.fullmatch(g) and len(g) < 16 else g,
    "latex_separators": lambda g: f"{int(g):,}".replace(",", "{,}") if _INTEGER.fullmatch(g) and len(g) < 16 else g,
    "reversed": _reversed,
}


def rewritten(row: str, gold: str) -> list[Case]:
    """Every rewrite that changes this gold, boxed; and the gold without a box, in a sentence and after ``####``."""
    cases = [Case(row, name, _box(text), gold, "correct") for name, fn in REWRITES.items() if (text := fn(gold)) != gold]
    if "\n" not in gold and not re.search(r"[.;!?] ", gold):
        math = gold if "$" in gold or _PROSE.search(gold) else f"${gold}$"
        cases.append(Case(row, "sentence", f"First 7, then 8.\nThe final answer is: {math}. I hope it is correct.", gold, "correct"))
    if "\n" not in gold:
        cases.append(Case(row, "hashes", f"First 7, then 8.\n#### {gold}", gold, "correct"))
    return cases


# --- another gold ------------------------------------------------------------------------------------------------------------------------


def plain_value(text: str) -> float | None:
    """The value of a plain number, fraction or percent; None for all else."""
    text = re.sub(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}", r"\1/\2", text)
    text = re.sub(r"[\s$,]|\\[!,$]|\\?%$|^[A-Za-z]=|\^\{?\\circ\}?", "", text)
    m = re.fullmatch(r"(-?(?:\d+\.?\d*|\.\d+))(?:/(\d+))?", text)
    if m is None:
        return None
    return float(m[1]) / float(m[2]) if m[2] and float(m[2]) else float(m[1])


def surely_different(a: str, b: str) -> bool:
    """Neither the same letters and digits nor the same plain value; see the top of this file."""
    if sorted(re.findall(r"[A-Za-z0-9]", a.lower())) == sorted(re.findall(r"[A-Za-z0-9]", b.lower())):
        return False
    x, y = plain_value(a), plain_value(b)
    if x is None or y is None:
        return True
    scales = (1.0, 100.0, 0.01) if "%" in a or "%" in b else (1.0,)
    return all(abs(x - y * s) > 1e-3 * max(abs(x), abs(y * s)) for s in scales)


def others(rows: Sequence[tuple[str, str]]) -> list[Case]:
    out = []
    for shift in SHIFTS:
        for i, (row, gold) in enumerate(rows):
            other = rows[(i + shift) % len(rows)][1]
            if surely_different(other, gold):
                out.append(Case(row, f"+{shift}", _box(other), gold, "wrong"))
    return out


# --- the run -----------------------------------------------------------------------------------------------------------------------------


def measure(name: str, data_dir: str) -> dict[str, Any]:
    """Counts and exceptions of one set."""
    rows = [(p.id, p.answer or "") for p in rl.load_tasks(name, split="test", data_dir=data_dir)]
    groups = {
        "own": [Case(row, "boxed", _box(gold), gold, "correct") for row, gold in rows],
        "rewritten": [case for row, gold in rows for case in rewritten(row, gold)],
        "other": others(rows),
    }
    result: dict[str, Any] = {"rows": len(rows)}
    for group, cases in groups.items():
        start = time.perf_counter()
        verdicts = grade_many([c.response for c in cases], [c.gold for c in cases])
        failed = [(c, v) for c, v in zip(cases, verdicts, strict=True) if v.verdict != c.want]
        result[group] = {
            "cases": len(cases),
            "right": len(cases) - len(failed),
            "percent": round(100 * (1 - len(failed) / max(1, len(cases))), 3),
            "seconds": round(time.perf_counter() - start, 1),
            "by_rule": dict(Counter(v.rule for v in verdicts).most_common()),
            "exceptions": [{"id": c.row, "case": c.name, "verdict": v.verdict, "rule": v.rule} for c, v in failed],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated; those that DIR does not have are left out")
    parser.add_argument("--write", action="store_true", help="save benchmarks/results/gold_answers.json")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    print(f"{'set':15}{'rows':>7}" + "".join(f"{group:>12}{'cases':>8}" for group in TARGETS) + "   seconds")
    for name in args.sets.split(","):
        if not (Path(args.data_dir) / name).is_dir():
            print(f"{name:15} not in {args.data_dir}")
            continue
        found[name] = r = measure(name, args.data_dir)
        print(
            f"{name:15}{r['rows']:7}"
            + "".join(f"{r[g]['percent']:11.2f}{'*' if r[g]['percent'] < low else ' '}{r[g]['cases']:8}" for g, low in TARGETS.items())
            + f"{sum(r[g]['seconds'] for g in TARGETS):10.1f}",
            flush=True,
        )
    print("* below its target:", ", ".join(f"{group} {low} %" for group, low in TARGETS.items()))
    for name, r in found.items():
        for group in TARGETS:
            for e in r[group]["exceptions"]:
                print(f"{name} {group} {e['id']} {e['case']}: {e['verdict']} by {e['rule']}")
    if args.write:
        print(machine.save("gold_answers", {"grader_version": VERSION, "targets_percent": TARGETS, "sets": found}))


if __name__ == "__main__":
    main()
