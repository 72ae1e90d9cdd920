"""The learner's weights on their way to engines: published once, loaded by all of them at the same time, proved, freed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlkit import actors, transfer
from rlkit.engines import pool
from rlkit.engines.crew import AGAIN, Crew
from rlkit.errors import ActorDiedError
from rlkit.weights import SyncStats, WeightManifest

SETTING = "EngineSpec.sync_timeout_s"


class Delivery:
    """Brings weights to engines of a crew, or to some that are about to join it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._linked: tuple[Any, ...] | None = None  # the processes that formed the NCCL group
        self.replies: list[dict[str, Any]] = []  # what the engines said when they had taken the last weights

    def send(self, learner: Any, handles: Sequence[Any], infos: Sequence[dict[str, Any]], only: int | None = None) -> SyncStats | None:
        """Publish, load, verify, free. None when no engine lived to the end, or the learner is at another version than ``only``.

        An engine that dies is replaced and the others go on, unless they are in an NCCL group with it.
        """
        handles, infos = list(handles), list(infos)  # an engine that dies leaves the crew's own lists
        begun = time.monotonic()
        transport = _transport(learner, infos)
        if transport == transfer.NCCL:
            self._join(learner, handles, infos)
        on_gpus = {} if transport == transfer.OBJECT_STORE else {"transport": transport}
        manifest: WeightManifest = learner.publish_weights(dtype=infos[0]["dtype"], **on_gpus)
        published = time.monotonic()
        wanted = only is None or manifest.version == only
        replies = self.replies = self._load(learner, manifest, handles, infos) if wanted else []
        if transport != transfer.OBJECT_STORE:
            learner.release_weights()
        if not replies:
            return None
        return SyncStats(
            version=manifest.version,
            seconds=time.monotonic() - begun,
            bytes=manifest.bytes,
            engines=len(replies),
            transport=transport,
            checksum_ok=True,
            checked=min(r["checked"] for r in replies),
            parts={"publish": published - begun} | {k: max(r[k] for r in replies) for k in ("load", "verify")},
        )

    def _load(
        self, learner: Any, manifest: WeightManifest, handles: Sequence[Any], infos: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """What the engines said that took the weights."""
        for info in infos:
            info["version"] = None
        shown = self._crew.owner.progress("sync")
        loads = {handle: handle.load_weights.remote(manifest) for handle in handles}
        limit: dict[str, Any] = {
            "what": f"{len(handles)} engine(s) to take policy version {manifest.version} "
            f"({manifest.bytes / 2**20:.0f} MiB) by {manifest.transport}",
            "timeout_s": self._crew.spec.sync_timeout_s,
            "setting": SETTING,
            "on_tick": lambda _: shown(),
        }
        if manifest.transport == transfer.NCCL:
            self._together([*loads.values(), learner.controller.broadcast.remote()], **limit)
        while True:
            try:
                replies = actors.wait(list(loads.values()), **limit)
                shown.close()
                break
            except ActorDiedError as error:
                dead = [handle for handle, load in loads.items() if _died(load)]
                if not dead:
                    raise
                for handle in dead:
                    del loads[handle]
                    self._crew.lose(handle, str(error), f"the sync goes on with {len(loads)} of {len(handles)} engine(s)")
        for handle, info in zip(handles, infos, strict=True):
            if handle in loads:
                info["version"] = manifest.version
        return replies

    def _join(self, learner: Any, handles: Sequence[Any], infos: Sequence[dict[str, Any]]) -> None:
        """Form the NCCL group of the learner's rank 0 and these engines' workers, once for these processes."""
        key = (learner.info["start_id"], *(i["pid"] for i in infos))
        if self._linked == key:
            return
        workers = [len(i["gpus"]) for i in infos]
        members = 1 + sum(workers)
        host, port = actors.get(learner.controller.endpoint.remote(), "finding an address for the NCCL group")
        calls = [learner.controller.link.remote(host, port, members)]
        for i, handle in enumerate(handles):
            calls.append(handle.link.remote(host, port, 1 + sum(workers[:i]), members))
        self._together(
            calls,
            what=f"the learner and {len(workers)} engine(s) to form an NCCL group at {host}:{port}",
            timeout_s=self._crew.spec.sync_timeout_s,
            setting=SETTING,
        )
        self._linked = key

    def _together(self, refs: list[Any], **named: Any) -> None:
        """Wait for calls that need each other: one engine that dies ends them all. Engines that died are replaced and named.

        Raises:
            ActorDiedError: an engine or the learner died.
        """
        try:
            actors.wait(refs, **named)
        except ActorDiedError as error:
            self._linked = None
            gone = [h for h in self._crew.handles if pool.info_of(h, "an engine") is None]
            names = [self._crew.name(h) for h in gone]
            for handle in gone:
                self._crew.lose(handle, str(error), "the NCCL group ended with it, so the sync has to be run again")
            raise ActorDiedError(
                f"{', '.join(names) or 'The learner'} died while waiting for {named['what']}. {AGAIN} ({error})"
            ) from error


def _transport(learner: Any, infos: Sequence[dict[str, Any]]) -> str:
    """How weights travel: see `rlkit.transfer.choose`."""
    gpus = [gpu for info in infos for gpu in info.get("gpus", [])]
    return transfer.choose(gpus, learner.info.get("gpus", [])) if gpus else transfer.OBJECT_STORE


def _died(ref: Any) -> bool:
    """Whether the actor behind a call that may be running died."""
    import ray

    if not ray.wait([ref], timeout=0, fetch_local=False)[0]:
        return False
    try:
        actors.get(ref, "an engine")
    except ActorDiedError:
        return True
    return False
