"""A kernel's side of a run's event log: calls to the recorder, and the lease that lets one kernel at a time change the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlkit import actors, checkpoints, seats
from rlkit.errors import ActorDiedError, RunBusyError
from rlkit.lease import RENEW_S, Driver

CALL_TIMEOUT_S = 60.0
RENEW_TIMEOUT_S = 10.0


class Ledger:
    """Finds or starts the recorder of a run, and speaks to it. Every call has a limit of 60 s."""

    def __init__(self, name: str, space: str, cluster: Any, seed: int, fresh: bool) -> None:
        self.name, self._cluster = name, cluster
        self.epoch = 0  # 0: this kernel does not hold the lease
        self._driver = Driver.this()
        self._beat: threading.Thread | None = None
        self._closed = threading.Event()
        alive = actors.find("recorder", space)
        if alive is not None and fresh:
            self._set_aside(alive, space)
            alive = None
        self.recorder = alive if alive is not None else _start(name, space, cluster, seed, fresh)

    def call(self, method: str, *args: Any) -> Any:
        """The result of a recorder's method.

        Raises:
            ClusterError: the connection that the run was made on is closed: its handles are of no use to another one.
        """
        self._cluster.need_open()
        return _alive(lambda: _wait(getattr(self.recorder, method).remote(*args), method))

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def append(self, *events: dict[str, Any]) -> None:
        self.call("append", self.epoch, list(events))

    def send(self, event: dict[str, Any]) -> None:
        """Append an event without waiting for it; an error comes up at the next `append`, which checks the same lease."""
        self.recorder.append.remote(self.epoch, [event])

    def acquire(self, takeover: bool = False) -> None:
        """Take the lease, at once when its holder's process is gone.

        Raises:
            RunBusyError: another kernel holds it and ``takeover`` is False.
        """
        holder = self.call("holder")
        dead = holder["id"] if holder is not None and Driver(**holder).is_dead_for_sure() else None
        self.epoch = self.call("acquire", self._driver.as_dict(), dead, takeover)
        if self._beat is None or not self._beat.is_alive():
            self._closed.clear()
            self._beat = threading.Thread(target=self._renew_forever, name=f"rlkit-lease-{self.name}", daemon=True)
            self._beat.start()

    def tell(self, method: str, *args: Any) -> None:
        """Call a recorder's method without waiting for it. A recorder or cluster that is gone is left to the next call that waits."""
        from ray.exceptions import RayError

        with suppress(RayError, ConnectionError):
            getattr(self.recorder, method).remote(*args)

    def check(self, phases: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Every change of the run goes through here first: holds the lease, or takes it when nobody does. ``phases`` are those that are in
        progress from now on, for whoever watches.

        Raises:
            RunBusyError: another kernel drives the run.
        """
        self._cluster.need_open()
        if self.epoch == 0:
            self.acquire()
        if not _alive(lambda: actors.get(self.recorder.renew.remote(self.epoch, phases), f"renewing the lease of run {self.name!r}")):
            raise RunBusyError(
                f"Run {self.name!r} was taken over by another kernel. Look at it with rlkit.attach({self.name!r}), or take it back "
                f"with takeover=True."
            )

    def release(self) -> None:
        """Give the lease back and stop renewing it."""
        import ray

        self._closed.set()
        if self.epoch:
            ray.get(self.recorder.release.remote(self.epoch), timeout=1.0)
            self.epoch = 0

    def stop(self) -> None:
        """Stop renewing, before the recorder is ended."""
        self._closed.set()

    def _renew_forever(self) -> None:
        import ray
        from ray.exceptions import RayError

        while not self._closed.wait(RENEW_S):
            if not ray.is_initialized():
                return
            try:
                if not ray.get(self.recorder.renew.remote(self.epoch), timeout=RENEW_TIMEOUT_S):
                    return  # another kernel took it; the next change from here says so
            except RayError:
                return  # the recorder is gone; the next call from here says so

    def _set_aside(self, recorder: Any, space: str) -> None:
        """End the actors of the run that a fresh one of the same name replaces.

        Raises:
            RunBusyError: another kernel drives it.
        """
        holder = _wait(recorder.holder.remote(), "holder")
        if holder is not None:
            driver = Driver(**holder)
            if driver != self._driver and not driver.is_dead_for_sure():
                raise RunBusyError(f"Run {self.name!r} is driven by {driver}; it cannot be set aside now.")
        actors.end(actors.started_with(space, ""))
        seats.release(space)


def _start(name: str, space: str, cluster: Any, seed: int, fresh: bool) -> Any:
    import ray

    from rlkit.recorder import Recorder

    # On the notebook's own node, so that the run's folder lies where the notebook looks for it.
    here = ray.get_runtime_context().get_node_id() if cluster.via == "driver" else None
    storage = checkpoints.storage_of(cluster, name)
    made = actors.spawn(Recorder, "recorder", space, name, storage, seed, fresh, node_id=here)
    _wait(made.status.remote(), "start")
    return made


def _alive(call: Callable[[], Any]) -> Any:
    """The call's result; when the recorder is dead, the error says how to get a new one."""
    try:
        return call()
    except ActorDiedError as error:
        raise ActorDiedError(
            f"{error} Running the rlkit.Run(...) cell again starts a recorder that goes on with the run's log; the other parts are kept. "
            "A run that was closed is resumed by it."
        ) from error


def _wait(ref: Any, method: str) -> Any:
    return actors.wait([ref], what=f"the recorder ({method})", timeout_s=CALL_TIMEOUT_S, setting="nothing: this limit is fixed")[0]
