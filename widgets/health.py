"""`Health`: the sanity gates of a run, each a chip that says how it stands and opens what it means and what to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlkit.reprs import number
from rlkit.widgets.panel import Panel
from rlkit.widgets.picture import Drawing, chips
from rlkit.widgets.watched import Watched

NEWEST = 5  # steps that a gate looks at
STARTING = 5  # first steps: what the entropy fell from

Verdict = tuple[str, str]  # level "good" | "warn" | "bad" | "none", and what was found


@dataclass(frozen=True)
class Gate:
    """One check. ``look`` takes what was read; the limits are rules of thumb, said in ``why``."""

    id: str
    title: str
    why: str
    fix: str
    look: Callable[[Watched], Verdict]


def newest(watched: Watched, name: str, n: int = NEWEST) -> np.ndarray:
    """The metric at the last ``n`` steps that logged a finite value of it, among the newest ``4 * n``."""
    column = watched.steps[name][-4 * n :]
    return column[np.isfinite(column)][-n:]


def above(name: str, warn: float, bad: float, show: Callable[[float], str] = number) -> Callable[[Watched], Verdict]:
    """A gate over the mean of a metric at the newest steps."""

    def look(watched: Watched) -> Verdict:
        values = newest(watched, name)
        if not len(values):
            return "none", "not logged"
        mean = float(values.mean())
        return ("bad" if mean > bad else "warn" if mean > warn else "good"), show(mean)

    return look


def percent(share: float) -> str:
    return f"{share:.0%}"


def constant_reward(watched: Watched) -> Verdict:
    spread = newest(watched, "reward/std")
    if not len(spread):
        return "none", "not logged"
    if (spread == 0).all():
        return "bad", f"all {number(float(newest(watched, 'reward/mean', 1)[0]))}" if len(
            newest(watched, "reward/mean", 1)
        ) else "all equal"
    return ("warn", "at times") if (spread == 0).any() else ("good", f"± {number(float(spread.mean()))}")


def kl(watched: Watched) -> Verdict:
    return above("policy/kl" if len(newest(watched, "policy/kl")) else "policy/approx_kl", 0.1, 0.5)(watched)


def entropy(watched: Watched) -> Verdict:
    last = newest(watched, "policy/entropy")
    if not len(last):
        return "none", "not logged"
    column = watched.steps["policy/entropy"][: 4 * STARTING]
    first = column[np.isfinite(column)][:STARTING]
    start, now = float(first.mean()) if len(first) else 0.0, float(last.mean())
    if len(watched.steps) < 2 * STARTING or start <= 0:
        return "good", number(now)
    share = now / start
    return ("bad" if share < 0.03 else "warn" if share < 0.1 else "good"), f"{number(now)}, {share:.0%} of its start"


def stale_sync(watched: Watched) -> Verdict:
    if "rollout" not in watched.versions:
        return "none", "no rollout yet"
    lag = watched.lag
    return ("good", "on policy") if lag <= 0 else ("warn" if lag == 1 else "bad", f"{lag} version{'s' if lag > 1 else ''} behind")


def not_finite(watched: Watched) -> Verdict:
    if not len(watched.steps):
        return "none", "no step yet"
    bad = watched.steps.not_finite
    if not bad:
        return "good", "none"
    recent = any(np.isposinf(watched.steps[name][-NEWEST:]).any() for name in bad)
    first = next(iter(bad))
    return ("bad" if recent else "warn"), f"{first} at {bad[first]} step{'s' if bad[first] > 1 else ''}" + (
        f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    )


GATES = (
    Gate(
        "constant",
        "Reward",
        "When every sample of the last steps has the same reward, there is nothing to prefer: every advantage is zero and the update does "
        "nothing.",
        "Read some samples: is the answer parsed at all? Take easier problems or more samples a prompt, or add a part to the reward that "
        "is reached at times (a format, for example). If all are right, the task is done: take harder problems.",
        constant_reward,
    ),
    Gate(
        "spread",
        "Groups without spread",
        "Share of prompts whose samples all got the same reward, over the last 5 steps. Such a group has no advantage and teaches "
        "nothing; above 60 % most of the sampling is spent for nothing, above 90 % nearly all.",
        "Raise n (samples a prompt), sample at a higher temperature, or choose prompts that are solved at times but not always.",
        above("reward/no_spread_groups", 0.6, 0.9, percent),
    ),
    Gate(
        "gap",
        "Log-prob gap",
        "Mean difference between the log-probs of the sampler and those of the learner for the same tokens, in nats, over the last 5 "
        "steps. Both hold the same weights, so it should be rounding only: below 0.02 also in bf16. Above 0.1 the update is computed for "
        "another policy than the one that sampled.",
        "Check that sampler.sync(learner) runs at every step, that both use the same dtype and chat template, and that no quantisation or "
        "adapter is on one side only. max_logprob_gap of the learner refuses such batches.",
        above("policy/logprob_gap", 0.02, 0.1),
    ),
    Gate(
        "kl",
        "KL",
        "How far the policy has moved, in nats a token, over the last 5 steps: from the reference where the loss has one, else within the "
        "update. Above 0.1 steps are large, above 0.5 the model is usually falling apart.",
        "Lower lr, raise the KL coefficient or the number of samples, make fewer updates a batch; go back to a checkpoint if the samples "
        "are no longer language.",
        kl,
    ),
    Gate(
        "entropy",
        "Entropy",
        "Mean entropy of the policy's next token over the last 5 steps, beside that of the first 5. Falling is how learning looks; below "
        "a tenth of its start the policy hardly tries anything any more, and stops finding better answers.",
        "Sample at a higher temperature, lower lr, use a wider upper clip (clip_high), add an entropy bonus or a KL term; take a "
        "checkpoint from before the fall.",
        entropy,
    ),
    Gate(
        "truncation",
        "Truncated",
        "Share of samples that were cut at max_tokens, over the last 5 steps. A cut answer is graded wrong whatever it was about to say; "
        "above 10 % that biases the policy, above 50 % the reward is mostly about length.",
        "Raise max_tokens, shape the reward by length before the limit, or look whether the model repeats itself or never ends its answer.",
        above("length/truncated", 0.1, 0.5, percent),
    ),
    Gate(
        "stale",
        "Sync",
        "How many policy versions the last step's rollouts were behind the learner. On policy is 0; with every version behind, the update "
        "is more of an extrapolation.",
        "Call sampler.sync(learner) after learner.update and before the next rollout, or allow the lag on purpose with max_lag.",
        stale_sync,
    ),
    Gate(
        "finite",
        "Not finite",
        "Metrics that were NaN or infinite. In the curves they are gaps, marked with a cross.",
        "One NaN in a gradient spreads: look which metric was first, lower lr, set max_grad_norm, and go back to a checkpoint from before "
        "if the weights took it.",
        not_finite,
    ),
)


class Health(Panel):
    """Chips for the sanity gates; see `GATES` for the limits."""

    kind: ClassVar[str] = "health"
    title: ClassVar[str] = "Health"

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"gates": [{"id": g.id, "title": g.title, "why": g.why, "fix": g.fix} for g in GATES]}

    def found(self) -> dict[str, Verdict]:
        """Gate -> (level, words), of what was read so far."""
        return {gate.id: gate.look(self.watched) for gate in GATES}

    def news(self) -> dict[str, Any]:
        return {gate: {"level": level, "value": value} for gate, (level, value) in self.found().items()}

    def drawings(self) -> list[Drawing]:
        found = self.found()
        return [chips([(gate.title, found[gate.id][1], found[gate.id][0]) for gate in GATES])]

    def text(self) -> str:
        found = self.found()
        words = [
            f"{gate.title.lower()} {found[gate.id][1]} ({found[gate.id][0]})" for gate in GATES if found[gate.id][0] in ("warn", "bad")
        ]
        return f"Health({self.watched.name!r}: {', '.join(words) or 'nothing to say'})"
