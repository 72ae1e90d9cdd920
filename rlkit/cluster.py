"""`connect`: one call for a laptop, a cluster's address, or ``ray://``; and `Cluster`, what a notebook shows of it."""

from __future__ import annotations

import html
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit import actors, joining, localhead
from rlkit.config import ClusterSpec
from rlkit.errors import ClusterError, ConfigError, nearest
from rlkit.preflight import Found, Node, answers, check_resources, check_versions, look, parse_address, try_port
from rlkit.reprs import gib, html_table

CONFIGS = "cluster_configs"

_current: Cluster | None = None


class Cluster:
    """A connection to a Ray cluster. Made by `connect`; everything shown is what was known at the last `refresh`.

    Attributes:
        spec: the config it was connected with.
        address: ``host:port`` or ``ray://host:port``.
        via: ``"driver"``, or ``"client"`` for ``ray://``.
        is_local: whether rlkit started it on this machine (then `shutdown` ends it).
        nodes: its living machines, the head first.
        ray_version, python_version: the cluster's.
        dashboard_url: ``""`` when there is none.
    """

    def __init__(self, spec: ClusterSpec, found: Found, head: localhead.Head | None, dashboard_url: str) -> None:
        self.spec = spec
        self.address = found.target.address
        self.via = "client" if found.target.kind == "client" else "driver"
        self.ray_version, self.python_version = found.ray_version, found.python_version
        self.nodes: tuple[Node, ...] = found.nodes
        self.dashboard_url = dashboard_url
        self._head = head
        self._open = True
        self._gpu_memory: list[float | None] = []  # the answer, once it was asked for

    @property
    def is_local(self) -> bool:
        return self._head is not None

    @property
    def is_open(self) -> bool:
        """Whether this kernel is still connected to it by this connection."""
        return self._open

    @property
    def cpus(self) -> float:
        return sum(n.cpus for n in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(n.gpus for n in self.nodes)

    @property
    def memory(self) -> float:
        """Bytes that Ray may hand out, object stores included."""
        return sum(n.memory + n.object_store for n in self.nodes)

    def gpu_memory_gib(self) -> float | None:
        """GiB of the cluster's smallest GPU, asked for once; None without GPUs, or where their driver does not say."""
        if not self._gpu_memory:
            from rlkit.cards import smallest

            self._gpu_memory = [smallest([n.id for n in self.nodes if n.gpus])]
        return self._gpu_memory[0]

    def refresh(self) -> Cluster:
        """Ask the cluster for its nodes again."""
        import ray

        self.need_open()
        nodes = [
            Node.make(n["NodeManagerAddress"], n["NodeManagerHostname"], n["Resources"], n["NodeID"]) for n in ray.nodes() if n["Alive"]
        ]
        self.nodes = tuple(sorted(nodes, key=lambda n: (not n.head, n.ip, n.id)))
        return self

    def ps(self) -> dict[str, list[str]]:
        """Runs with living actors: run name -> actor names."""
        self.need_open()
        return actors.runs()

    def disconnect(self) -> None:
        """Let go of the cluster; its actors and runs go on. `connect` finds it again."""
        global _current
        if not self._open:
            return
        import ray

        from rlkit.scoring import forget_graders

        self._open = False
        forget_graders()
        ray.shutdown()
        joining.read_auth_again()
        if _current is self:
            _current = None

    def shutdown(self) -> None:
        """End the local cluster with all its runs. A cluster that rlkit did not start is only disconnected from, with a warning."""
        self.disconnect()
        if self._head is None:
            warnings.warn(
                f"Disconnected from {self.address}; it keeps running, since rlkit did not start it. To end its runs: rlkit kill.",
                stacklevel=2,
            )
            return
        localhead.stop(self._head.name)

    def need_open(self) -> None:
        """Raises:
        ClusterError: the connection was closed, or the cluster died and another connection took its place.
        """
        if not self._open:
            raise ClusterError(f"This connection to {self.address} was closed; call rlkit.connect again, and rlkit.Run for a run on it.")

    def __repr__(self) -> str:
        n = len(self.nodes)
        state = "" if self._open else ", disconnected"
        return (
            f"Cluster({self.spec.name!r} at {self.address}: {n} node{'s' * (n != 1)}, {self.cpus:g} CPUs, {self.gpus:g} GPUs, "
            f"{gib(self.memory)}, Ray {self.ray_version}, Python {self.python_version}{state})"
        )

    def _repr_html_(self) -> str:
        where = "on this machine" if self.is_local else f"via {'Ray Client' if self.via == 'client' else 'driver'}"
        facts = [
            ("nodes", len(self.nodes)),
            ("CPUs", f"{self.cpus:g}"),
            ("GPUs", f"{self.gpus:g}"),
            ("memory", gib(self.memory)),
            ("Ray", self.ray_version),
            ("Python", self.python_version),
        ]
        cells = "".join(
            f"<div style='margin-right:2em'><div style='opacity:.6;font-size:85%'>{html.escape(k)}</div><b>{html.escape(str(v))}</b></div>"
            for k, v in facts
        )
        link = html.escape(self.dashboard_url, quote=True)
        dashboard = f"<div><a href='{link}' target='_blank' rel='noopener'>dashboard</a></div>" if link else ""
        rows = [
            (f"{n.host} ({n.ip})" if n.host else n.ip, "head" if n.head else "", f"{n.cpus:g}", f"{n.gpus:g}", gib(n.memory))
            for n in self.nodes
        ]
        table = html_table(["node", "", "CPUs", "GPUs", "memory"], rows) if len(rows) > 1 else ""
        closed = "" if self._open else " · disconnected"
        return (
            "<div style='border:1px solid #8886;border-radius:6px;padding:.6em 1em;display:inline-block'>"
            f"<div><b>{html.escape(self.spec.name)}</b> <span style='opacity:.6'>{html.escape(self.address)} · {where}{closed}</span></div>"
            f"<div style='display:flex;margin:.5em 0'>{cells}</div>{dashboard}{table}</div>"
        )


def connect(config: str | Path | ClusterSpec | None = None, *, address: str | None = None, **changes: Any) -> Cluster:
    """Connect this kernel to a Ray cluster. Called again with the same config it returns the same cluster.

    Args:
        config: a file of ``cluster_configs/`` or its name without ``.yaml``, a `ClusterSpec`, an address (``host:port``,
            ``ray://host:port``, ``local``), or None for a cluster on this machine with default settings.
        address: wins over the config's.
        **changes: other settings of `ClusterSpec` that win over the config; ``sampler={...}`` and ``learner={...}`` change single
            settings of those sections.

    A local cluster is started when it does not run yet, as a separate process that outlives this kernel, on loopback, with a token.
    Anything else is looked at before Ray connects, within ``connect_timeout_s``.

    Raises:
        ConfigError: a setting or an address that cannot be used.
        ConnectError: nothing that speaks Ray at the address.
        AuthError: the token is missing or wrong.
        VersionMismatchError: Ray or Python differ.
        ResourceError: the cluster lacks what the config asks for.
        ClusterError: this kernel is connected to another cluster.
    """
    global _current
    begun = time.monotonic()
    spec = load_spec(config, address=address, **changes)
    if _current is None and spec.address != "local":
        try_port(parse_address(spec.address), spec.connect_timeout_s)
    joining.import_ray_fast()
    if _current is not None:
        same = _reuse(_current, spec)
        if same is not None:
            return same
    elif joining.is_initialized() and spec.address == "local":
        raise ClusterError(
            f"This kernel is connected to Ray at {joining.connected_to()} already, not through rlkit. "
            "Call ray.shutdown() first, or rlkit.connect with that address."
        )
    _current = _connect_local(spec) if spec.address == "local" else _connect_remote(spec, begun)
    return _current


def current() -> Cluster | None:
    """The cluster that this kernel is connected to."""
    return _current


def load_spec(config: str | Path | ClusterSpec | None = None, **changes: Any) -> ClusterSpec:
    """The `ClusterSpec` behind what `connect` takes.

    Raises:
        ConfigError: no such config, or a setting that cannot be used.
    """
    if isinstance(config, ClusterSpec):
        spec = config
    elif config is None or config == "local":
        spec = ClusterSpec(name="local")
    elif isinstance(config, str) and (config.startswith("ray://") or re.fullmatch(r"\S+:\d+", config)):
        spec = ClusterSpec(name=config.removeprefix("ray://"), address=config)
    else:
        spec = ClusterSpec.from_yaml(_config_file(config))
    for section in ("sampler", "learner"):
        if isinstance(changes.get(section), Mapping):
            changes[section] = getattr(spec, section).but(**changes[section])
    return spec.but(**changes)


def _config_file(config: str | Path) -> Path:
    """A config by path or by name; relative ones below the working directory, else among those that came with rlkit."""
    package = Path(__file__).resolve().parent
    roots = [Path.cwd(), package.parent, package]  # a wheel has them inside the package
    path = Path(config).expanduser()
    named = path.suffix not in (".yaml", ".yml") and len(path.parts) == 1
    tried = [root / CONFIGS / f"{path}.yaml" if named else root / path for root in roots]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    known = sorted({p.stem for root in roots for p in (root / CONFIGS).glob("*.yaml")})
    hint = nearest(path.stem, known)
    raise ConfigError(f"No cluster config {str(config)!r}{hint} (looked at {', '.join(map(str, tried))}). Known: {', '.join(known)}.")


def _reuse(now: Cluster, spec: ClusterSpec) -> Cluster | None:
    """``now`` when ``spec`` means the same cluster and it still answers; None when it has died.

    Raises:
        ClusterError: it means another one.
    """
    if spec.address == "local":
        same = now.is_local and now.spec.name == spec.name
    else:
        same = not now.is_local and parse_address(spec.address).address == now.address
    if not same:
        raise ClusterError(f"This kernel is connected to {now!r}. Call its disconnect() first, or shutdown() to end a local one too.")
    if now._head is not None:
        if not localhead.alive(now._head) or not answers(now.address):  # Ray asks a dead cluster without end
            now.disconnect()
            return None
        localhead.find_or_start(spec)  # refuses changed settings
    elif not joining.is_initialized():
        now.disconnect()
        return None
    now.refresh()
    check_resources(spec, now.nodes, f"at {now.address}")
    now.spec = spec
    return now


def _connect_local(spec: ClusterSpec) -> Cluster:
    check_resources(spec, [_this_machine(spec)], "on this machine")
    head, _new = localhead.find_or_start(spec)
    found = look(parse_address(head.address), head.token_path, spec.connect_timeout_s)
    joining.join(found, runtime_env=None)
    return Cluster(spec, found, head, head.dashboard_url).refresh()


def _connect_remote(spec: ClusterSpec, begun: float) -> Cluster:
    target = parse_address(spec.address)
    found = look(target, spec.token_path, spec.connect_timeout_s, begun)  # importing Ray took a part of that time
    runtime_env = {
        "py_modules": [str(Path(__file__).resolve().parent)],  # the library and nothing else
        "excludes": ["**/__pycache__"],
        "env_vars": {k: str(v) for k, v in spec.env.items()},
    }
    if target.kind == "client":
        return _connect_client(spec, found, runtime_env)
    check_versions(found.ray_version, found.python_version, target.address)
    check_resources(spec, found.nodes, f"at {target.address}")
    dashboard = joining.join(found, runtime_env)
    return Cluster(spec, found, None, dashboard).refresh()


def _connect_client(spec: ClusterSpec, found: Found, runtime_env: dict[str, Any]) -> Cluster:
    import ray

    address = found.target.address
    if ray.is_initialized():
        raise ClusterError(f"This kernel is connected to Ray at {joining.connected_to()} already. Call ray.shutdown() first.")
    with joining.auth(found.token):
        context = joining.open_session(address, runtime_env)
    complete = Found(found.target, found.token, context.ray_version, context.python_version)
    cluster = Cluster(spec, complete, None, joining.url(context.dashboard_url))
    try:
        check_versions(context.ray_version, context.python_version, address, python_level="minor")
        check_resources(spec, cluster.refresh().nodes, f"at {address}")
    except ClusterError:
        cluster.disconnect()
        raise
    return cluster


def _this_machine(spec: ClusterSpec) -> Node:
    """What a local cluster would have, before it is started.

    Raises:
        ResourceError: through `check_resources`, as asked GPUs that are not there count as none.
    """
    import psutil
    from ray._private.accelerators import get_all_accelerator_managers
    from ray._private.utils import get_num_cpus

    there = max(
        (m.get_current_node_num_accelerators() for m in get_all_accelerator_managers() if m.get_resource_name() == "GPU"), default=0
    )
    gpus = there if spec.num_gpus is None else min(spec.num_gpus, there)
    return Node("127.0.0.1", cpus=spec.num_cpus or get_num_cpus(), gpus=gpus, memory=psutil.virtual_memory().total, head=True)
