"""`score`: rollouts and a reward in, rewards out, computed where the rollouts lie.

Grader actors of the run (``grader-0`` ...) score one shard a call. The texts stay in the cluster; the driver gets one number a sample.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from rlkit import actors
from rlkit.context import owner_of
from rlkit.errors import ActorDiedError, ConfigError, RlkitError, RunError
from rlkit.progress import Asker, Progress
from rlkit.rewards import apply
from rlkit.rewards.grading import VERDICTS
from rlkit.types import Rollouts, Scored, fetch, require

_graders: dict[str, list[Any]] = {}  # namespace -> handles found or started by this process


def forget_graders() -> None:
    """The connection to the cluster is closed: handles of its actors are of no use to another one."""
    _graders.clear()


def score(rollouts: Rollouts, reward: Any, *, timeout_s: float = 30.0, deadline_s: float = 3600.0) -> Scored:
    """Give every sample a reward.

    ``reward`` is one of `rlkit.rewards`, a function ``(prompt, sample) -> float``, or a weighted sum of these. Functions run in
    processes of the graders that can be killed. ``timeout_s`` limits a function's work on one sample (on one shard for
    `rewards.batched`); the comparison of one answer has its own limit in `rewards.Math`. ``deadline_s`` limits the whole call.

    Raises:
        BatchError: not given rollouts.
        ConfigError: not given a reward.
        RewardError: a reward crashed, or returned NaN, infinity or the wrong shape; names the prompt's id and shows the response.
        DeadlineError: a function hung on a sample, which is named, or the whole call took longer than ``deadline_s``.
    """
    require(rollouts, Rollouts, "rl.score(...)", "sampler.generate(...)")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be above 0.")
    steps = apply.plan(reward)
    owner = owner_of(rollouts.run)
    start = time.monotonic()
    around: AbstractContextManager[dict[str, Any]] = nullcontext({}) if owner is None else owner.phase("reward")
    with around as facts:
        if rollouts.run is not None and any(_is_ref(s) for s in rollouts.shards):
            shown = None if owner is None else owner.progress("reward", unit="sample")
            shards, summaries = _remote(rollouts, steps, timeout_s, deadline_s, shown)
            if shown is not None:
                shown.close()
        else:
            scores = [apply.score_shard(fetch(s), steps, timeout_s) for s in rollouts.shards]
            shards, summaries = tuple(_stored(s, rollouts.shards) for s in scores), [apply.summary(s) for s in scores]
        scored = _assemble(rollouts, steps, shards, summaries, time.monotonic() - start)
        facts |= {"samples": int(scored.rewards.size), "metrics": scored.summary()}
    return scored


def _is_ref(shard: Any) -> bool:
    return type(shard).__name__.endswith("ObjectRef")


def _stored(scores: Any, shards: Sequence[Any]) -> Any:
    """Scores go where the rollouts are: into the object store when those are references."""
    if not any(_is_ref(s) for s in shards):
        return scores
    import ray

    return ray.put(scores)


def _remote(
    rollouts: Rollouts, steps: Sequence[apply.Step], timeout_s: float, deadline_s: float, shown: Progress | None
) -> tuple[tuple[Any, ...], list[Any]]:
    """One call a shard. A grader that died since the last call is replaced once."""
    assert rollouts.run is not None
    space = actors.namespace(rollouts.run)
    for attempt in (1, 2):
        handles = graders(space, len(rollouts.shards))
        call = uuid.uuid4().hex
        try:
            pairs = [
                handles[i % len(handles)].score.options(num_returns=2).remote(shard, tuple(steps), timeout_s, call)
                for i, shard in enumerate(rollouts.shards)
            ]
            summaries = actors.wait(
                [summary for _, summary in pairs],
                what=f"the rewards of {rollouts.shape[0]} prompts x {rollouts.shape[1]}",
                timeout_s=deadline_s,
                setting="deadline_s of rl.score",
                on_tick=_raise_first if shown is None else Asker(handles[0].progress.remote, shown.count, _raise_first),
                on_interrupt=lambda: _stop(handles, call),  # noqa: B023 - called within this round
            )
            return tuple(shard for shard, _ in pairs), summaries
        except ActorDiedError:
            _graders.pop(space, None)
            if attempt == 2:
                raise
        except Exception:
            _stop(handles, call)  # the other shards of this call are of no use any more
            raise
    raise AssertionError("unreachable")


def _raise_first(done: Sequence[Any]) -> None:
    """Raise the first error among the summaries that are here, instead of waiting for the others."""
    for ref in done:
        summary = actors.get(ref, "scoring")
        if isinstance(summary, RlkitError):
            raise summary


def _stop(handles: Sequence[Any], call: str) -> None:
    for handle in handles:
        handle.stop.remote(call)


def graders(space: str, shards: int) -> list[Any]:
    """The run's graders: as many as shards, at most one a node, found by name or started."""
    known = _graders.setdefault(space, [])
    if len(known) >= shards:
        return known
    import ray

    from rlkit.rewards.grader import Grader

    wanted = max(1, min(shards, sum(bool(n["Alive"]) for n in ray.nodes())))
    for index in range(len(known), wanted):
        name = f"grader-{index}"
        handle = actors.find(name, space)
        if handle is None:
            try:
                handle = actors.spawn(Grader, name, space, index, spread=True)
            except RunError:  # another kernel was faster
                handle = actors.find(name, space)
        if handle is not None:
            known.append(handle)
    return known


def _assemble(rollouts: Rollouts, steps: Sequence[apply.Step], shards: tuple[Any, ...], summaries: Sequence[Any], seconds: float) -> Scored:
    shape = rollouts.shape

    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays, axis=0).astype(dtype) if arrays else np.zeros(shape, dtype)

    verdicts: dict[str, np.ndarray] = {}
    codes = [s["verdicts"] for s in summaries]
    if codes and any(c is not None for c in codes):
        filled = [np.full(s["rewards"].size, apply.NO_VERDICT, np.uint8) if c is None else c for c, s in zip(codes, summaries, strict=True)]
        flat = np.concatenate(filled).reshape(shape)
        verdicts = {name: flat == code for code, name in enumerate(VERDICTS)}
    return Scored(
        rollouts=rollouts,
        rewards=joined([s["rewards"] for s in summaries], np.float32),
        parts={step.name: joined([s["parts"][step.name] for s in summaries], np.float32) for step in steps},
        weights={step.name: step.weight for step in steps},
        verdicts=verdicts,
        shards=shards,
        seconds=seconds,
    )
