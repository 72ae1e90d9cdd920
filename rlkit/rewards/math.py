"""The rule reward of R1-Zero-style training on maths: is the final answer right?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit import templates
from rlkit.errors import ConfigError, RewardError
from rlkit.rewards.base import Reward, RewardOut, finite
from rlkit.rewards.extract import check_rules
from rlkit.rewards.grading import REL_TOL, TIMEOUT_S, Verdict, grade_many
from rlkit.types import Prompt, Sample


class Math(Reward):
    """A value for each verdict on the final answer.

    "unparsed" means that no final answer was found where ``rules`` allow one (None: as the prompt's template says), "timeout" that
    deciding took longer than ``timeout_s`` (such an answer is not counted as wrong silently: the share is reported). ``rel_tol`` applies
    where a side is written as a decimal. ``meta["choices"]`` of a prompt are the options of a multiple choice.

    Raises:
        ConfigError: an unknown rule, a value that is not finite, a time limit of 0 or below.
        RewardError (from ``score``): a prompt without an answer; the message names its id.
    """

    isolated = False

    def __init__(
        self,
        correct: float = 1.0,
        wrong: float = 0.0,
        unparsed: float = 0.0,
        timeout: float = 0.0,
        *,
        rules: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        rel_tol: float = REL_TOL,
        name: str = "math",
    ) -> None:
        self.name = name
        given = {"correct": correct, "wrong": wrong, "unparsed": unparsed, "timeout": timeout}
        try:
            self.values = {verdict: finite(value, name) for verdict, value in given.items()}
        except RewardError as error:
            raise ConfigError(f"Math({', '.join(f'{k}={v!r}' for k, v in given.items())}): {error}") from None
        self.rules = None if rules is None else check_rules(rules)
        if not timeout_s > 0:
            raise ConfigError(f"Math.timeout_s is {timeout_s!r}; it must be above 0.")
        if not 0 <= rel_tol < 1:
            raise ConfigError(f"Math.rel_tol is {rel_tol!r}; it must be from 0 to below 1.")
        self.timeout_s, self.rel_tol = float(timeout_s), float(rel_tol)

    @classmethod
    def simplerl(cls, **settings: object) -> Math:
        """simpleRL-reason's rule: +1 for a right answer in a box, -0.5 for a wrong one in a box, -1 without a box."""
        return cls(**({"correct": 1.0, "wrong": -0.5, "unparsed": -1.0, "timeout": -0.5, "rules": ("boxed",)} | settings))  # type: ignore[arg-type]

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        by_rules: dict[tuple[str, ...], list[int]] = {}
        for i, prompt in enumerate(prompts):
            if prompt.answer is None:
                raise RewardError(f"Prompt {prompt.id!r} has no answer, which Math needs. Give the task an answer field.")
            by_rules.setdefault(self.rules or templates.rules(prompt.template), []).append(i)
        graded: dict[int, Verdict] = {}
        for rules, where in by_rules.items():  # one pass, unless prompts of several templates are mixed
            verdicts = grade_many(
                [samples[i].text for i in where],
                [prompts[i].answer or "" for i in where],
                rules=rules,
                timeout_s=self.timeout_s,
                rel_tol=self.rel_tol,
                choices=[prompts[i].choices for i in where],
            )
            graded |= dict(zip(where, verdicts, strict=True))
        found = [graded[i] for i in range(len(prompts))]
        values = np.array([self.values[v.verdict] for v in found], dtype=np.float64)
        return RewardOut(values, tuple(v.verdict for v in found), tuple(v.extracted for v in found))

    def __repr__(self) -> str:
        return f"Math({', '.join(f'{k}={v:g}' for k, v in self.values.items())})"
