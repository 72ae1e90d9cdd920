"""Ray actors of a run: how they are named, started, found, waited for and ended.

Every actor is named and detached in the namespace of its run, so that it outlives the kernel that started it and a later kernel finds
it by name. No wait here is without a limit: `wait` raises `DeadlineError` with what was waited for and the setting that holds the limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit import errors
from rlkit.errors import ActorDiedError, DeadlineError, RlkitError, RunError

if TYPE_CHECKING:
    from rlkit.seats import Seat

PREFIX = "rlkit-"
POLL_S = 0.2


def namespace(run: str) -> str:
    """The Ray namespace of a run's actors."""
    return PREFIX + run


def spawn(
    cls: type,
    name: str,
    space: str,
    *args: Any,
    cpus: float = 0,
    gpus: float = 0,
    env: Mapping[str, str] | None = None,
    spread: bool = False,
    control_threads: int = 2,
    max_concurrency: int | None = None,
    resources: Mapping[str, float] | None = None,
    node_id: str | None = None,
    seat: Seat | None = None,
    **kwargs: Any,
) -> Any:
    """Start ``cls`` as a detached actor called ``name``; returns its handle at once, before the constructor has run.

    ``spread`` asks Ray to use the nodes evenly; ``node_id`` pins the actor to one node, ``seat`` to cards that the run holds there.

    Methods decorated with ``@ray.method(concurrency_group="control")`` are answered while another method is running: stop flags,
    progress, liveness. All other methods run one at a time. Without ``control_threads`` they run in the actor's main thread.

    Raises:
        RunError: an actor of that name is alive already.
    """
    import ray

    if seat is not None:
        gpus, node_id, env = 0, seat.node_id, dict(env or {}) | seat.env
    options: dict[str, Any] = {
        "name": name,
        "namespace": space,
        "lifetime": "detached",
        "num_cpus": cpus,
        "num_gpus": gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": dict(env or {})},
    }
    if resources:
        options["resources"] = dict(resources)
    if node_id is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    elif spread:
        options["scheduling_strategy"] = "SPREAD"
    if max_concurrency is not None:
        options["max_concurrency"] = max_concurrency
    try:
        groups = {"concurrency_groups": {"control": control_threads}} if control_threads else {"num_cpus": 0}
        made = ray.remote(**groups)(cls)  # Ray takes groups here only, not in options()
        return made.options(**options).remote(*args, **kwargs)
    except ValueError as error:
        if "name" not in str(error):
            raise
        raise RunError(f"An actor {name!r} is alive already in {space!r}; find it with rlkit.attach or end it with rlkit kill.") from error


def find(name: str, space: str) -> Any | None:
    """The handle of a living actor, or None."""
    import ray

    try:
        return ray.get_actor(name, namespace=space)
    except ValueError:
        return None


def names(space: str) -> list[str]:
    """Names of the living actors in a namespace, sorted."""
    import ray.util

    return sorted(a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == space)


