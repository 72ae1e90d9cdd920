"""What is at an address, found out within seconds and before Ray is asked to connect.

``ray.init`` on a dead address, a wrong port or with a wrong token retries for minutes and says little. So the port is tried first, then
the question "are you alive, who are you" is sent over plain gRPC, which answers at once with one of: nothing there, not Ray, wrong
token, or Ray's version and nodes. The token goes out only after a cluster has asked for one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlkit.config import ClusterSpec, EngineSpec, TrainSpec
from rlkit.errors import AuthError, ConfigError, ConnectError, ResourceError, VersionMismatchError
from rlkit.footprint import gpus_of_engine

USUAL_PORTS = "6379 is usually Ray itself (host:port), 10001 the Ray Client (ray://host:port), 8265 the dashboard"
TOKEN_PLACES = "the setting token_path, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token"


@dataclass(frozen=True)
class Target:
    """A parsed address. ``kind`` is ``"gcs"`` for ``host:port`` and ``"client"`` for ``ray://host:port``."""

    kind: str
    host: str
    port: int

    @property
    def hostport(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"ray://{self.hostport}" if self.kind == "client" else self.hostport


@dataclass(frozen=True)
class Token:
    """A cluster's token. Its value is in no repr and no message; ``source`` says where it was read."""

    value: str = field(repr=False)
    source: str
    env: Mapping[str, str] = field(repr=False)  # what tells Ray to read the same


@dataclass(frozen=True)
class Node:
    """One machine of a cluster. Memory in bytes; ``memory`` is what Ray may hand out beside the object store."""

    ip: str
    host: str = ""
    cpus: float = 0.0
    gpus: float = 0.0
    memory: float = 0.0
    object_store: float = 0.0
    head: bool = False
    id: str = ""

    @classmethod
    def make(cls, ip: str, host: str, resources: Mapping[str, float], node_id: str = "") -> Node:
        return cls(
            ip=ip,
            host=host,
            cpus=resources.get("CPU", 0.0),
            gpus=resources.get("GPU", 0.0),
            memory=resources.get("memory", 0.0),
            object_store=resources.get("object_store_memory", 0.0),
            head="node:__internal_head__" in resources,
            id=node_id,
        )


@dataclass(frozen=True)
class Found:
    """What answered. Versions are empty and nodes unknown for ``ray://``, where they are known after connecting."""

    target: Target
    token: Token | None
    ray_version: str = ""
    python_version: str = ""
    nodes: tuple[Node, ...] = ()


def parse_address(address: str) -> Target:
    """``"host:port"`` or ``"ray://host:port"``; an IPv6 host in brackets.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"(?:(\w+)://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d+)/?", address.strip())
    scheme = match.group(1) if match else None
    if match is None or scheme not in (None, "ray") or not 0 < int(match.group(3)) < 65536:
        raise ConfigError(f"Cannot use {address!r} as an address. Use 'local', 'host:port' or 'ray://host:port'; {USUAL_PORTS}.")
    return Target("client" if scheme else "gcs", match.group(2).strip("[]"), int(match.group(3)))


def find_token(token_path: str | None) -> Token | None:
    """The token that Ray itself would use, after ``token_path``: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token; or None.

    Raises:
        AuthError: a file that is named cannot be read or is empty.
    """
    if token_path:
        path = Path(token_path).expanduser()
        return Token(_read(path, "the setting token_path"), f"{path} (the setting token_path)", {"RAY_AUTH_TOKEN_PATH": str(path)})
    if value := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return Token(value, "the environment variable RAY_AUTH_TOKEN", {"RAY_AUTH_TOKEN": value})
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        path = Path(named).expanduser()
        return Token(_read(path, "RAY_AUTH_TOKEN_PATH"), f"{path} (RAY_AUTH_TOKEN_PATH)", {"RAY_AUTH_TOKEN_PATH": str(path)})
    path = Path.home() / ".ray" / "auth_token"
    if path.is_file():
        return Token(_read(path, "Ray's default place"), str(path), {"RAY_AUTH_TOKEN_PATH": str(path)})
    return None


def _read(path: Path, named_by: str) -> str:
    try:
        value = path.read_text().strip()
    except OSError as error:
        raise AuthError(f"Cannot read the cluster's token from {path} ({named_by}): {error.strerror}.") from error
    if not value:
        raise AuthError(f"The file for the cluster's token, {path} ({named_by}), is empty.")
    return value


def look(target: Target, token_path: str | None, timeout_s: float, since: float | None = None) -> Found:
    """Find out what answers at ``target``, in at most ``timeout_s`` (from ``since`` on, a `time.monotonic`, but at least one second).

    Raises:
        ConnectError: nothing listens there, or it is not Ray, or it is Ray's other port.
        AuthError: the cluster asks for a token that is missing or wrong.
    """
    import grpc

    now = time.monotonic()
    deadline = now + timeout_s if since is None else max(since + timeout_s, now + 1.0)
    try_port(target, timeout_s)
    with _channel(target) as channel:
        ask = _ask_client if target.kind == "client" else _ask_gcs
        try:
            return ask(channel, target, None, deadline)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise _not_ray(channel, target, error, deadline, timeout_s) from None
        token = find_token(token_path)
        if token is None:
            raise AuthError(
                f"The cluster at {target.address} asks for a token and none was found. Looked in {TOKEN_PLACES}. "
                "Get it from whoever runs the cluster (on its head node: ray get-auth-token)."
            )
        try:
            return ask(channel, target, token, deadline)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise AuthError(
                    f"The cluster at {target.address} refused the token from {token.source}. Places that are read, the first found wins: "
                    f"{TOKEN_PLACES}."
                ) from None
            raise _not_ray(channel, target, error, deadline, timeout_s) from None


def check_versions(ray_version: str, python_version: str, where: str, python_level: str = "patch") -> None:
    """Compare the cluster's Ray and Python with this process's. A driver needs the same patch release of Python, a Ray Client the same
    minor one; both need the same Ray.

    Raises:
        VersionMismatchError: names both sides.
    """
    import ray

    mine = ".".join(map(str, sys.version_info[:3]))
    level = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", python_level)
    parts = 2 if level == "minor" else 3
    wrong = []
    if ray_version != ray.__version__:
        wrong.append(f"Ray {ray_version} there, {ray.__version__} here (pip install 'ray[default]=={ray_version}')")
    if python_version.split(".")[:parts] != mine.split(".")[:parts]:
        wrong.append(f"Python {python_version} there, {mine} here")
    if wrong:
        raise VersionMismatchError(f"The cluster at {where} runs other versions than this process: {'; '.join(wrong)}.")


def check_resources(spec: ClusterSpec, nodes: Sequence[Node], where: str) -> None:
    """Compare what ``spec`` asks for with what the nodes have in total.

    Raises:
        ResourceError: lists each shortage as asked and there, with the settings behind it.
    """
    s, t = spec.sampler, spec.learner
    cpus, gpus, memory = (sum(getattr(n, name) for n in nodes) for name in ("cpus", "gpus", "memory"))
    rows = [
        (spec.min_nodes, len(nodes), "nodes", "min_nodes"),
        (spec.min_cpus, cpus, "CPUs", "min_cpus"),
        (spec.min_gpus, gpus, "GPUs", "min_gpus"),
        (spec.min_memory_gib, memory / 2**30, "GiB of memory", "min_memory_gib"),
        (spec.num_gpus or 0 if spec.address == "local" else 0, gpus, "GPUs", "num_gpus"),
    ]
    if (s, t) != (EngineSpec(), TrainSpec()):  # a config that says nothing about them asks for nothing
        per_engine = gpus_of_engine(s)
        rows += [
            (
                (s.engines or 1) * s.cpus_per_engine + t.world * t.cpus_per_rank,
                cpus,
                "CPUs",
                f"{s.engines or 1} engines x {s.cpus_per_engine:g} + {t.world} ranks x {t.cpus_per_rank:g}",
            ),
            (
                (s.engines or 1) * per_engine + t.world * t.gpus_per_rank,
                gpus,
                "GPUs",
                f"{s.engines or 1} engines x {per_engine:g} + {t.world} ranks x {t.gpus_per_rank:g}",
            ),
        ]
    short = [f"{asked:g} {unit} asked for ({why}), {there:.4g} there" for asked, there, unit, why in rows if asked > there + 1e-6]
    if short:
        raise ResourceError(f"The cluster {where} is too small for the config {spec.name!r}: {'; '.join(short)}.")


def answers(address: str, timeout_s: float = 0.3) -> bool:
    """Whether something listens at ``host:port`` or ``ray://host:port``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def try_port(target: Target, timeout_s: float) -> None:
    """Open and close a TCP connection; needs no Ray, so that a dead address is told before Ray is even imported.

    Runs in a thread, since looking up a name cannot be given a limit otherwise.

    Raises:
        ConnectError: it could not be opened within ``timeout_s``.
    """
    outcome: list[OSError | None] = []

    def attempt() -> None:
        try:
            socket.create_connection((target.host, target.port), timeout=timeout_s).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout_s)
    error = outcome[0] if outcome else TimeoutError()
    if error is None:
        return
    if isinstance(error, socket.gaierror):
        what = f"the name {target.host!r} cannot be resolved"
    elif isinstance(error, ConnectionRefusedError):
        what = f"nothing listens on port {target.port} of {target.host}"
    elif isinstance(error, TimeoutError):
        what = f"no answer within {timeout_s:g} s (connect_timeout_s); a firewall, or the wrong host"
    else:
        what = error.strerror or str(error)
    raise ConnectError(f"Cannot reach {target.address}: {what}. Is the cluster up? Of its ports, {USUAL_PORTS}.")


