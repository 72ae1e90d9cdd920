"""The grader: an actor that scores shards, with its own worker processes. Imports Ray, so only the cluster side imports it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray

from rlkit.errors import RewardError, RlkitError
from rlkit.rewards import apply, grading
from rlkit.rewards.pool import Cancelled, cancel_when
from rlkit.types import RolloutShard, ScoreShard


class Grader:
    """Scores one shard at a time. Worker processes start with the first answer or function that needs one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._stopped: set[str] = set()

    def score(
        self, shard: RolloutShard, steps: Sequence[apply.Step], timeout_s: float, call: str
    ) -> tuple[ScoreShard | None, dict[str, Any] | RlkitError]:
        """(the shard's scores, their summary); ``call`` names the `rl.score` that asks, for `stop`.

        An error of ours is returned in the summary's place: Ray prints every raised one that nobody fetches, once a shard.
        """
        try:
            with cancel_when(lambda: call in self._stopped):
                if call in self._stopped:
                    raise Cancelled
                scores = apply.score_shard(shard, steps, timeout_s)
        except Cancelled:
            return None, RewardError("Scoring was interrupted.")
        except RlkitError as error:
            return None, error
        return scores, apply.summary(scores)

    @ray.method(concurrency_group="control")
    def stop(self, call: str) -> None:
        """End the work of one `rl.score`, running or queued; its worker processes are killed."""
        self._stopped.add(call)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int] | None:
        """(items done, items in all) of what a pool of worker processes is working on; None when none is."""
        return next((p.progress for p in (apply._pool, grading._pool) if p is not None and p.progress is not None), None)

    @ray.method(concurrency_group="control")
    def info(self) -> dict[str, Any]:
        """Process ids of the grader and of its workers, and the node."""
        pools = [p for p in (grading._pool, apply._pool) if p is not None]
        return {"pid": os.getpid(), "workers": [pid for p in pools for pid in p.pids()], "node": ray.get_runtime_context().get_node_id()}
