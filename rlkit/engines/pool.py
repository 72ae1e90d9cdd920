"""Finding the engines of a run, and starting those that are missing."""

from __future__ import annotations

import itertools
import time
from typing import Any

from rlkit import actors, models
from rlkit.config import EngineSpec, as_plain
from rlkit.context import Owner
from rlkit.engines import engine_class
from rlkit.engines.settings import environment
from rlkit.errors import ActorDiedError, DeadlineError, SpecChangedError
from rlkit.footprint import gpus_of_engine

NAME_FREE_S = 10.0
ON_DRIVER = ("start_timeout_s", "rollout_timeout_s", "sync_timeout_s")  # settings that an engine does not depend on


def start(model: str, spec: EngineSpec, owner: Owner, *, restart: bool, version: int | None) -> tuple[list[Any], list[dict[str, Any]]]:
    """The handles of all engines of ``spec`` that ``owner`` has, and what each says of itself; see `rlkit.sampler.Sampler.start`."""
    model, space = models.absolute(model), owner.namespace
    living = {n: h for n in actors.names(space) if n.startswith("engine-") and (h := actors.find(n, space)) is not None}
    if restart:
        actors.end(list(living.values()))
        living = {}
    said = {name: info_of(handle, name) for name, handle in living.items()}
    known = {name: facts for name, facts in said.items() if facts is not None and facts["started"]}
    _refuse_other(known, model, spec)
    names = [f"engine-{i}" for i in range(spec.engines or 1)]
    actors.end([living[n] for n in living if n not in known])  # dead, or left behind by a kernel that went away while starting them
    as_others = version if all(facts["version"] == version for facts in known.values()) else None
    handles: list[Any] = []
    fresh: list[Any] = []
    try:
        for i, name in enumerate(names):
            if name in known:
                living[name].abort.remote(None)
                handles.append(living[name])
            else:
                fresh.append(_spawn(model, spec, i, owner, as_others))
                handles.append(fresh[-1])
        info = actors.wait(
            [h.start.remote() for h in handles],
            what=f"{len(names)} {spec.engine} engine(s) to load {model!r}",
            timeout_s=spec.start_timeout_s,
            setting="EngineSpec.start_timeout_s",
        )
    except BaseException:
        actors.end(fresh)
        raise
    return handles, info


def replace(model: str, spec: EngineSpec, index: int, owner: Owner, version: int | None) -> Any:
    """The handle of a new engine in the place of one that died, at once; `Engine.start` is not called yet.

    Raises:
        DeadlineError: the dead engine's name was not free within `NAME_FREE_S`.
    """
    deadline = time.monotonic() + NAME_FREE_S
    while actors.find(f"engine-{index}", owner.namespace) is not None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"Waited {NAME_FREE_S:g} s for the name of engine-{index}, which died, to be free again.")
        time.sleep(0.05)
    return _spawn(model, spec, index, owner, version)


def _spawn(model: str, spec: EngineSpec, index: int, owner: Owner, version: int | None) -> Any:
    return actors.spawn(
        engine_class(spec.engine),
        f"engine-{index}",
        owner.namespace,
        model,
        spec,
        index,
        version,
        cpus=spec.cpus_per_engine,
        gpus=gpus_of_engine(spec) if spec.gpus_per_engine > 0 else 0.0,
        seat=owner.seat(f"engine-{index}"),
        env=environment(spec),
        spread=(spec.engines or 1) > 1,
    )


def info_of(handle: Any, name: str) -> dict[str, Any] | None:
    """What a living engine says of itself, or None when it is dead."""
    try:
        return actors.wait([handle.info.remote()], what=f"{name} to answer", timeout_s=30, setting="(fixed)")[0]
    except ActorDiedError:
        return None


def _refuse_other(known: dict[str, dict[str, Any]], model: str, spec: EngineSpec) -> None:
    """Raise SpecChangedError when a living engine is not what is asked for now."""
    wanted = {k: v for k, v in as_plain(spec).items() if k not in ON_DRIVER}
    for name, info in known.items():
        there = {k: v for k, v in info["spec"].items() if k not in ON_DRIVER}
        changes = {k: (there.get(k), v) for k, v in wanted.items() if there.get(k) != v}
        if info["model"] != model:
            changes = {"model": (info["model"], model)} | changes
        if changes:
            listed = "; ".join(f"{k} is {a!r}, asked for {b!r}" for k, (a, b) in itertools.islice(changes.items(), 8))
            raise SpecChangedError(
                f"This run's {name} has other settings: {listed}. run.sampler() without arguments takes it as it is; to start over with "
                "the new ones, pass restart=True."
            )
