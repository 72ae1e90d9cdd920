"""What a reward is, and how rewards are added up.

A reward has a ``name`` and ``score(prompts, samples) -> RewardOut`` for k samples, with the prompt of each. `Reward` adds sums and weights:
``Math() + 0.2 * Format()``. Plain functions and lambdas of a cell count as rewards, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from rlkit.errors import ConfigError, RewardError
from rlkit.types import Prompt, Sample

RESERVED = ("mean", "std", "no_spread_groups")  # names that `Scored.summary` uses under "reward/"


@dataclass(frozen=True)
class RewardOut:
    """One reward's result on k samples."""

    values: np.ndarray  # (k,) float64
    verdicts: tuple[str | None, ...] | None = None  # k, of a reward that grades answers: "correct" | "wrong" | "unparsed" | "timeout"
    extracted: tuple[str | None, ...] | None = None  # k, the final answers it found


class Reward:
    """Base of all rewards. Subclass it in a cell and define ``score``; it then runs in a worker process that can be killed.

    ``isolated = False`` is for rlkit's own rewards, which cannot hang and run inside the grader. ``each = True`` gives an isolated
    reward one sample a call, with a time limit each; else it is given one shard of whole groups.
    """

    name = "reward"
    isolated = True
    each = False

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        """The values of k samples; ``prompts[i]`` is the prompt of ``samples[i]``."""
        raise NotImplementedError(f"{type(self).__name__} must define score(prompts, samples) -> RewardOut.")

    def __add__(self, other: Any) -> Sum:
        return Sum(weighted(self) + weighted(other))

    def __radd__(self, other: Any) -> Reward:
        return self if isinstance(other, int | float) and other == 0 else Sum(weighted(other) + weighted(self))  # 0: sum([...])

    def __mul__(self, weight: float) -> Sum:
        return Sum(tuple((w * _weight(weight), r) for w, r in weighted(self)))

    __rmul__ = __mul__

    def __neg__(self) -> Sum:
        return self * -1.0

    def __sub__(self, other: Any) -> Sum:
        return self + as_reward(other) * -1.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sum(Reward):
    """A weighted sum. Each part is scored once; the parts are kept unweighted in `Scored.parts`."""

    name = "sum"

    def __init__(self, terms: Sequence[tuple[float, Reward]]) -> None:
        self.terms = tuple(terms)

    def __repr__(self) -> str:
        return " + ".join(f"{w:g} * {r!r}" if w != 1 else repr(r) for w, r in self.terms)


class Function(Reward):
    """``fn(prompt, sample) -> float`` as a reward."""

    each = True

    def __init__(self, fn: Callable[[Prompt, Sample], float], name: str | None = None) -> None:
        self.fn, self.name = fn, name or derived_name(fn)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        values = [finite(self.fn(prompt, sample), self.name) for prompt, sample in zip(prompts, samples, strict=True)]
        return RewardOut(np.array(values, dtype=np.float64))

    def __repr__(self) -> str:
        return self.name


class Batched(Reward):
    """``fn(prompts, samples) -> k floats`` as a reward; it is given one shard of whole groups at a time."""

    def __init__(self, fn: Callable[[list[Prompt], list[Sample]], Sequence[float]], name: str | None = None) -> None:
        self.fn, self.name = fn, name or derived_name(fn)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        return RewardOut(_vector(self.fn(list(prompts), list(samples)), samples, self.name))

    def __repr__(self) -> str:
        return f"batched({self.name})"


class Part(NamedTuple):
    """One term of a reward, under the name that its values get."""

    name: str
    weight: float
    reward: Reward


def function(fn: Callable[[Prompt, Sample], float], name: str | None = None) -> Function:
    """A function ``(prompt, sample) -> float`` as a reward, with a name of your choice."""
    return Function(fn, name)


def batched(fn: Callable[[list[Prompt], list[Sample]], Sequence[float]], name: str | None = None) -> Batched:
    """A function ``(prompts, samples) -> list of floats`` as a reward, for those that are cheaper many at a time. A decorator, too."""
    return Batched(fn, name)


