"""Shares with honest intervals: accuracy over problems and samples, pass@k, majority@k, paired differences. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

Z95 = 1.959964


def wilson(hits: float, n: float, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927, "Probable inference"), 95 % by default. ``n`` may be an effective number."""
    if n <= 0:
        return 0.0, 1.0
    p = hits / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, p * (1 - p)) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def accuracy_interval(correct: np.ndarray, z: float = Z95) -> tuple[float, float]:
    """95 % interval of the mean of ``correct`` (P, G) bool, with the samples of one problem counted as dependent.

    Wilson's interval with an effective number of samples: p (1 - p) over the variance of the mean, which is taken from the spread of the
    problems' own means (Korn and Graubard 1998, eq. 2). It lies between P, when all samples of a problem agree, and P x G. With one
    sample a problem it is Wilson's interval.
    """
    problems, samples = correct.shape
    p = float(correct.mean())
    if samples == 1 or problems < 2 or p in (0.0, 1.0):
        effective = float(problems)
    else:
        variance = float(correct.mean(axis=1).var(ddof=1)) / problems
        effective = problems * samples if variance == 0 else min(max(p * (1 - p) / variance, problems), problems * samples)
    return wilson(p * effective, effective, z)


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Mean over problems of ``1 - C(n - c, k) / C(n, k)``: the unbiased estimator of the chance that one of k samples is right.

    Chen et al. 2021, "Evaluating large language models trained on code", eq. 1. ``correct`` is (P, n) bool, k at most n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be from 1 to {n}.")
    hits = correct.sum(axis=1)
    return float(np.mean([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in hits]))


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4 ... and n itself: the k for which pass@k is reported."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def majority(
    answers: Sequence[str | None], correct: Sequence[bool], same: Callable[[str, str], bool], key: Callable[[str], Hashable] = lambda a: a
) -> float:
    """Whether the most frequent answer of one problem's samples is right; the mean over those that tie. 0 when none has an answer.

    Self-consistency (Wang et al. 2022). Answers with one ``key`` are one answer, and so are those of which ``same`` says so.
    """
    groups: list[tuple[str, list[bool]]] = []
    index: dict[Hashable, int] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is None:
            continue
        found = index.get(key(answer))
        if found is None:
            found = next((i for i, (first, _) in enumerate(groups) if same(answer, first)), len(groups))
            index[key(answer)] = found
            if found == len(groups):
                groups.append((answer, []))
        groups[found][1].append(bool(right))
    if not groups:
        return 0.0
    most = max(len(members) for _, members in groups)
    best = [members for _, members in groups if len(members) == most]
    return float(np.mean([np.mean(members) for members in best]))


def paired(a: np.ndarray, b: np.ndarray, z: float = Z95) -> tuple[float, float, float]:
    """Mean of b - a over the same P problems, each a share of samples, with its 95 % interval from the differences' own spread."""
    d = np.asarray(b, float) - np.asarray(a, float)
    half = z * float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf
    mean = float(d.mean())
    return mean, max(-1.0, mean - half), min(1.0, mean + half)


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p-value that ``gained`` of ``gained + lost`` changes is a fair coin (the exact McNemar test)."""
    n, least = gained + lost, min(gained, lost)
    return 1.0 if n == 0 else min(1.0, 2.0 * sum(math.comb(n, i) for i in range(least + 1)) / 2**n)