def runs() -> dict[str, list[str]]:
    """Every run with living actors on this cluster: run name -> actor names."""
    import ray.util

    out: dict[str, list[str]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"].startswith(PREFIX):
            out.setdefault(actor["namespace"].removeprefix(PREFIX), []).append(actor["name"])
    return {run: sorted(found) for run, found in sorted(out.items())}


def started_with(space: str, *prefixes: str) -> list[Any]:
    """The living actors of a namespace whose names start with one of ``prefixes``."""
    found = [find(name, space) for name in names(space) if name.startswith(prefixes)]
    return [handle for handle in found if handle is not None]


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor that trains or scores with ``threads`` threads.

    Threads that wait for each other spin for a moment only: those that spin for long take the core from the one that they wait for as soon
    as anything else runs, and those that never spin are slow even when nothing does.
    """
    n = str(threads)
    return {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "GOMP_SPINCOUNT": "2000"}


def end(handles: Sequence[Any], timeout_s: float = 10.0) -> None:
    """Kill actors and wait until their names are free.

    Raises:
        DeadlineError: one of them is still alive after ``timeout_s``.
    """
    import ray
    from ray.exceptions import RayError

    for handle in handles:
        ray.kill(handle, no_restart=True)
    deadline = time.monotonic() + timeout_s
    for handle in handles:
        while True:
            try:
                ray.get(handle.__ray_ready__.remote(), timeout=max(0.05, min(1.0, deadline - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                pass
            except RayError:
                break
            if time.monotonic() > deadline:
                raise DeadlineError(f"An actor was still alive {timeout_s:.0f} s after it was killed: {handle!r}.")


def wait(
    refs: Sequence[Any],
    *,
    what: str,
    timeout_s: float,
    setting: str,
    on_tick: Callable[[list[Any]], None] | None = None,
    on_interrupt: Callable[[], None] | None = None,
) -> list[Any]:
    """The values behind ``refs``, in order.

    ``on_tick`` is called every 0.2 s with the references that are done, for progress. When the cell is interrupted, ``on_interrupt`` is
    called (to set stop flags on the actors) and KeyboardInterrupt goes on.

    Raises:
        DeadlineError: not all were done within ``timeout_s``; names ``what`` and ``setting``.
        ActorDiedError: a process behind a reference died.
        RlkitError: as raised by the actor, with its own type.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    # Each value is fetched once, when it is ready, so that an error comes up without waiting for the others. Over ray:// a second fetch
    # would cost its bytes again, and would release the references inside the first copy while the second still holds them.
    values: dict[Any, Any] = {}
    try:
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise overdue(what, timeout_s, len(refs) - len(pending), len(refs), setting)
            # fetch_local=False: waiting must not pull the data to the notebook.
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=min(POLL_S, left), fetch_local=False)
            if on_tick is not None:
                waiting = set(pending)
                on_tick([r for r in refs if r not in waiting])
            for ref in ready:
                values[ref] = get(ref, what)
        return [values[ref] for ref in refs]
    except KeyboardInterrupt:
        if on_interrupt is not None:
            on_interrupt()
        raise


def overdue(what: str, timeout_s: float, done: int, parts: int, setting: str) -> DeadlineError:
    """The error of a wait that ran past its limit."""
    return DeadlineError(f"Waited {timeout_s:g} s for {what}: {done} of {parts} parts were done. If it was only slow, raise {setting}.")


def get(ref: Any, what: str) -> Any:
    """``ray.get`` with rlkit's errors: ours keep their type, also those of a constructor; a dead process becomes `ActorDiedError`."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlkitError):
            raise cause from None
        raise
    except RayActorError as error:
        if error.actor_init_failed:
            raise _from_constructor(str(error), what) from error
        raise ActorDiedError(f"A process died during {what}: {_why_it_died(str(error))}") from error


def _from_constructor(text: str, what: str) -> RlkitError:
    """The error behind an actor whose constructor failed. Ray keeps it only as text: a traceback that ends with type and message."""
    ours = list(re.finditer(r"^rlkit\.errors\.(\w+): ", text, re.M))
    if ours and isinstance(kind := getattr(errors, ours[-1][1], None), type) and issubclass(kind, RlkitError):
        return kind(text[ours[-1].end() :].strip())
    return ActorDiedError(f"A process could not start for {what}: {text.strip().splitlines()[-1]}")


def _why_it_died(text: str) -> str:
    """Ray's report in a line: the actor's name and pid, and the cause."""
    facts = dict(re.findall(r"^\t(name|pid|ip): (.+)$", text, re.M))
    lines = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.startswith("\t")]
    who = f"{facts.get('name', 'an actor')} ({', '.join(f'{k} {v}' for k, v in facts.items() if k != 'name')}): " if facts else ""
    return who + " ".join(lines[1:] or lines)[:600]
