"""Evaluation, imported as ``rlkit.eval``: `evaluate` a model or a live sampler, `compare` two, and the public maths sets."""

from rlkit.eval.compare import Comparison, compare
from rlkit.eval.evaluation import evaluate
from rlkit.eval.intervals import wilson
from rlkit.eval.metrics import register_metric
from rlkit.eval.result import Evaluation, Evaluations, load
from rlkit.eval.spec import EvalSpec

__all__ = ["Comparison", "EvalSpec", "Evaluation", "Evaluations", "compare", "evaluate", "load", "register_metric", "wilson"]
