"""One rollout on its way: prompts spread over engines, and spread again when an engine dies under them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit import actors
from rlkit.config import SampleSpec
from rlkit.engines import pool
from rlkit.engines.crew import AGAIN, Crew
from rlkit.errors import ActorDiedError
from rlkit.types import Prompt


@dataclass(frozen=True)
class Piece:
    """Prompts ``start`` to ``start + size`` of a call, on one engine."""

    start: int
    size: int
    engine: Any
    call: str
    shard: Any  # references to what `Engine.generate` returns
    reply: Any
    again: bool  # an engine died with these prompts before


class Flight:
    """The pieces of one call. `land` waits for them; `abort` ends them."""

    def __init__(self, crew: Crew, prompts: Sequence[Prompt], sampling: SampleSpec, seeds: Sequence[int]) -> None:
        self.call = uuid.uuid4().hex[:12]
        self.pieces: list[Piece] = []
        self._crew, self._prompts, self._sampling, self._seeds = crew, prompts, sampling, seeds
        self._send(0, len(prompts), again=False)

    def _send(self, start: int, size: int, again: bool) -> list[Piece]:
        """Spread consecutive prompts over the living engines. Their seeds are their own, so the samples are those of any other engine."""
        # The first call's name stays with it: an engine forgets an aborted call once that has ended, and moved prompts come after it.
        call = f"{self.call}-{start}" if again else self.call
        made = []
        for handle, count in zip(self._crew.handles, split(size, len(self._crew.handles)), strict=False):
            part = slice(start, start + count)
            shard, reply = handle.generate.options(num_returns=2).remote(call, self._prompts[part], self._sampling, self._seeds[part])
            made.append(Piece(start, count, handle, call, shard, reply, again))
            start += count
        self.pieces += made
        return made

    def land(
        self, *, what: str, timeout_s: float, setting: str, on_tick: Callable[[list[Any]], None] | None, relieve: Callable[[], None]
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """(shard references, summaries) in the order of the prompts. ``relieve`` is called when no engine is left, and must bring one.

        Raises:
            ActorDiedError: engines died twice with the same prompts. DeadlineError: not done within ``timeout_s``.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        pending = {piece.reply: piece for piece in self.pieces}
        done: dict[int, tuple[Any, dict[str, Any]]] = {}
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise actors.overdue(what, timeout_s, len(done), len(done) + len(pending), setting)
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=min(actors.POLL_S, left), fetch_local=False)
            if on_tick is not None:
                on_tick(ready)
            for reply in ready:
                piece = pending.pop(reply)
                try:
                    done[piece.start] = piece.shard, actors.get(reply, what)
                except ActorDiedError as error:
                    paused = time.monotonic()
                    pending |= {moved.reply: moved for moved in self._move(piece, error, what, relieve)}
                    deadline += time.monotonic() - paused  # starting an engine has a limit of its own
        order = sorted(done)
        return [done[start][0] for start in order], [done[start][1] for start in order]

    def _move(self, piece: Piece, error: ActorDiedError, what: str, relieve: Callable[[], None]) -> list[Piece]:
        """Give a dead engine's prompts to the others, or to a new one."""
        name = self._crew.name(piece.engine)
        note_failed([piece.reply], [piece.shard])
        self.pieces.remove(piece)
        # What killed one may have killed others: prompts that went from a dead engine to a dead engine would be given up for nothing.
        gone = [h for h in self._crew.handles if h is not piece.engine and pool.info_of(h, self._crew.name(h)) is None]
        others = sum(h is not piece.engine and h not in gone for h in self._crew.handles)
        count = f"{piece.size} prompt{'s' * (piece.size > 1)}"
        moved = f"its {count} are sampled again by " + (f"{others} other{'s' * (others > 1)}" if others else "its replacement")
        if piece.again:
            moved = f"its {count} were lost for the second time and are given up"
        self._crew.lose(piece.engine, str(error), moved)
        for handle in gone:
            self._crew.lose(handle, "found dead", "its prompts are sampled again too")
        if piece.again:
            raise ActorDiedError(
                f"{name} died while waiting for {what}, with prompts that another engine had died with. {AGAIN} ({error})"
            ) from error
        if not self._crew.handles:
            relieve()
        return self._send(piece.start, piece.size, again=True)

    def abort(self) -> None:
        """End the call on all engines, and look at what failed already."""
        for piece in self.pieces:
            piece.engine.abort.remote(piece.call)
        note_failed([p.reply for p in self.pieces], [p.shard for p in self.pieces])


def split(count: int, parts: int) -> list[int]:
    """Sizes of at most ``parts`` contiguous, balanced, non-empty shares of ``count``."""
    parts = min(count, parts)
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []


def note_failed(replies: Sequence[Any], shards: Sequence[Any]) -> None:
    """Look at the errors in ``shards`` whose replies failed too: Ray prints in the notebook what nobody looked at."""
    import ray
    from ray.exceptions import RayError

    for reply, shard in zip(replies, shards, strict=False):
        if not ray.wait([reply], timeout=0, fetch_local=False)[0]:
            continue
        try:
            ray.get(reply)
        except RayError:
            with contextlib.suppress(RayError):
                ray.get(shard)
