"""Ray's own connect, with what it would change in this process kept in bounds: token, loopback address, signal handler, imports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rlkit import localhead
from rlkit.errors import ClusterError, ConnectError, VersionMismatchError
from rlkit.preflight import Found, Token

NAMESPACE = "rlkit"
# Ray ends a process whose cluster has not answered for so long, by default for a minute. A notebook's kernel is to outlive its cluster.
KEPT_FOR, KEPT_FOR_S = "RAY_gcs_rpc_server_reconnect_timeout_s", str(7 * 24 * 3600)


def join(found: Found, runtime_env: dict[str, Any] | None) -> str:
    """``ray.init`` by address; returns the dashboard's URL."""
    import ray

    if ray.is_initialized():
        if connected_to() != found.target.address:
            raise ClusterError(f"This kernel is connected to Ray at {connected_to()} already. Call ray.shutdown() first.")
        return ""
    loopback = any(n.ip.startswith("127.") for n in found.nodes if n.head)
    with auth(found.token), _loopback_kept(loopback), _sigterm_kept():
        try:
            context = ray.init(address=found.target.address, namespace=NAMESPACE, runtime_env=runtime_env, logging_level="warning")
        except (ConnectionError, RuntimeError) as error:
            raise ConnectError(f"Ray answers at {found.target.address} but could not be joined: {error}") from error
    return url(context.dashboard_url)


def open_session(address: str, runtime_env: dict[str, Any], attempts: int = 2) -> Any:
    """``ray.init`` through the Ray Client. Its server forks a process for each session, and the first one often dies at once unless the
    head was started with GRPC_ENABLE_FORK_SUPPORT=0 (seen as "Initialization failure from server"); that is tried once more.
    """
    import ray

    try:
        return ray.init(address, namespace=NAMESPACE, runtime_env=runtime_env)
    except RuntimeError as error:
        if "ersion mismatch" in str(error):
            raise VersionMismatchError(f"The cluster at {address} runs other versions than this process. {error}") from error
        raise ConnectError(f"The Ray Client server at {address} could not open a session: {error}") from error
    except ConnectionAbortedError as error:
        if attempts > 1:
            return open_session(address, runtime_env, attempts - 1)
        raise ConnectError(f"The Ray Client server at {address} could not open a session: {error}") from error
    except ConnectionError as error:
        raise ConnectError(f"The Ray Client server at {address} could not open a session: {error}") from error


def is_initialized() -> bool:
    import ray

    return ray.is_initialized()


def connected_to() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def url(dashboard: str | None) -> str:
    """``host:port`` as Ray reports it, as a URL; empty when there is no dashboard."""
    return f"http://{dashboard}" if dashboard and re.fullmatch(r"[\w.\-\[\]:]+", dashboard) else ""


@contextlib.contextmanager
def auth(token: Token | None) -> Iterator[None]:
    """Make Ray use ``token``, or none, while it connects. Ray keeps it afterwards; this process's environment stays as it was."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", KEPT_FOR)
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update({"RAY_AUTH_MODE": "token", **token.env} if token else {"RAY_AUTH_MODE": "disabled"})
    os.environ[KEPT_FOR] = before[KEPT_FOR] or KEPT_FOR_S
    try:
        read_auth_again()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """While connecting, keep Ray from replacing this process's own handler of SIGTERM, where it has one."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _loopback_kept(loopback: bool) -> Iterator[None]:
    """While connecting to a head that listens on loopback only, keep Ray from turning 127.0.0.1 into the machine's outer address."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not loopback
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def read_auth_again() -> None:
    """Make Ray forget its token and auth mode and read both from the environment."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def import_ray_fast() -> None:
    """Import Ray without the package that `localhead.SHIM` is about, unless something else in this process loaded it before."""
    name = localhead.SHIM_NAME.removesuffix(".py")
    if "ray" in sys.modules or "jsonschema" in sys.modules or name in sys.modules:
        import ray

        return
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        import ray  # noqa: F401
    finally:
        del sys.modules[name]
