"""Evaluation, imported as ``rlkit.eval``."""

from rlkit.eval.evaluate import Evaluation, evaluate, wilson

__all__ = ["Evaluation", "evaluate", "wilson"]
