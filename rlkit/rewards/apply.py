"""Apply a reward to one shard of rollouts: rlkit's own rewards here, everything else in worker processes that can be killed."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit.errors import DeadlineError, RewardError
from rlkit.rewards.base import Reward, RewardOut, checked, parts_of
from rlkit.rewards.grading import VERDICTS
from rlkit.rewards.pool import KillablePool, Outcome, Task
from rlkit.types import Prompt, RolloutShard, Sample, ScoreShard

NO_VERDICT = 255
SHOWN = 300  # characters of a response in an error message


Plain = tuple[list[float], tuple[str | None, ...] | None, tuple[str | None, ...] | None]  # values, verdicts, extracted


class Step(NamedTuple):
    """One term of a reward, ready to travel to a grader."""

    name: str
    weight: float
    reward: Reward | None  # one of rlkit's own, to run in the grader
    payload: bytes | None  # else: a pickled `Call`, to run in a worker process
    each: bool


class Call:
    """What a worker process runs: a reward on some samples, its result checked and as plain values, which pickle fast."""

    def __init__(self, reward: Reward, name: str) -> None:
        self.reward, self.name = reward, name

    def __call__(self, item: tuple[list[Prompt], list[Sample]]) -> Plain:
        prompts, samples = item
        out = checked(self.reward.score(prompts, samples), samples, self.name)
        return out.values.tolist(), out.verdicts, out.extracted


def plan(reward: Any) -> tuple[Step, ...]:
    """The terms of a reward, pickled where they are the user's code.

    Raises:
        ConfigError: not a reward.
        RewardError: a function that cannot be pickled.
    """
    out = []
    for name, weight, part in parts_of(reward):
        if part.isolated:
            out.append(Step(name, weight, None, pack(part, name), part.each))
        else:
            out.append(Step(name, weight, part, None, False))
    return tuple(out)


def pack(reward: Reward, name: str) -> bytes:
    """Pickle a reward so that workers need not have the module it was written in, unless that is installed."""
    import pickle

    import cloudpickle

    with _by_value(getattr(reward, "fn", None), type(reward)):
        try:
            return cloudpickle.dumps(Call(reward, name))
        except (TypeError, pickle.PicklingError, AttributeError) as error:
            raise RewardError(
                f"Reward {name!r} cannot be sent to the graders, because something it uses cannot be pickled: {error}. "
                "Create such things (locks, files, connections) inside of the function."
            ) from error


@contextmanager
def _by_value(*things: Any) -> Iterator[None]:
    """Pickle the code of ``things`` itself when it comes from a file that is not installed, such as a helper next to the notebook."""
    import cloudpickle

    paths = sysconfig.get_paths()
    installed = [Path(paths[k]).resolve() for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    chosen = []
    for thing in things:
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__.split(".")[0] in ("rlkit", "__main__"):
            continue
        known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not known and not any(Path(file).resolve().is_relative_to(p) for p in installed):
            chosen.append(module)
    chosen = list({id(m): m for m in chosen}.values())
    for module in chosen:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in chosen:
            cloudpickle.unregister_pickle_by_value(module)


def function_pool() -> KillablePool:
    """This process's pool for rewards that users wrote; no bound on their memory, since they may load what they like."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = KillablePool(memory_limit=None)
        return _pool


_pool: KillablePool | None = None
_lock = threading.Lock()


def score_shard(shard: RolloutShard, steps: Sequence[Step], timeout_s: float) -> ScoreShard:
    """Rewards of one shard, p prompts x G samples.

    Raises:
        RewardError: a reward crashed or returned something unusable; names the prompt's id and shows the response.
        DeadlineError: a user's reward ran past ``timeout_s`` on one sample (or, when it takes many at a time, on the shard).
    """
    samples = list(shard.samples())
    prompts = [s.prompt for s in samples]
    shape = (len(shard.prompts), shard.group_size)
    total = np.zeros(shape)
    parts: dict[str, np.ndarray] = {}
    verdicts: tuple[str | None, ...] | None = None
    extracted: tuple[str | None, ...] | None = None
    for step in steps:
        if step.reward is not None:
            out = checked(step.reward.score(prompts, samples), samples, step.name)
        else:
            out = _isolated(step, prompts, samples, timeout_s)
        values = out.values.reshape(shape)
        parts[step.name] = values.astype(np.float32)
        total += step.weight * values
        if verdicts is None:
            verdicts = out.verdicts
        if extracted is None:
            extracted = out.extracted
    nothing = (None,) * len(samples)
    return ScoreShard(total.astype(np.float32), parts, verdicts or nothing, extracted or nothing)


def summary(scores: ScoreShard) -> dict[str, Any]:
    """What the driver keeps of a shard: rewards and parts (p, G) float32, verdict codes (p*G,) uint8 or None."""
    graded = any(v is not None for v in scores.verdicts)
    codes = np.array([VERDICTS.index(v) if v in VERDICTS else NO_VERDICT for v in scores.verdicts], dtype=np.uint8) if graded else None
    return {"rewards": scores.rewards, "parts": dict(scores.parts), "verdicts": codes}


def _isolated(step: Step, prompts: list[Prompt], samples: list[Sample], timeout_s: float) -> RewardOut:
    assert step.payload is not None
    items = [([p], [s]) for p, s in zip(prompts, samples, strict=True)] if step.each else [(prompts, samples)]
    outcomes = function_pool().run(Task.of(step.payload), items, timeout_s, stop_at_failure=True)
    for item, outcome in zip(items, outcomes, strict=True):
        if outcome is not None and outcome.status != "ok":
            raise _error(step.name, item[1], outcome, timeout_s)
    results: list[Plain] = [o.value for o in outcomes if o is not None]
    return RewardOut(np.array([v for r in results for v in r[0]]), _joined(results, 1), _joined(results, 2))


def _joined(results: Sequence[Plain], field: int) -> tuple[str | None, ...] | None:
    found: list[Any] = [r[field] for r in results]
    if all(f is None for f in found):
        return None
    return tuple(v for f, r in zip(found, results, strict=True) for v in (f or (None,) * len(r[0])))


def _error(name: str, samples: Sequence[Sample], outcome: Outcome, timeout_s: float) -> Exception:
    first = samples[0]
    if len(samples) == 1:
        where = f"prompt {first.prompt.id!r}, sample {first.index}"
        text = first.text if len(first.text) <= SHOWN else first.text[:SHOWN] + "…"
        shown = f"\nResponse: {text!r}"
    else:
        where, shown = f"the {len(samples)} samples of prompts {first.prompt.id!r} to {samples[-1].prompt.id!r}", ""
    if outcome.status == "timeout":
        return DeadlineError(
            f"Reward {name!r} was still running after {timeout_s:g} s on {where}; its process was killed. "
            f"If it was only slow, raise timeout_s of rl.score.{shown}"
        )
    if outcome.status == "memory":
        return RewardError(f"Reward {name!r} ran out of memory on {where}.{shown}")
    if outcome.status == "died":
        return RewardError(f"Reward {name!r} ended its process ({outcome.value}) on {where}.{shown}")
    kind, message, tail = outcome.value
    if outcome.status == "unloadable":
        return RewardError(
            f"Reward {name!r} cannot be loaded in a grading process: {kind}: {message}. "
            f"Install what it needs on the cluster's nodes, or define it in the notebook."
        )
    if kind == "RewardError":
        return RewardError(f"{message}{'' if 'That was prompt' in message else f' That was {where}.'}{shown}")
    return RewardError(f"Reward {name!r} failed on {where}: {kind}: {message}\n{tail}{shown}")
