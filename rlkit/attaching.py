"""Finding a live run by its name, from a kernel that did not start it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import actors
from rlkit.errors import RunError
from rlkit.run import Run

if TYPE_CHECKING:
    from rlkit.cluster import Cluster


def attach(name: str, cluster: Cluster | None = None, *, takeover: bool = False) -> Run:
    """The live run of that name, from a fresh kernel, with its full history.

    Reading is always possible. The first call that changes something takes the run over if its kernel is gone, and is refused with
    `RunBusyError` while another kernel drives it, unless ``takeover`` is True. ``run.sampler()`` and ``run.learner()`` without arguments
    give its living parts.

    Raises:
        RunError: no such run is alive; names those that are.
    """
    cluster = cluster or _cluster_of(name)
    recorder = actors.find("recorder", actors.namespace(name))
    if recorder is None:
        alive = ", ".join(actors.runs()) or "none"
        raise RunError(
            f"No run {name!r} is alive on {cluster.address} (alive: {alive}). rlkit.Run({name!r}, cluster) resumes it from its checkpoint."
        )
    return Run(
        name, cluster, seed=actors.get(recorder.status.remote(), f"attaching to run {name!r}")["seed"], takeover=takeover, drive=False
    )


def _cluster_of(run: str) -> Cluster:
    """The cluster that this kernel is connected to, else the local one on which the run lives.

    Raises:
        RunError: no local cluster has it.
    """
    from rlkit import localhead
    from rlkit.cluster import connect, current

    connected = current()
    if connected is not None:
        return connected
    heads = localhead.living()
    for head in heads:
        cluster = connect(localhead.spec_of(head))
        if run in cluster.ps():
            return cluster
        cluster.disconnect()
    raise RunError(
        f"No run {run!r} is alive on a local cluster (running: {', '.join(head.name for head in heads) or 'none'}). "
        f"Connect to its cluster first: rlkit.attach({run!r}, rlkit.connect(...))."
    )
