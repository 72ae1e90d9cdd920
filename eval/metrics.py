"""Who decides whether a response is right: the grader, or a function of yours for a data set of yours.

    def even(response, prompt):
        return response.strip().endswith(("0", "2", "4", "6", "8"))

    rlkit.eval.register_metric("parity", even)

`rlkit.eval.evaluate` then asks ``even`` for the set "parity". It runs in worker processes that can be killed, as a reward does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.errors import ConfigError, RewardError
from rlkit.rewards.grading import VERDICTS, Verdict, grade_many
from rlkit.rewards.pool import KillablePool, Task
from rlkit.types import Prompt

Metric = Callable[[str, Prompt], "bool | str | Verdict"]

METRICS: dict[str, Metric] = {}


def register_metric(dataset: str, metric: Metric) -> None:
    """Let ``metric(response, prompt)`` decide for the data set of that name, in place of the grader.

    It returns True or False, one of the verdicts "correct", "wrong", "unparsed", "timeout", or a `Verdict` with the extracted answer.

    Raises:
        ConfigError: ``metric`` is not a function.
    """
    if not isinstance(dataset, str):
        raise ConfigError(f"register_metric({dataset!r}, ...): the first argument is the data set's name.")
    METRICS[dataset] = check_metric(metric)


def check_metric(metric: Any) -> Metric:
    """``metric`` itself.

    Raises:
        ConfigError: it is not a function.
    """
    if not callable(metric):
        raise ConfigError(f"A metric must be a function (response, prompt) -> bool; it is {metric!r}.")
    return metric  # type: ignore[no-any-return]


def grade_responses(
    responses: Sequence[str],
    prompts: Sequence[Prompt],
    rules: Sequence[str],
    *,
    metric: Metric | None = None,
    timeout_s: float,
    rel_tol: float,
) -> list[Verdict]:
    """One verdict a response; ``prompts[i]`` is that of ``responses[i]``.

    Raises:
        RewardError: a prompt without an answer, or a metric that crashed or returned something else; names the prompt's id.
    """
    if metric is not None:
        return _by_metric(metric, responses, prompts, timeout_s)
    choices = [prompt.choices for prompt in prompts]
    return grade_many(responses, gold_answers(prompts), rules=rules, timeout_s=timeout_s, rel_tol=rel_tol, choices=choices)


def gold_answers(prompts: Sequence[Prompt]) -> list[str]:
    """The answers that the grader compares with.

    Raises:
        RewardError: a prompt has none; names its id.
    """
    golds = []
    for prompt in prompts:
        if prompt.answer is None:
            raise RewardError(f"Problem {prompt.id!r} has no answer to grade against; give the task an answer field, or register a metric.")
        golds.append(prompt.answer)
    return golds


def _by_metric(metric: Metric, responses: Sequence[str], prompts: Sequence[Prompt], timeout_s: float) -> list[Verdict]:
    import cloudpickle

    outcomes = _pool().run(Task.of(cloudpickle.dumps(_Call(metric))), list(zip(responses, prompts, strict=True)), timeout_s)
    verdicts = []
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        name = getattr(metric, "__name__", repr(metric))
        if outcome is not None and outcome.status == "timeout":
            verdicts.append(Verdict("timeout", None, f"{name}/timeout"))
        elif outcome is None or outcome.status != "ok":
            detail = "no answer" if outcome is None else f"{outcome.status}: {outcome.value}"
            raise RewardError(f"The metric {name!r} failed on problem {prompt.id!r}: {detail}")
        else:
            verdicts.append(_verdict(outcome.value, name, prompt))
    return verdicts


@functools.cache
def _pool() -> KillablePool:
    """This process's pool for metrics: one for all parts of an evaluation."""
    return KillablePool()


class _Call:
    """A metric as a function of one item, which the pool's workers can load."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def __call__(self, item: tuple[str, Prompt]) -> Any:
        return self.metric(*item)


def _verdict(value: Any, name: str, prompt: Prompt) -> Verdict:
    if isinstance(value, Verdict) and value.verdict in VERDICTS:
        return value
    if isinstance(value, str) and value in VERDICTS:
        return Verdict(value, None, name)
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's as well
        return Verdict("correct" if value else "wrong", None, name)
    raise RewardError(
        f"The metric {name!r} returned {value!r} for problem {prompt.id!r}; it must return True, False, one of {', '.join(VERDICTS)}, "
        "or a Verdict."
    )
