"""A Ray head on this machine that outlives the kernel which started it.

``ray.init()`` alone ties the cluster to the kernel: a killed kernel takes engines and ranks along. So the head is its own detached
process group, started with ``ray start``, on loopback only, with token auth on. What is needed to find it again lies in
``$RLKIT_HOME/clusters/<name>.json`` (readable by its owner only, like the token beside it); a lock file keeps two kernels from starting
two heads at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rlkit.config import ClusterSpec
from rlkit.errors import ClusterError, ConfigError, ConnectError, DeadlineError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
TERM_GRACE_S = 2.0
HEAD_SETTINGS = ("num_cpus", "num_gpus", "object_store_gib", "dashboard", "env")  # what a running head cannot change

# jsonschema, which every Ray process imports, compiles this package's grammar for the "iri" format whenever the package is installed
# (JupyterLab brings it): 2.3 s of CPU in each of about ten processes, for a check that Ray never makes. On the head's path lies a
# module of that name which says that it is not there; jsonschema then leaves the format out.
SHIM_NAME = "rfc3987_syntax.py"
SHIM = 'raise ImportError("left out in Ray processes: it costs seconds to import and Ray does not use it")\n'

_started: dict[int, subprocess.Popen[bytes]] = {}  # heads that are children of this process, so that they can be reaped


@dataclass(frozen=True)
class Head:
    """A local head as recorded on disk. ``started`` is the process's start in seconds since the epoch; a reused pid differs in it."""

    name: str
    address: str  # "127.0.0.1:port"
    client_port: int
    dashboard_url: str  # "" without a dashboard
    pid: int  # leader of the process group and session of all its processes
    started: float
    token_path: str
    temp_dir: str
    settings: dict[str, Any]


def home() -> Path:
    """``$RLKIT_HOME``, or ``~/.cache/rlkit``."""
    return Path(os.environ.get("RLKIT_HOME") or Path.home() / ".cache" / "rlkit").expanduser().absolute()


def living() -> list[Head]:
    """Every local head that runs now, by name. Reads files and the process table only."""
    found = (_read(path) for path in sorted(_folder().glob("*.json")))
    return [head for head in found if head is not None and alive(head)]


def spec_of(head: Head) -> ClusterSpec:
    """A spec that `rlkit.connect` takes to find this head."""
    return ClusterSpec.make(head.settings, name=head.name)


def alive(head: Head) -> bool:
    """Whether the recorded process is still the one that runs under its pid."""
    _reap(head.pid)
    try:
        return psutil.Process(head.pid).status() != psutil.STATUS_ZOMBIE and not _reused(head)
    except psutil.NoSuchProcess:
        return False


def find_or_start(spec: ClusterSpec) -> tuple[Head, bool]:
    """The running head called ``spec.name``, else a new one; and whether it is new.

    Raises:
        ClusterError: it runs already with other settings.
        ConnectError: it did not come up; holds the end of its log.
        DeadlineError: another process held the lock for too long.
    """
    with _lock(spec.name):
        head = _read(_folder() / f"{spec.name}.json")
        if head is not None and alive(head):
            _same_settings(head, spec)
            return head, False
        if head is not None:
            _clean(head)
        return _start(spec), True


def stop(name: str) -> bool:
    """End the head called ``name`` with every process on it; False when none runs. Files it left are removed.

    Raises:
        ClusterError: a process did not end.
    """
    with _lock(name):
        head = _read(_folder() / f"{name}.json")
        if head is None:
            return False
        was_alive = alive(head)
        if was_alive:
            _end_processes(head.pid)
        _clean(head)
        return was_alive


def forget(name: str) -> None:
    """Remove the log and the lock file of a head that has ended and whose name will not be used again."""
    for suffix in ("log", "lock"):
        (_folder() / f"{name}.{suffix}").unlink(missing_ok=True)


def settings(spec: ClusterSpec) -> dict[str, Any]:
    return {key: dict(value) if key == "env" else value for key, value in spec.as_dict().items() if key in HEAD_SETTINGS}


def _same_settings(head: Head, spec: ClusterSpec) -> None:
    asked = settings(spec)
    changed = [f"{k} is {head.settings.get(k)!r} there and {asked[k]!r} here" for k in asked if head.settings.get(k) != asked[k]]
    if changed:
        raise ClusterError(
            f"The local cluster {head.name!r} runs with other settings: {'; '.join(changed)}. End it with `rlkit down {head.name}` "
            "(this ends its runs) or give this config another name."
        )