def _channel(target: Target) -> Any:
    import grpc

    options = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        from ray._private.tls_utils import load_certs_from_env

        cert, key, authority = load_certs_from_env()
        credentials = grpc.ssl_channel_credentials(certificate_chain=cert, private_key=key, root_certificates=authority)
        return grpc.secure_channel(target.hostport, credentials, options=options)
    return grpc.insecure_channel(target.hostport, options=options)


def _call(deadline: float, token: Token | None) -> dict[str, Any]:
    metadata = [("authorization", f"Bearer {token.value}")] if token else []
    return {"timeout": max(0.05, deadline - time.monotonic()), "metadata": metadata}


def _ask_gcs(channel: Any, target: Target, token: Token | None, deadline: float) -> Found:
    """Version and nodes from Ray's Global Control Service (GCS)."""
    from ray.core.generated import gcs_pb2
    from ray.core.generated import gcs_service_pb2 as messages
    from ray.core.generated import gcs_service_pb2_grpc as services

    alive = services.NodeInfoGcsServiceStub(channel).CheckAlive(messages.CheckAliveRequest(), **_call(deadline, token))
    stored = services.InternalKVGcsServiceStub(channel).InternalKVGet(
        messages.InternalKVGetRequest(key=b"CLUSTER_METADATA", namespace=b"cluster"), **_call(deadline, token)
    )
    about = json.loads(stored.value) if stored.value else {}
    listed = services.NodeInfoGcsServiceStub(channel).GetAllNodeInfo(messages.GetAllNodeInfoRequest(), **_call(deadline, token))
    nodes = tuple(
        Node.make(n.node_manager_address, n.node_manager_hostname, dict(n.resources_total), n.node_id.hex())
        for n in listed.node_info_list
        if n.state == gcs_pb2.GcsNodeInfo.ALIVE
    )
    return Found(target, token, about.get("ray_version", alive.ray_version), about.get("python_version", ""), nodes)


