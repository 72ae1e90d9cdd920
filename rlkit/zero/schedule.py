"""The learning rate as a function of the optimizer step. No state: a resumed run asks for the next step and gets the same number."""

from __future__ import annotations

import math

from rlkit.config import TrainSpec


def lr_at(step: int, spec: TrainSpec) -> float:
    """The learning rate of optimizer step ``step`` (0 is the first).

    Linear warm-up over ``warmup_steps`` (the first step already has ``lr / warmup_steps``), then constant, or linear or cosine decay
    that reaches ``min_lr_ratio * lr`` at ``total_steps`` and stays there.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant" or spec.total_steps is None:
        return spec.lr
    span = max(1, spec.total_steps - spec.warmup_steps)
    done = min(1.0, (step - spec.warmup_steps) / span)
    left = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * left)