def _start(spec: ClusterSpec) -> Head:
    folder = _folder()
    token_path = folder / f"{spec.name}.token"
    _write_private(token_path, secrets.token_hex(32))
    # Sockets live below this path, whose length Unix limits to about 100 characters: a short one, closed to others.
    temp_dir = Path(tempfile.mkdtemp(prefix="rlkit-"))
    (temp_dir / SHIM_NAME).write_text(SHIM)
    port, client_port, dashboard_port, agent_port, metrics_port = _free_ports(5)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", "--no-monitor"]
    options: dict[str, Any] = {
        "node-ip-address": "127.0.0.1",
        "port": port,
        "ray-client-server-port": client_port,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": agent_port,
        "include-dashboard": str(spec.dashboard).lower(),
        "min-worker-port": 0,  # any free ports
        "max-worker-port": 0,
        "temp-dir": temp_dir,
        "num-cpus": spec.num_cpus,
        "num-gpus": spec.num_gpus,
        "object-store-memory": None if spec.object_store_gib is None else int(spec.object_store_gib * 2**30),
    }
    command += [f"--{name}={value}" for name, value in options.items() if value is not None]
    log = folder / f"{spec.name}.log"
    with open(log, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=temp_dir,
            env=_environment(spec, token_path, temp_dir, metrics_port),
        )
    _started[process.pid] = process
    head = Head(
        name=spec.name,
        address=f"127.0.0.1:{port}",
        client_port=client_port,
        dashboard_url=f"http://127.0.0.1:{dashboard_port}" if spec.dashboard else "",
        pid=process.pid,
        started=psutil.Process(process.pid).create_time(),
        token_path=str(token_path),
        temp_dir=str(temp_dir),
        settings=settings(spec),
    )
    try:
        _wait_ready(head, process, log)
        _write_private(folder / f"{spec.name}.json", json.dumps(asdict(head), indent=1))
    except BaseException:
        _end_processes(process.pid)
        _clean(head)
        raise
    return head


def _environment(spec: ClusterSpec, token_path: Path, temp_dir: Path, metrics_port: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR")}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # Ray turns 127.0.0.1 into the machine's outer address, and then listens on all interfaces, unless clusters of several
        # machines are ruled out by this variable.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # else the first process that the Ray Client server forks for a session often dies
        "DASHBOARD_METRIC_PORT": str(metrics_port),
        "PYTHONPATH": os.pathsep.join(p for p in (str(temp_dir), os.environ.get("PYTHONPATH", "")) if p),
    }
    return env | {k: str(v) for k, v in spec.env.items()}


def _wait_ready(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the file that ``ray start`` writes last. Meanwhile import Ray here, which takes as long as it takes there."""
    import ray  # noqa: F401

    ready = Path(head.temp_dir) / "ray_current_cluster"
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None:
            raise ConnectError(f"The local Ray head ended while starting. The end of its log:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ConnectError(f"The local Ray head was not up after {START_TIMEOUT_S:.0f} s. The end of its log:\n{_tail(log)}")
        time.sleep(0.05)


def _end_processes(pid: int) -> None:
    """End the process group and session led by ``pid`` and all descendants: SIGTERM, then SIGKILL."""
    members = _members(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    _gone, left = psutil.wait_procs(members, timeout=TERM_GRACE_S)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while left := {p for p in [*left, *_members(pid)] if _runs(p)}:
        if time.monotonic() > deadline:
            raise ClusterError(f"Processes of the local cluster did not end: {', '.join(str(p.pid) for p in left)}.")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
        _reap(pid)
    _reap(pid)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(pid: int) -> list[psutil.Process]:
    """Processes in the session led by ``pid``, and its descendants in other sessions."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        found |= {leader, *leader.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == pid:
                found.add(process)
    return list(found)


def _clean(head: Head) -> None:
    """Remove what a head that has ended left behind: stray members of its session, its folder, its state."""
    if not _reused(head):
        _end_processes(head.pid)
    shutil.rmtree(head.temp_dir, ignore_errors=True)
    for suffix in ("json", "token"):
        (_folder() / f"{head.name}.{suffix}").unlink(missing_ok=True)


def _reused(head: Head) -> bool:
    """Whether another process has the head's pid now. A zombie that nobody reaps (no init in a container) still is the head."""
    try:
        return abs(psutil.Process(head.pid).create_time() - head.started) >= 5.0
    except psutil.NoSuchProcess:
        return False


def _reap(pid: int) -> None:
    if pid in _started and _started[pid].poll() is not None:
        del _started[pid]


def _read(path: Path) -> Head | None:
    try:
        return Head(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{path} is not a record of a local cluster ({error}); remove it and connect again.") from error


def _write_private(path: Path, text: str) -> None:
    """Replace ``path`` at once by a file that only its owner can read."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(part, "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as out:
        out.write(text)
    os.replace(part, path)


def _folder() -> Path:
    folder = home() / "clusters"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _free_ports(n: int) -> list[int]:
    """``n`` different free loopback ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Only one process at a time starts or ends the head called ``name``."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"ClusterSpec.name is {name!r}; a local cluster's name must be letters, digits, dots, dashes and underscores.")
    deadline = time.monotonic() + START_TIMEOUT_S
    with open(_folder() / f"{name}.lock", "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"Another process has been starting or ending the local cluster {name!r} for {START_TIMEOUT_S:.0f} s "
                        f"(it holds {held.name})."
                    ) from None
                time.sleep(0.1)
        yield
