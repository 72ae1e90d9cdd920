"""A rollout under way: sent to the engines, and collected when its result is asked for.

`Sampler.generate` asks at once. `Sampler.submit` leaves that to the notebook, so that engines sample while the learner trains on the
rollout before (one step off-policy):

    ahead = None
    for step in run.steps(100):
        rollouts = (ahead or sampler.submit(tasks.batch(16), n=8)).result()
        ahead = sampler.submit(tasks.batch(16), n=8)                        # with the weights of now
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"), tis_cap=2.0)  # a learner with max_lag=1
        sampler.sync(learner)                                               # once the rollout under way is complete
        run.log(step, scored, stats)

No thread waits meanwhile: the engines work on their own. The first one is sent inside the loop, so that a loop that is resumed goes on in
the task set's order; it leaves out the prompts that were under way when the loop before it ended.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rlkit import memory
from rlkit.config import SampleSpec
from rlkit.engines.flight import Flight
from rlkit.engines.progress import RolloutProgress
from rlkit.errors import RolloutError
from rlkit.reprs import Shown
from rlkit.types import Prompt, Rollouts

if TYPE_CHECKING:
    from rlkit.sampler import Sampler


class PendingRollouts(Shown):
    """The rollout of one call. One that nobody holds any more, and whose result was not asked for, is ended on the engines."""

    def __init__(
        self, sampler: Sampler, flight: Flight, asked: list[Prompt], sampling: SampleSpec, version: int | None, submitted: bool
    ) -> None:
        self._sampler, self._flight, self._asked, self._sampling, self._version = sampler, flight, asked, sampling, version
        self._submitted = submitted
        self._begun, self._sent = time.monotonic(), time.time()
        self._state = "in flight"  # | "complete" | "failed" | "cancelled"
        self._result: Rollouts | None = None
        self._error: BaseException | None = None

    @property
    def policy_version(self) -> int | None:
        """That of the engines when it was sent."""
        return self._version

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        import ray

        replies = [piece.reply for piece in self._flight.pieces]
        ready, _ = ray.wait(replies, num_returns=len(replies), timeout=0, fetch_local=False)
        return self._state != "in flight" or len(ready) == len(replies)

    def result(self) -> Rollouts:
        """Wait for the rollout; again, the same one.

        Raises:
            As `Sampler.generate`; an error comes again with every call.
        """
        if self._state == "in flight":
            with self._sampler.owner.phase("rollout") as facts:
                self.land(facts, progress=True)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def settle(self) -> None:
        """Wait for it before the engines get other weights. An error is kept for `result`."""
        if self._state == "in flight":
            try:
                self.result()
            except Exception as error:  # noqa: BLE001  raised by `result`, where the rollout is asked for
                self._error = error

    def cancel(self) -> None:
        """End it on the engines; `result` then raises a RolloutError. Nothing when it is complete."""
        if self._state == "in flight":
            self._state, self._error = "cancelled", RolloutError("This rollout was cancelled: submit it again.")
            self._flight.abort()

    def land(self, facts: dict[str, Any], *, progress: bool) -> Rollouts:
        """Collect the shards; ``facts`` takes the numbers of the phase that this is waited for in."""
        sampler, spec = self._sampler, self._sampler.spec
        shown = sampler.owner.progress("rollout", len(self._asked) * self._sampling.n, "sample", show=progress)
        ticker = RolloutProgress(sampler._handles, self._flight.call, shown)
        waited = time.monotonic() - self._begun
        try:
            shards, replies = self._flight.land(
                what=f"{len(self._asked)} x {self._sampling.n} responses from {len(self._flight.pieces)} engine(s)",
                timeout_s=max(1.0, spec.rollout_timeout_s - waited),
                setting="EngineSpec.rollout_timeout_s",
                on_tick=ticker,
                relieve=lambda: sampler._relieve(self._version),
            )
            # What was submitted may have been complete long before it is asked for: then its time is that of the slowest engine.
            seconds = max(r["seconds"] for r in replies) if self._submitted else time.monotonic() - self._begun
            self._result = done = sampler._gather(self._asked, shards, replies, self._sampling, seconds)
        except BaseException as error:  # an interrupt, a deadline, an error of one engine: none of them leaves the others working
            self._state = "failed"
            self._error = error if isinstance(error, Exception) else RolloutError("This rollout was interrupted: submit it again.")
            self._flight.abort()
            raise
        finally:
            ticker.close(self._result is not None)
        self._state = "complete"
        facts |= {
            "prompts": done.shape[0],
            "samples": done.lengths.size,
            "tokens": int(done.lengths.sum()),
            "tokens_per_second": done.tokens_per_second,
            "truncated": float(done.truncated.mean()),
            "policy_version": done.policy_version,
        }
        facts |= ({"t_submitted": self._sent} if self._submitted else {}) | memory.of_engines(replies)
        return done

    def __repr__(self) -> str:
        return f"PendingRollouts({len(self._asked)} prompts x {self._sampling.n}, policy version {self._version}, {self._state})"

    def __del__(self) -> None:
        if self._state != "in flight" or sys is None or sys.is_finalizing():  # at the interpreter's end modules are gone, and so is Ray
            return
        ray: Any = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self._flight.abort()
