"""How fast the grader is: 10,000 answers like gsm8k's, and 10,000 like math500's beside math-verify called one by one.

    python benchmarks/grader_speed.py [--n 10000] [--reference 2000]

All answers are made here and differ from each other, so that no memo helps: the gold of answer k is drawn from k. Half of them are
right. The first kind is an integer at the end of a text of some 1,500 characters. The second is a boxed LaTeX answer written otherwise than
its gold: fractions, roots, tuples, intervals, sets, polynomials, matrices, equations, text, and floors, which only math-verify knows.

math-verify is called as its README says, `verify(parse(gold), parse(answer))`, in one process, with its time limits switched off, on the
first `--reference` pairs; its time for all is that times n/reference. The grader uses its worker processes, which run when the clock
starts. "right_percent" counts the verdicts that are right.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from typing import Any

import machine

from rlkit.rewards.grading import VERSION, grade_many

SENTENCE = "We add {a} and {b}, which gives {c}, and then take {d} percent of it; so {e} items are left in the box. "


def long_text(k: int) -> tuple[str, str, bool]:
    """(response, gold, right): an integer at the end of a long text."""
    draw = random.Random(k)
    gold, right = 1000 + k, k % 2 == 0
    steps = "".join(SENTENCE.format(**{name: draw.randrange(1000) for name in "abcde"}) for _ in range(14))
    shown = f"{gold if right else gold + 1 + draw.randrange(9):,}"
    end = (f"#### {shown}", f"The answer is {shown}.", f"So the result is \\boxed{{{shown}}}.", f"In the end there are {shown}")[k // 2 % 4]
    return steps + end, str(gold), right


def latex(k: int) -> tuple[str, str, bool]:
    """(response, gold, right): a LaTeX answer and its gold, written differently."""
    draw = random.Random(-k)
    n, m, right = k + 2, draw.randrange(2, 40), k % 2 == 0
    w = n if right else n + 1
    kinds = (
        (rf"\dfrac{{{w}}}{{{m}}}", rf"\frac{{{n}}}{{{m}}}"),
        (rf"{w}\sqrt{{{m}}}", rf"\sqrt{{{n * n * m}}}"),
        (rf"\left({w}, -\dfrac{{1}}{{{m}}}\right)", rf"({n},-\frac{{1}}{{{m}}})"),
        (rf"[{m}, {w})", rf"\left[{m},{n}\right)"),
        (rf"\{{{w}, {m}\}}", rf"\{{{m},{n}\}}"),
        (rf"x^2 + {w}x + {m}", rf"{m}+{n}x+x^{{2}}"),
        (rf"(x+{w})(x-{m})", rf"x^2+{n - m}x-{n * m}" if n >= m else rf"x^2-{m - n}x-{n * m}"),
        (rf"\begin{{pmatrix}} {w} & {m} \\ 0 & 1 \end{{pmatrix}}", rf"\begin{{pmatrix}}{n}&{m}\\0&1\end{{pmatrix}}"),
        (rf"y = {m}x + {w}", rf"y={n}+{m}x"),
        (rf"\frac{{{w}\pi}}{{{m}}}", rf"\frac{{\pi \cdot {n}}}{{{m}}}"),
        (rf"{w}^\circ", rf"{n}"),
        (rf"{w} + {m}i", rf"{m}i+{n}"),
        (rf"\frac{{{w}}}{{x+{m}}}", rf"\frac{{{2 * n}}}{{2x+{2 * m}}}"),
        (rf"(-\infty, {m}) \cup ({w + 50}, \infty)", rf"({n + 50},\infty)\cup(-\infty,{m})"),
        (rf"\text{{ {_name(w)} }}", _name(n)),
        (rf"{w}\lfloor x \rfloor + {m}", rf"{m}+{n}\lfloor x\rfloor"),
        (rf"{w}^{{{m}}}", rf"{n}^{{{m - 1}}}\cdot {n}"),
    )
    answer, gold = kinds[k // 2 % len(kinds)]
    return f"After some work we find that the answer is $\\boxed{{{answer}}}$.", gold, right


def _name(n: int) -> str:
    """A word for a number, letters only."""
    return "Mr " + "".join("abcdefghij"[int(digit)] for digit in str(n)).capitalize() + "son"


def grade_all(cases: list[tuple[str, str, bool]]) -> dict[str, Any]:
    """Seconds and verdicts of one call."""
    start = time.perf_counter()
    verdicts = grade_many([r for r, _, _ in cases], [g for _, g, _ in cases])
    seconds = time.perf_counter() - start
    right = sum((v.verdict == "correct") == want for v, (_, _, want) in zip(verdicts, cases, strict=True))
    rules: dict[str, int] = {}
    for v in verdicts:
        rules[v.rule.partition("/")[2]] = rules.get(v.rule.partition("/")[2], 0) + 1
    return {"answers": len(cases), "seconds": round(seconds, 3), "right_percent": round(100 * right / len(cases), 2), "by_rule": rules}


def math_verify_all(cases: list[tuple[str, str, bool]]) -> dict[str, Any]:
    """The same of math-verify, one by one."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def one(response: str, gold: str) -> bool:
        wanted = parse(f"${gold}$", parsing_timeout=None)
        return bool(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))

    one("\\boxed{\\frac{1}{2}x}", "x/2")
    start = time.perf_counter()
    found = [one(response, gold) for response, gold, _ in cases]
    seconds = time.perf_counter() - start
    right = sum(f == want for f, (_, _, want) in zip(found, cases, strict=True))
    return {"answers": len(cases), "seconds": round(seconds, 3), "right_percent": round(100 * right / len(cases), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--reference", type=int, default=2_000, help="pairs that math-verify is given")
    args = parser.parse_args()
    grade_many([f"\\boxed{{\\vec{{a}}+{k}}}" for k in range(40)], ["\\vec{a}+1"] * 40)  # worker processes run
    integers = [long_text(k) for k in range(args.n)]
    mixed = [latex(k) for k in range(args.n)]
    assert len({(r, g) for r, g, _ in integers + mixed}) == 2 * args.n
    result: dict[str, Any] = {
        "grader_version": VERSION,
        "load_average": round(os.getloadavg()[0], 2),
        "integers_in_long_text": grade_all(integers) | {"characters": sum(len(r) for r, _, _ in integers) // args.n},
        "mixed_latex": grade_all(mixed),
        "math_verify": math_verify_all(mixed[: args.reference]),
    }
    reference = result["math_verify"]
    reference["seconds_for_all"] = round(reference["seconds"] * args.n / args.reference, 1)
    result["times_faster_than_math_verify"] = round(reference["seconds_for_all"] / result["mixed_latex"]["seconds"], 1)
    print(json.dumps(result, indent=1))
    print(machine.save("grader_speed", result))


if __name__ == "__main__":
    main()
