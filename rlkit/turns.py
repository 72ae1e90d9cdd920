"""Engines and ranks that share a card take turns on it.

    generate      engines awake, the learner's states in host memory
    update ...    engines asleep, the learner's states on the card
    sync          engines with their weights' memory but no cache, of the learner only the parameters

The verbs of `Sampler` and `Learner` call in here before they work, so a notebook has no verbs for it. Who sleeps or moves is decided by
``EngineSpec.sleep_level`` and ``TrainSpec.offload_between_turns``; with neither, nothing happens here.

The state is in the actors, and every transition may be asked for again: what an error, an interrupt or a killed kernel left half-way is
completed by the next verb. One side gives its memory up before the other takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlkit import actors
from rlkit.errors import ActorDiedError, SyncError

if TYPE_CHECKING:
    from rlkit.context import Owner
    from rlkit.learner import Learner
    from rlkit.sampler import Sampler

LEARNER, ENGINES = "learner", "engine-"
_ANSWER_S = 30.0


class Turns:
    """The turns of one owner. `Sampler` and `Learner` tell it of themselves; one that this kernel has no handle of is found by its name."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.sampler: Sampler | None = None
        self.learner: Learner | None = None
        self._others: dict[str, tuple[bool, float]] = {}  # actor id of a learner without a handle here -> its settings

    # --- what the verbs ask for ------------------------------------------------------------------------------------------------------

    def rollout(self, sampler: Sampler) -> None:
        """Before engines generate. Engines whose weights went with their sleep are synced from the learner.

        Raises:
            SyncError: the weights are gone, and there is no learner to sync from.
        """
        self.clear_learner()
        if not sampler.spec.sleep_level:
            return
        states = sampler.ask("mode")
        if any(s["dropped"] and s["version"] is None for s in states):
            learner = self._living_learner()
            if learner is None:
                raise SyncError(
                    "The engines dropped their weights when they went to sleep (sleep_level 2) and this run has no learner to sync from: "
                    "make it with run.learner(...), or start engines with the model's own weights with run.sampler(model, restart=True)."
                )
            sampler.sync(learner)
            return
        if any(s["mode"] != "awake" for s in states):
            sampler.ask("wake")

    def training(self) -> None:
        """Before the learner works: engines go to sleep. Its own states come back in its controller, with the call itself."""
        handles, level, timeout_s = self._engines()
        if not level or not handles:
            return
        states = self._living(handles, "mode", _ANSWER_S)
        if any(s is not None and s["mode"] == "weights" for s in states):
            self.clear_learner()  # vLLM falls asleep from fully awake only, for which the cache must fit once more
        slept = self._living(handles, "sleep", timeout_s, level)
        if self.sampler is not None:
            self.sampler.note(slept)

    @contextmanager
    def syncing(self, sampler: Sampler, learner: Any) -> Iterator[None]:
        """Around a weight sync from ``learner``, or from anything else that publishes weights and has no states to move."""
        spec: Any = getattr(learner, "spec", None)
        sleeps = bool(sampler.spec.sleep_level)
        if sleeps and any(s["mode"] == "awake" for s in sampler.ask("mode")):
            sampler.ask("sleep", 2)  # their weights are about to be replaced
        shares = spec is not None and (sleeps or spec.offload_between_turns)
        if shares:
            self._place(learner.controller, "parameters", spec.update_timeout_s)
        if sleeps:
            sampler.ask("wake", False)
        yield
        if shares:
            self._place(learner.controller, "off", spec.update_timeout_s)
        if sleeps:
            sampler.ask("wake")

    def clear_learner(self) -> None:
        """Before anyone else takes the card: the learner's states go to host memory, or it gives back at least what it does not use."""
        sleeps = self.sampler is not None and bool(self.sampler.spec.sleep_level)
        learner = self.learner
        if learner is not None:
            if learner.spec.offload_between_turns or sleeps:
                self._place(learner.controller, "off", learner.spec.update_timeout_s)
            return
        controller = actors.find(LEARNER, self._owner.namespace)
        if controller is not None:
            moves, limit = self._settings_of(controller)
            if moves or sleeps:
                self._place(controller, "off", limit)

    # --- asking the actors -----------------------------------------------------------------------------------------------------------

    def _living_learner(self) -> Learner | None:
        from rlkit.learner import Learner

        if actors.find(LEARNER, self._owner.namespace) is None:
            return None
        return self.learner or Learner.attach(self._owner)

    def _settings_of(self, controller: Any) -> tuple[bool, float]:
        """``offload_between_turns`` and ``update_timeout_s`` of a learner without a handle here."""
        key = controller._actor_id.hex()
        if key not in self._others:
            spec = self._wait([controller.info.remote()], "the learner's settings", _ANSWER_S)[0]["spec"]
            self._others = {key: (bool(spec.offload_between_turns), spec.update_timeout_s)}
        return self._others[key]

    def _engines(self) -> tuple[list[Any], int, float]:
        """(handles, sleep level, timeout) of the run's engines."""
        if self.sampler is not None:
            return self.sampler.engines, self.sampler.spec.sleep_level or 0, self.sampler.spec.sync_timeout_s
        handles = actors.started_with(self._owner.namespace, ENGINES)
        if not handles:
            return [], 0, _ANSWER_S
        said = self._living(handles, "info", _ANSWER_S)
        specs = [i["spec"] for i in said if i is not None]
        return handles, max((s["sleep_level"] or 0 for s in specs), default=0), max((s["sync_timeout_s"] for s in specs), default=_ANSWER_S)

    def _living(self, handles: Sequence[Any], method: str, timeout_s: float, *args: Any) -> list[dict[str, Any] | None]:
        """Call engines; None for one that is dead, whose memory is free already."""
        refs = [getattr(h, method).remote(*args) for h in handles]
        out: list[dict[str, Any] | None] = []
        for ref in refs:
            try:
                out += self._wait([ref], f"an engine to answer {method!r}", timeout_s)
            except ActorDiedError:
                out.append(None)
        return out

    def _place(self, controller: Any, where: str, timeout_s: float) -> None:
        try:
            self._wait([controller.place.remote(where)], f"the learner's states to go {where!r}", timeout_s, "TrainSpec.update_timeout_s")
        except ActorDiedError:
            return  # a dead learner holds no memory; the next call to it says that it died

    def _wait(self, refs: list[Any], what: str, timeout_s: float, setting: str = "EngineSpec.sync_timeout_s") -> list[Any]:
        return actors.wait(refs, what=what, timeout_s=timeout_s, setting=setting)
