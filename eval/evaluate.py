"""Accuracy of what a sampler answers, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.errors import DataError
from rlkit.reprs import html_table, number

if TYPE_CHECKING:
    from rlkit.sampler import Sampler
    from rlkit.tasks import Tasks
    from rlkit.types import Scored


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. ``scored`` leads to every response; its shards live as long as the cluster keeps them."""

    dataset: str
    split: str
    accuracy: float  # share of samples graded correct
    low: float  # 95 % Wilson interval
    high: float
    n_prompts: int
    n_samples: int
    mean_length: float  # tokens
    truncated: float  # share of samples that hit max_tokens
    unparsed: float  # share of samples without an answer that could be read
    policy_version: int
    seconds: float
    scored: Scored

    def __repr__(self) -> str:
        return (
            f"Evaluation({self.dataset}/{self.split}: {self.accuracy:.1%} correct [{self.low:.1%}, {self.high:.1%}], "
            f"{self.n_prompts} problems x {self.n_samples // self.n_prompts}, {self.mean_length:.1f} tokens, "
            f"policy version {self.policy_version})"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("accuracy", f"{self.accuracy:.1%}, 95 % interval {self.low:.1%} to {self.high:.1%}"),
            ("problems x samples", f"{self.n_prompts} x {self.n_samples // self.n_prompts}"),
            ("response length", f"{number(self.mean_length)} tokens, {self.truncated:.1%} truncated"),
            ("no answer found", f"{self.unparsed:.1%}"),
            ("policy version", self.policy_version),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return html_table(("", ""), rows, caption=f"{self.dataset}/{self.split}")


def evaluate(
    sampler: Sampler,
    tasks: str | Tasks,
    split: str = "test",
    *,
    n: int = 1,
    limit: int | None = None,
    reward: Any = None,
    progress: bool = False,
    **sampling: Any,
) -> Evaluation:
    """Greedy accuracy (unless ``temperature`` says otherwise) of a live sampler on a task set.

    Args:
        sampler: its current weights are evaluated; sync first if they should be the learner's.
        tasks: a `Tasks`, or a name for `rlkit.load_tasks` with ``split``.
        n: samples a problem.
        limit: only the first so many problems.
        reward: what grades; ``rlkit.rewards.Math()`` by default. It must give verdicts.
        sampling: fields of `rlkit.SampleSpec`.

    Raises:
        DataError: the reward gives no verdicts, so that there is no accuracy.
    """
    import rlkit as rl

    found = rl.load_tasks(tasks, split=split) if isinstance(tasks, str) else tasks
    prompts = found.take(len(found) if limit is None else min(limit, len(found)))
    rollouts = sampler.generate(prompts, n=n, progress=progress, **({"temperature": 0.0, "logprobs": False} | sampling))
    scored = rl.score(rollouts, rl.rewards.Math() if reward is None else reward)
    if "correct" not in scored.verdicts:
        raise DataError("evaluate() needs a reward that grades answers (such as rlkit.rewards.Math); this one gives no verdicts.")
    correct = scored.verdicts["correct"]
    low, high = wilson(int(correct.sum()), correct.size)
    return Evaluation(
        dataset=found.name,
        split=found.split,
        accuracy=float(correct.mean()),
        low=low,
        high=high,
        n_prompts=correct.shape[0],
        n_samples=correct.size,
        mean_length=float(rollouts.lengths.mean()),
        truncated=float(rollouts.truncated.mean()),
        unparsed=float(scored.verdicts["unparsed"].mean()) if "unparsed" in scored.verdicts else 0.0,
        policy_version=rollouts.policy_version,
        seconds=rollouts.seconds + scored.seconds,
        scored=scored,
    )


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927, "Probable inference"), 95 % by default.

    Samples of one problem are treated as independent; with several samples a problem the interval is too narrow.
    """
    if n == 0:
        return 0.0, 1.0
    p = hits / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
