"""The comparison that only runs in a worker process of the pool: math-verify, which parses LaTeX with a grammar and never evaluates text.

Import it nowhere else: it loads sympy, and one comparison runs at import so that the first real one has its full time.
"""

from __future__ import annotations

import logging
import warnings

from math_verify import LatexExtractionConfig, parse, verify

from rlkit.rewards.equivalence import compare

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
warnings.simplefilter("ignore")


def decide(item: tuple[str, str, float, tuple[str, ...] | None]) -> tuple[bool, str]:
    """(equal, rule) for (answer, gold, relative tolerance, option texts)."""
    answer, gold, rel_tol, options = item
    found = compare(answer, gold, rel_tol=rel_tol, leaf=same_expression, options=options)
    return bool(found.equal), found.rule


def same_expression(answer: str, gold: str) -> bool:
    """Whether two single LaTeX expressions are equal to math-verify."""
    config = [LatexExtractionConfig()]  # no ExprExtractionConfig: it would give the raw text to sympy's parse_expr, which evaluates it
    golds = parse(f"\\boxed{{{gold}}}", config, parsing_timeout=None, raise_on_error=False)
    answers = parse(f"\\boxed{{{answer}}}", config, parsing_timeout=None, raise_on_error=False)
    if not golds or not answers:
        return False
    return bool(verify(golds, answers, timeout_seconds=None, raise_on_error=False))


same_expression("\\frac{1}{2}x", "x/2")