def _ask_client(channel: Any, target: Target, token: Token | None, deadline: float) -> Found:
    from ray.core.generated import ray_client_pb2 as messages
    from ray.core.generated import ray_client_pb2_grpc as services

    ping = messages.ClusterInfoRequest(type=messages.ClusterInfoType.PING)
    services.RayletDriverStub(channel).ClusterInfo(ping, **_call(deadline, token))
    return Found(target, token)


def _not_ray(channel: Any, target: Target, error: Any, deadline: float, timeout_s: float) -> ConnectError:
    """What to say about a port that is open but does not answer as it should."""
    import grpc

    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        other = _ask_gcs if target.kind == "client" else _ask_client
        try:
            other(channel, target, None, deadline)
            answers = True
        except grpc.RpcError as second:
            answers = second.code() == grpc.StatusCode.UNAUTHENTICATED
        if answers:
            right = target.hostport if target.kind == "client" else f"ray://{target.hostport}"
            name = "Ray itself, not the Ray Client" if target.kind == "client" else "the Ray Client, not Ray itself"
            return ConnectError(f"At {target.hostport} is {name}: connect to {right!r}.")
        return ConnectError(f"Something other than Ray answers at {target.address}. Of a cluster's ports, {USUAL_PORTS}.")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectError(
            f"{target.address} takes connections but gave no answer within {timeout_s:g} s (connect_timeout_s): not Ray, or a cluster "
            f"that hangs. Of its ports, {USUAL_PORTS}."
        )
    return ConnectError(f"Something answers at {target.address} that does not speak Ray's protocol. Of a cluster's ports, {USUAL_PORTS}.")
