"""Rewards: ``rl.rewards.Math() + 0.2 * rl.rewards.Format()``, or any function ``(prompt, sample) -> float``."""

from rlkit.rewards.base import Batched, Function, Reward, RewardOut, Sum, batched, function
from rlkit.rewards.format import Format
from rlkit.rewards.grading import Verdict, grade, grade_many
from rlkit.rewards.length import Length
from rlkit.rewards.math import Math

__all__ = [
    "Batched",
    "Format",
    "Function",
    "Length",
    "Math",
    "Reward",
    "RewardOut",
    "Sum",
    "Verdict",
    "batched",
    "function",
    "grade",
    "grade_many",
]