def as_reward(value: Any) -> Reward:
    """A reward, or a function ``(prompt, sample) -> float`` as one.

    Raises:
        ConfigError: neither of them.
    """
    if isinstance(value, type) and issubclass(value, Reward):
        raise ConfigError(f"The reward is the class {value.__name__}; make one with {value.__name__}().")
    if isinstance(value, Reward):
        return value
    if callable(value):
        return Function(value)
    raise ConfigError(f"The reward is {value!r}; it must be a reward of rl.rewards or a function (prompt, sample) -> float.")


def weighted(value: Any) -> tuple[tuple[float, Reward], ...]:
    reward = as_reward(value)
    return reward.terms if isinstance(reward, Sum) else ((1.0, reward),)


def parts_of(value: Any) -> tuple[Part, ...]:
    """The terms of a reward; a name that occurs again gets a number: ``length``, ``length_2``."""
    taken: dict[str, int] = {}
    used = set(RESERVED)
    out = []
    for weight, reward in weighted(value):
        base = str(reward.name).replace("/", "_") or "reward"
        name, count = base, taken.get(base, 1)
        while name in used:
            count += 1
            name = f"{base}_{count}"
        taken[base] = count
        used.add(name)
        out.append(Part(name, weight, reward))
    return tuple(out)


def derived_name(fn: Any) -> str:
    """A name for the values of a function: its own, or ``lambda``."""
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return name.strip("<>")


def finite(value: Any, name: str) -> float:
    """A reward's value as a float.

    Raises:
        RewardError: not a number, NaN or infinite.
    """
    if isinstance(value, bool | Real | np.bool_):
        number = float(value)
    elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # a 0-dimensional array or tensor
        number = float(value.item())
    else:
        shape = getattr(value, "shape", None)
        what = f"an array of shape {tuple(shape)}" if shape is not None else f"{value!r} ({type(value).__name__})"
        raise RewardError(f"Reward {name!r} returned {what[:200]}; it must return one finite number a sample.")
    if not math.isfinite(number):
        raise RewardError(f"Reward {name!r} returned {number}; rewards must be finite.")
    return number


def _vector(values: Any, samples: Sequence[Sample], name: str) -> np.ndarray:
    shape, count = getattr(values, "shape", None), len(samples)
    if shape is not None and tuple(shape) != (count,):
        raise RewardError(f"Reward {name!r} returned shape {tuple(shape)} for {count} samples; it must return ({count},).")
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | dict):
        raise RewardError(
            f"Reward {name!r} returned {type(values).__name__} for {count} samples; it must return a list of {count} numbers."
        )
    if len(values) != count:
        raise RewardError(f"Reward {name!r} returned {len(values)} values for {count} samples; it must return one a sample.")
    try:
        return np.array([finite(value, name) for value in values], dtype=np.float64)
    except RewardError:
        for value, sample in zip(values, samples, strict=True):
            try:
                finite(value, name)
            except RewardError as error:
                raise RewardError(f"{error} That was prompt {sample.prompt.id!r}, sample {sample.index}.") from None
        raise


def checked(out: Any, samples: Sequence[Sample], name: str) -> RewardOut:
    """The result of ``Reward.score`` with its shapes and values checked.

    Raises:
        RewardError: not a RewardOut, the wrong length, or a value that is not finite.
    """
    if not isinstance(out, RewardOut):
        out = RewardOut(out)
    values = _vector(out.values, samples, name)
    for field in ("verdicts", "extracted"):
        found = getattr(out, field)
        if found is not None and len(found) != len(samples):
            raise RewardError(f"Reward {name!r} returned {len(found)} {field} for {len(samples)} samples.")
    return RewardOut(values, _tuple(out.verdicts), _tuple(out.extracted))


def _tuple(values: Any) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _weight(weight: Any) -> float:
    if not isinstance(weight, Real) or isinstance(weight, bool) or not math.isfinite(float(weight)):
        raise ConfigError(f"A reward's weight is {weight!r}; it must be a finite number.")
    return float(weight)
