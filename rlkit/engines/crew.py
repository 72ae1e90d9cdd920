"""The living engines of a sampler, and what becomes of one that dies: it is taken out, and its replacement starts meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rlkit import actors
from rlkit.config import EngineSpec
from rlkit.context import Owner
from rlkit.engines import pool
from rlkit.errors import ActorDiedError, RlkitError

AGAIN = "Running the run.sampler(...) cell again starts what is missing; then sampler.sync(learner) gives it the current weights."


@dataclass
class Coming:
    """A replacement on its way; ``info`` is there once it has started."""

    index: int
    handle: Any
    reply: Any  # reference to what `Engine.start` returns
    begun: float  # time.monotonic()
    info: dict[str, Any] | None = None


class Crew:
    """Engine handles with what each said of itself, in the order of their numbers, and those that are on their way."""

    def __init__(self, handles: list[Any], info: list[dict[str, Any]], spec: EngineSpec, owner: Owner) -> None:
        self.handles, self.info, self.spec, self.owner = handles, info, spec, owner
        self.coming: list[Coming] = []

    def name(self, handle: Any) -> str:
        """The engine's name; for one that was taken out already, "an engine"."""
        return f"engine-{self.info[self.handles.index(handle)]['index']}" if handle in self.handles else "an engine"

    def lose(self, handle: Any, why: str, moved: str) -> None:
        """Take a dead engine out and start its replacement, without waiting for it; ``moved`` says what becomes of its work.

        A replacement that dies before it has joined is not replaced again.
        """
        for one in [c for c in self.coming if c.handle is handle]:
            self._drop(one, why)
        if handle not in self.handles:
            return
        begun, at = time.monotonic(), self.handles.index(handle)
        self.handles.pop(at)
        gone = self.info.pop(at)
        actors.end([handle])  # it is dead for us: an engine that only lost its connection must not hold the name or the GPU
        made = pool.replace(gone["model"], self.spec, gone["index"], self.owner, 0 if gone["version"] == 0 else None)
        self.coming.append(Coming(gone["index"], made, made.start.remote(), begun))
        name = f"engine-{gone['index']}"
        text = f"{name} died: {moved}; its replacement is starting. ({why[:200]})"
        self.owner.event("engine", text, name=name, why=why, moved=moved, seconds=time.monotonic() - begun)

    def started(self, wait: bool = False) -> list[Coming]:
        """Replacements that can take weights; with ``wait`` all that are coming, within ``EngineSpec.start_timeout_s``.

        One that could not start is dropped; the reader is told.

        Raises:
            ActorDiedError: asked to wait, and none could start. DeadlineError: not started in time.
        """
        import ray

        failed: RlkitError | None = None
        for one in [c for c in self.coming if c.info is None]:
            if not wait and not ray.wait([one.reply], timeout=0, fetch_local=False)[0]:
                continue
            try:
                (one.info,) = actors.wait(
                    [one.reply],
                    what=f"the replacement of engine-{one.index} to start",
                    timeout_s=self.spec.start_timeout_s,
                    setting="EngineSpec.start_timeout_s",
                )
            except RlkitError as error:
                failed = error
                self._drop(one, str(error))
        found = [c for c in self.coming if c.info is not None]
        if wait and failed is not None and not found:
            raise ActorDiedError(f"No engine is left and none could be started: {failed}") from failed
        return found

    def _drop(self, one: Coming, why: str) -> None:
        self.coming.remove(one)
        actors.end([one.handle])
        name = f"engine-{one.index}"
        text = f"The replacement of {name} could not be used; running the run.sampler(...) cell again tries once more. ({why})"
        self.owner.event("engine", text, name=name, why=why, moved="nothing", seconds=time.monotonic() - one.begun)

    def join(self, one: Coming) -> None:
        """A replacement that has started becomes one of the engines."""
        assert one.info is not None
        self.coming.remove(one)
        at = sum(i["index"] < one.index for i in self.info)
        self.handles.insert(at, one.handle)
        self.info.insert(at, one.info)
        seconds, name = time.monotonic() - one.begun, f"engine-{one.index}"
        text = f"{name} was replaced, {seconds:.1f} s after it died."
        self.owner.event("engine", text, name=name, why="replaced", moved="nothing", seconds=seconds)

    def close(self) -> None:
        """End all engines, also those on their way."""
        actors.end([*self.handles, *(c.handle for c in self.coming)])
        for held in (self.handles, self.info, self.coming):
            held.clear()
