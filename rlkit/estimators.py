"""From rewards to advantages: one pure function an estimator, on arrays (P, G) of P prompts with G samples each.

An estimator is any callable ``(rewards (P, G) float64, **settings) -> (P, G)``; `ESTIMATORS` names the built-in ones, and a function
of a cell can be given instead of a name. ``needs`` says the smallest group that an estimator is defined for. Estimators that give a
value a token (GAE and the like) need the learner's values as well and have their own seam: they will return one array a shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.errors import BatchError, ConfigError, nearest
from rlkit.types import Batch, Scored, require

Estimate = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Estimator:
    """A named estimator: ``fn(rewards (P, G), **settings) -> (P, G)`` and the smallest G it takes."""

    name: str
    fn: Estimate
    needs: int = 1


def grpo(rewards: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """A = (r - mean of the group) / (std of the group + eps). Shape (P, G).

    DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision: ``A_i,t = (r_i - mean(r)) / std(r)``. The paper does not say which
    standard deviation; this is the population one (``ddof=0``), and ``eps`` keeps groups without spread at 0 instead of NaN.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, keepdims=True) + eps)


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """A = r - mean of the group. Shape (P, G).

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): GRPO without the division by the group's standard
    deviation, which weights easy and hard questions more. Its other half, no division by the response length, is
    ``aggregate="constant"`` of `Learner.update`.
    """
    return rewards - rewards.mean(axis=1, keepdims=True)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other G - 1 rewards of the group. Shape (P, G).

    REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics", section 2.2, RLOO estimator; Kool et al. 2019).
    """
    group = rewards.shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (group - 1)
    return rewards - others


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator("grpo", grpo, needs=2),
    "dr_grpo": Estimator("dr_grpo", dr_grpo, needs=2),
    "rloo": Estimator("rloo", rloo, needs=2),
}


def register(name: str, fn: Estimate, *, needs: int = 1) -> None:
    """Give an estimator a name that `advantages` knows in this process. A name that is taken is replaced."""
    ESTIMATORS[name] = Estimator(name, fn, needs)


def find(estimator: str | Estimate) -> Estimator:
    """The estimator of a name, or a callable as one.

    Raises:
        ConfigError: an unknown name.
    """
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            raise ConfigError(f"There is no estimator {estimator!r}{nearest(estimator, ESTIMATORS) or '.'} Known: {', '.join(ESTIMATORS)}.")
        return ESTIMATORS[estimator]
    if callable(estimator):
        return Estimator(getattr(estimator, "__name__", type(estimator).__name__).strip("<>"), estimator)
    raise ConfigError(f"estimator is {estimator!r}; it must be one of {', '.join(ESTIMATORS)} or a function (rewards (P, G)) -> (P, G).")


def advantages(scored: Scored, estimator: str | Estimate = "grpo", *, drop_no_spread: bool = False, **settings: Any) -> Batch:
    """Turn scored rollouts into a batch for the learner.

    Groups whose rewards are all equal teach nothing under these estimators. They are counted in ``no_spread_groups``;
    ``drop_no_spread=True`` leaves them out of the update, so that they do not dilute the loss's mean (DAPO, Yu et al. 2025,
    section 3.2, filters them the same way). ``settings`` go to the estimator, such as ``eps`` of `grpo`.

    Raises:
        BatchError: ``scored`` is not a `Scored`, the group is smaller than the estimator needs, or its result is not a finite (P, G).
        ConfigError: an estimator or a setting that does not exist.
    """
    require(scored, Scored, "advantages(...)", "rl.score(rollouts, reward)")
    chosen = find(estimator)
    prompts, group = scored.shape
    if group < chosen.needs:
        raise BatchError(
            f"{chosen.name} compares the samples of a group and needs at least {chosen.needs} samples of each prompt; there is {group}. "
            f"Generate with n={max(chosen.needs, 8)}, or give an estimator that works on single samples."
        )
    _check_settings(chosen, settings)
    rewards = np.asarray(scored.rewards, dtype=np.float64)
    found = np.asarray(chosen.fn(rewards, **settings), dtype=np.float64)
    if found.shape != (prompts, group):
        raise BatchError(f"Estimator {chosen.name!r} returned shape {found.shape}; it must return (P, G) = {(prompts, group)}.")
    if not np.isfinite(found).all():
        at = tuple(np.argwhere(~np.isfinite(found))[0])
        name = scored.rollouts.prompt_ids[at[0]]
        raise BatchError(f"Estimator {chosen.name!r} returned {found[at]} for prompt {name!r}; advantages must be finite.")
    flat = np.ptp(rewards, axis=1) == 0
    return Batch(
        scored=scored,
        advantages=found.astype(np.float32),
        keep=~flat if drop_no_spread else np.ones(prompts, dtype=bool),
        estimator=chosen.name,
        no_spread_groups=int(flat.sum()),
    )


def _check_settings(chosen: Estimator, settings: Mapping[str, Any]) -> None:
    if not settings:
        return
    known = inspect.signature(chosen.fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    names = list(known)[1:]
    for key in settings:
        if key not in names:
            listed = ", ".join(names) or "none"
            raise ConfigError(f"Estimator {chosen.name!r} has no setting {key!r}{nearest(key, names) or '.'} Known: {listed}.")
