"""Grade a response against the gold answer: extract the final answer, then decide whether it is the same.

Most answers are decided in this process by rules that cannot hang: the same text, the same number, the same choice, the same elements,
the same value. The rest goes to math-verify in worker processes that are killed when an expression runs past its time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.errors import RewardError
from rlkit.rewards.equivalence import compare
from rlkit.rewards.extract import RULES, check_rules, extract
from rlkit.rewards.pool import KillablePool, Task

VERSION = 3  # part of every cache key that depends on verdicts
VERDICTS = ("correct", "wrong", "unparsed", "timeout")
TIMEOUT_S = 5.0
REL_TOL = 1e-4
_CACHE_SIZE = 1 << 16


class Verdict(NamedTuple):
    """``verdict``: "correct", "wrong", "unparsed" (no final answer found) or "timeout". ``rule`` says what decided.

    The rule is ``not_found``, or the extraction rule and one of ``exact``, ``numeric``, ``choice``, ``option``, ``text``, ``elements``,
    ``value``, ``unit``, ``base``, ``kind``, ``symbolic``, ``empty``, ``too_long``, ``too_deep``, ``memory``, ``crash`` and ``timeout``, as
    in ``boxed/numeric``.
    """

    verdict: str
    extracted: str | None
    rule: str


_Key = tuple[str, str, float, tuple[str, ...] | None]  # answer, gold, relative tolerance, option texts


def grade(
    response: str,
    gold: str,
    *,
    rules: Sequence[str] = RULES,
    timeout_s: float = TIMEOUT_S,
    rel_tol: float = REL_TOL,
    choices: Sequence[str] | None = None,
) -> Verdict:
    """The verdict on one response; see `grade_many`. ``choices`` are this question's option texts."""
    return grade_many([response], [gold], rules=rules, timeout_s=timeout_s, rel_tol=rel_tol, choices=[choices])[0]


def grade_many(
    responses: Sequence[str],
    golds: Sequence[str],
    *,
    rules: Sequence[str] = RULES,
    timeout_s: float = TIMEOUT_S,
    rel_tol: float = REL_TOL,
    choices: Sequence[Sequence[str] | None] | None = None,
    pool: KillablePool | None = None,
) -> list[Verdict]:
    """One verdict a response, in order.

    ``rules`` names where a final answer may stand (see `rlkit.rewards.extract.RULES`); the first that finds one wins. ``timeout_s`` is
    the limit of one symbolic comparison, in seconds of computing. ``rel_tol`` applies where one side is written as a decimal.
    ``choices`` gives for each item the texts of its options A, B, C, ... (None: it has none): a letter and its
    option's text are then one answer, whichever the gold is.

    Raises:
        ConfigError: an unknown extraction rule, or none.
        RewardError: worker processes do not start.
        ValueError: ``responses``, ``golds`` and ``choices`` are not of one length.
    """
    rules = check_rules(rules)
    out: list[Verdict | None] = [None] * len(responses)
    slow: dict[_Key, list[int]] = {}
    froms: list[str] = [""] * len(responses)
    extracted: list[str] = [""] * len(responses)
    each = choices if choices is not None else [None] * len(responses)
    for i, (response, gold, texts) in enumerate(zip(responses, golds, each, strict=True)):
        found = extract(response, rules)
        if found is None:
            out[i] = Verdict("unparsed", None, "not_found")
            continue
        answer, where = found
        options = tuple(texts) if texts else None
        equal, rule = (True, "exact") if answer == gold else compare(answer, gold, rel_tol=rel_tol, options=options)
        if equal is not None:
            out[i] = Verdict("correct" if equal else "wrong", answer, f"{where}/{rule}")
            continue
        froms[i], extracted[i] = where, answer
        slow.setdefault((answer, gold, rel_tol, options), []).append(i)
    if slow:
        for key, (verdict, rule) in _symbolic(list(slow), timeout_s, pool or shared_pool()).items():
            for i in slow[key]:
                out[i] = Verdict(verdict, extracted[i], f"{froms[i]}/{rule}")
    return [v for v in out if v is not None]


def shared_pool() -> KillablePool:
    """This process's pool for symbolic comparisons; its workers start with the first one that needs them."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = KillablePool(cpu_clock=True)
        return _pool


_pool: KillablePool | None = None
_pool_lock = threading.Lock()
_DECIDE = Task.named("rlkit.rewards.symbolic", "decide")
_decided: dict[_Key, tuple[str, str]] = {}


def _symbolic(keys: Sequence[_Key], timeout_s: float, pool: KillablePool) -> dict[_Key, tuple[str, str]]:
    """Verdicts from the pool; those decided before are remembered, time-outs are not."""
    new = [k for k in keys if k not in _decided]
    found = {k: _decided[k] for k in keys if k in _decided}
    for key, outcome in zip(new, pool.run(_DECIDE, new, timeout_s), strict=True):
        if outcome is None or outcome.status == "unloadable":
            detail = "" if outcome is None else f": {outcome.value[0]}: {outcome.value[1]}"
            raise RewardError(f"The grader could not be loaded in a worker process{detail}.")
        if outcome.status == "ok":
            equal, rule = outcome.value
            found[key] = ("correct" if equal else "wrong", rule)
        elif outcome.status == "timeout":
            found[key] = ("timeout", "timeout")
        else:  # an expression that math-verify cannot take (deep recursion, no memory left) is not the gold answer
            found[key] = ("wrong", "memory" if outcome.status == "memory" else "crash")
        if found[key][0] != "timeout":
            if len(_decided) >= _CACHE_SIZE:
                _decided.clear()
            _decided[key] = found[key]
    return found
