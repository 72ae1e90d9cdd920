"""The parts of a run on the cluster: engines, ranks and reference are made, found again, checkpointed and restored here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import actors, cards, checkpoints, choosing, models, monitor
from rlkit.config import EngineSpec, TrainSpec, as_plain
from rlkit.context import Owner
from rlkit.errors import ResourceError, RunError, SpecChangedError
from rlkit.footprint import gpus_of_engine
from rlkit.ledger import Ledger
from rlkit.placement import Placement, plan
from rlkit.seats import Seat, Seating

if TYPE_CHECKING:
    from rlkit.learner import Learner
    from rlkit.reference import Reference
    from rlkit.sampler import Sampler

SEAT_WAIT_S = 10.0


class Parts(Owner):
    """An owner with a ledger whose parts outlive the kernel. `rlkit.run.Run` adds the loop."""

    ledger: Ledger
    folder: Path
    keep: int

    def __init__(self, name: str, seed: int, cluster: Any) -> None:
        super().__init__(name, seed, cluster)
        self._parts: dict[str, Any] = {}
        self._seating = Seating(self.namespace)
        self.monitor = True

    @property
    def committed(self) -> int:
        """The last complete step, -1 before the first."""
        return int(self.ledger.status()["committed"])

    def note(self, text: str) -> None:
        """Say something to the reader now and keep it in the event log."""
        self.event("note", text)

    def event(self, kind: str, text: str, **facts: Any) -> None:
        super().event(kind, text)
        self.ledger.check()
        self.ledger.append({"kind": kind, "text": text, "step": self.step} | facts if facts else {"kind": kind, "text": text})

    def part(self, name: str) -> Any | None:
        return self._parts.get(name)

    def check(self) -> None:
        self.ledger.check()

    def seat(self, name: str) -> Seat | None:
        return self._seating.of(name)

    # --- parts -----------------------------------------------------------------------------------------------------------------------

    def sampler(self, model: str | None = None, *, restart: bool = False, **settings: Any) -> Sampler:
        """The run's rollout engines: those that live, or new ones. Settings are those of `EngineSpec`, over the cluster's.

        With a learner in the run, fresh engines get its weights before this returns.
        """
        from rlkit.sampler import Sampler

        model, asked = self._part("sampler", EngineSpec, model, self.cluster.spec.sampler, settings, restart)
        spec = self._chosen("sampler", model, asked)
        with self._making("sampler", model, spec, asked):
            if restart:
                if (old := self._parts.pop("sampler", None)) is not None:
                    old.close()  # with what it has under way
                self._end("engine-")  # their seats are asked for below
            held = self._hold("sampler", model, spec)
            living = sum(n.startswith("engine-") for n in self.ps())
            engines = spec.engines or 1
            if not living or engines == (self._recorded("sampler", "engines") or 1):  # else they are refused by name
                self._seats("sampler", max(0, engines - living), spec.cpus_per_engine, 0.0 if held else gpus_of_engine(spec))
            made = self._parts["sampler"] = Sampler.start(model, spec, self)
            for engine in [] if living else made.engines[:1]:
                self.ledger.tell("keep_tokenizer", engine.tokenizer_json.remote())
        self._align()
        return made

    def learner(self, model: str | None = None, *, restart: bool = False, **settings: Any) -> Learner:
        """The run's ZeRO ranks: those that live, or new ones, from the latest checkpoint where there is one.

        Settings are those of `TrainSpec`, over the cluster's. ``restart=True`` throws the live learner's state away. One whose ranks died
        is replaced.
        """
        from rlkit.learner import Learner

        model, asked = self._part("learner", TrainSpec, model, self.cluster.spec.learner, settings, restart)
        spec = self._chosen("learner", model, asked)
        first = self._model_of("learner") is None  # steps before it had no learner: there is nothing to go back to
        alive = actors.find("learner", self.namespace) is not None and not restart
        if alive and (broken := Learner.attach(self).state()["broken"]) is not None:
            self.note(f"The learner of run {self.name!r} is started again, because it stopped after an error: {broken}")
            alive = False
        with self._making("learner", model, spec, asked):
            if not alive:
                self._end("learner", "rank-")  # also ranks whose controller died
                held = self._hold("learner", model, spec)
                self._seats("learner", spec.world, spec.cpus_per_rank, 0.0 if held else spec.gpus_per_rank)
            made = self._parts["learner"] = Learner.start(model, spec, self)
        if not alive and not first:
            try:
                self.restore()
            except BaseException:  # found living by the next call, it would be trained on from the base model
                del self._parts["learner"]
                made.close()
                raise
        self._align()
        return made

    def reference(self, model: str | None = None, *, restart: bool = False, **settings: Any) -> Reference:
        """A frozen model for the KL term, as its own actor(s). ``model`` defaults to the learner's; settings are `ReferenceSpec`'s."""
        from rlkit.reference import Reference, ReferenceSpec

        if model is None and self._model_of("reference") is None:
            model = self._model_of("learner")
        model, spec = self._part("reference", ReferenceSpec, model, ReferenceSpec(), settings, restart)
        with self._making("reference", model, spec):
            if restart:
                self._end("reference-")
            living = sum(n.startswith("reference-") for n in self.ps())
            held = self.seat("reference-0") is not None and 0 < spec.gpus_per_actor < 1
            self._seats("reference", max(0, spec.actors - living), spec.cpus_per_actor, 0.0 if held else spec.gpus_per_actor)
            made = self._parts["reference"] = Reference.start(model, spec, self)
        return made

    def _part(self, name: str, kind: Any, model: str | None, defaults: Any, settings: Mapping[str, Any], restart: bool) -> tuple[str, Any]:
        """Model and settings of a part: as asked for, or as recorded when nothing is asked for."""
        known = self.ledger.status()["parts"].get(name)
        if model is None and known is None:
            raise RunError(f"run.{name}() needs a model the first time, for example run.{name}('tiny').")
        if model is None and known is not None:
            return known["model"], kind.make(known["spec"]).but(**settings)
        assert model is not None
        spec = defaults.but(**settings)
        if known is not None and not restart and known["model"] != model and name == "learner" and self.committed >= 0:
            raise SpecChangedError(
                f"Run {self.name!r} trains {known['model']!r}; it cannot go on with {model!r}. Start a run of another name, or pass "
                f"restart=True to throw its learner away."
            )
        return model, spec

    def placement(self, model: str | None = None) -> Placement:
        """Where engines and ranks sit or would sit, with the memory predicted for each phase, and measured where the run has been.

        ``model`` defaults to the run's.

        Raises:
            RunError: no model is given and the run has none yet.
            ResourceError: it does not fit.
        """
        model = model or self._model_of("learner") or self._model_of("sampler")
        if model is None:
            raise RunError("run.placement() needs a model the first time, for example run.placement('tiny').")
        return self._choose(models.absolute(model), self._spec_of("sampler"), self._spec_of("learner"))[2]

    def _chosen(self, name: str, model: str, asked: Any) -> Any:
        """The settings of a part with the open ones filled by `rlkit.choosing`: as before when the same was asked for, so that a cell can
        be run again, else from the cluster's GPUs and what is known of the other part.

        Raises:
            ResourceError: it does not fit. Settings of which none is open are taken as they are: a prediction may be wrong.
        """
        known = self.ledger.status()["parts"].get(name)
        if known is not None and known["model"] == model and known.get("asked") == as_plain(asked):
            return type(asked).make(known["spec"])
        if not any(n.gpus for n in self.cluster.nodes) or not choosing.is_open(asked):
            # On CPU what is open means 1 engine that stays awake, and a learner of 1 rank that stays where it is.
            return asked.but(ranks=asked.world) if isinstance(asked, TrainSpec) else asked
        sampler = asked if name == "sampler" else self._spec_of("sampler")
        learner = asked if name == "learner" else self._spec_of("learner")
        try:
            chosen = self._choose(models.absolute(model), sampler, learner)
        except ResourceError:
            if name == "learner" or self._model_of("learner") is not None:
                raise
            # The learner comes later, with settings that are not known yet, or never: an engine may have asked for the whole card.
            try:
                chosen = self._choose(models.absolute(model), sampler, choosing.leanest(learner))
            except ResourceError:
                chosen = self._choose(models.absolute(model), sampler, None)
        spec = chosen[0] if name == "sampler" else chosen[1]
        filled = asked.diff(spec)
        if filled:
            self.note(f"run.{name}: placement chose {', '.join(f'{k}={b!r}' for k, (_, b) in filled.items())}.\n{chosen[2]!r}")
        return spec

    def _hold(self, name: str, model: str, spec: Any) -> bool:
        """Whether a part's processes get seats from this run, on cards that it then holds; else Ray places them."""
        layout = self._layout(name, model, spec)
        if layout is None:
            return False
        seated = any(n.startswith(("engine-", "rank-", "reference-")) for n in self.ps())
        return self._seating.take(layout, empty=not seated)

    def _layout(self, name: str, model: str, spec: Any) -> Placement | None:
        """Who sits where when a part is made of ``spec``; None on a cluster with less than two GPUs, where nothing is dealt.

        Seats depend on counts and shares alone: memory, which `_chosen` has looked at, is left out.
        """
        nodes = self.cluster.nodes
        if sum(int(n.gpus) for n in nodes) < 2:
            return None
        sampler, learner = (spec, self._spec_of("learner")) if name == "sampler" else (self._spec_of("sampler"), spec)
        size = cards.size_of(models.absolute(model), [n.id for n in nodes if n.gpus])
        sampler, learner = choosing.fill(nodes, size, sampler, learner, None)
        try:
            return plan(nodes, size, sampler, learner or TrainSpec(), checked=False)
        except ResourceError:
            if name == "learner" or self._model_of("learner") is not None:
                raise
            return plan(nodes, size, sampler, TrainSpec(), checked=False, with_learner=False)  # it only samples

    def _choose(self, model: str, sampler: EngineSpec, learner: TrainSpec | None) -> tuple[EngineSpec, TrainSpec | None, Placement]:
        nodes = self.cluster.nodes
        size = cards.size_of(model, [n.id for n in nodes if n.gpus] or [n.id for n in nodes])
        return choosing.choose(nodes, size, sampler, learner, self.cluster.gpu_memory_gib())

    def _spec_of(self, name: str) -> Any:
        """The settings of a part as they were chosen, or as the cluster's config asks for them."""
        known = self.ledger.status()["parts"].get(name)
        kind: Any = {"sampler": EngineSpec, "learner": TrainSpec}[name]
        return getattr(self.cluster.spec, name) if known is None else kind.make(known["spec"])

    def ps(self) -> list[str]:
        """Names of the run's living actors."""
        return actors.names(self.namespace)

    def _seats(self, part: str, count: int, cpus: float, gpus: float) -> None:
        """Refuse a part that the cluster has no room for now, instead of waiting for a seat in silence.

        Raises:
            ResourceError: still no room after `SEAT_WAIT_S`; names what is asked, what is free and which runs are alive.
        """
        import ray

        deadline = time.monotonic() + SEAT_WAIT_S
        while True:
            free = ray.available_resources()
            have = free.get("CPU", 0.0), free.get("GPU", 0.0)
            if have[0] + 1e-6 >= count * cpus and have[1] + 1e-6 >= count * gpus:
                return
            if time.monotonic() > deadline:  # what ended a moment ago gives its seats back with a delay
                others = ", ".join(r for r in actors.runs() if r != self.name) or "none"
                raise ResourceError(
                    f"run.{part}() asks for {count} x {cpus:g} CPUs and {count} x {gpus:g} GPUs; {have[0]:g} CPUs and {have[1]:g} GPUs of "
                    f"the cluster are free. Other living runs: {others}; end one with rlkit kill NAME, or ask for less."
                )
            time.sleep(0.2)

    @contextmanager
    def _making(self, name: str, model: str, spec: Any, asked: Any = None) -> Iterator[None]:
        self.ledger.check()
        start = time.monotonic()
        yield
        self.start_monitors()
        event = {"kind": "part", "name": name, "model": model, "spec": as_plain(spec), "seconds": time.monotonic() - start}
        self.ledger.append(event | ({} if asked is None else {"asked": as_plain(asked)}))

    def start_monitors(self) -> None:
        """A monitor on each node of the cluster, where the run wants any and they are not there; see `rlkit.monitor`."""
        if self.monitor:
            monitor.start(self.cluster.nodes, self.namespace)

    def _model_of(self, part: str) -> str | None:
        known = self.ledger.status()["parts"].get(part)
        return known["model"] if known else None

    def _recorded(self, part: str, setting: str) -> Any:
        known = self.ledger.status()["parts"].get(part)
        return known["spec"].get(setting) if known else None

    def _align(self) -> None:
        """Give the engines the learner's weights when their versions differ."""
        sampler, learner = self._parts.get("sampler"), self._parts.get("learner")
        if sampler is not None and learner is not None and sampler.version != learner.version:
            sampler.sync(learner)

    # --- checkpoints -----------------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> Path:
        """Write a checkpoint of the last complete step; returns its folder. The folder appears whole or not at all."""
        learner, step = self._parts.get("learner"), self.committed
        if learner is None:
            raise RunError("There is no learner in this run to checkpoint.")
        self.ledger.call("check_log")  # a checkpoint that no log knows of would be found by the next run of this name
        path = checkpoints.path_of(self.folder, step)
        learner.save(str(path))
        self.ledger.append({"kind": "checkpoint", "step": step, "path": str(path)})
        self._call_on_storage("prune", self.keep)
        return path

    def restore(self) -> int:
        """Bring the learner back to the newest checkpoint that is whole and rewind the run to it; returns that step.

        Without any checkpoint a learner that has just been made starts again from the base model (-1). Damaged checkpoints are named and
        passed over.

        Raises:
            RunError: no checkpoint, and the learner has been trained; it is left as it is.
        """
        learner, status = self._parts["learner"], self.ledger.status()
        if status["committed"] < 0:
            return -1
        for step in sorted(self._call_on_storage("list"), reverse=True):
            if step > status["committed"]:
                continue
            path = checkpoints.path_of(self.folder, step)
            problem = self._call_on_storage("verify", step)
            if problem is not None:
                self.note(f"Checkpoint {path} is damaged and was passed over: {problem}")
                continue
            learner.load(str(path))
            if step < status["committed"]:
                self.ledger.call("rewind", self.ledger.epoch, step, f"resumed from {path}")
            self.note(f"Run {self.name!r} resumes after step {step} from {path}.")
            return step
        if learner.state()["version"] > 0:
            following = status["committed"] + 1
            raise RunError(
                f"Run {self.name!r} has no checkpoint to go back to; nothing was changed. To keep the learner as it is and count step "
                f"{following} as done: run.log({following}). To start again from {self._model_of('learner')!r}: run.learner(restart=True). "
                f"For the next time: rlkit.Run(..., checkpoint_every=...)."
            )
        self.ledger.call("rewind", self.ledger.epoch, -1, "no checkpoint")
        self.note(f"Run {self.name!r} has no checkpoint; it starts again from {self._model_of('learner')!r} at step 0.")
        return -1

    def _call_on_storage(self, verb: str, *args: Any) -> Any:
        return self.ledger.call("checkpoints", verb, *args)

    def _end(self, *prefixes: str) -> None:
        """End the actors whose names start so."""
        actors.end(actors.started_with(self.namespace, *prefixes))
