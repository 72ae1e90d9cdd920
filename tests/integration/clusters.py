"""A Ray cluster of two nodes on one machine, started separately with ``ray start`` as an administrator would, token auth on.

Both raylets are on loopback. Each is held by its own ``ray start --block`` in its own session, so that exactly these processes are ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlkit import localhead

UP_WITHIN_S = 120.0


@dataclass(frozen=True)
class TwoNodes:
    """Where to connect. Connect in a subprocess with `env`, or in a process that has no Ray connection."""

    address: str  # "127.0.0.1:port"
    client_address: str  # "ray://127.0.0.1:port"
    token_path: Path
    token: str
    cpus_per_node: int

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a kernel on this machine with the cluster's token; ``more`` wins."""
        return kernel_env(home, RAY_AUTH_TOKEN_PATH=str(self.token_path), **more)


def kernel_env(home: Path, **more: str) -> dict[str, str]:
    """This process's environment without Ray's variables and with its own $HOME and $RLKIT_HOME, so that no token is found by chance."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return kept | {"HOME": str(home), "RLKIT_HOME": str(home / ".rlkit"), **more}


@contextlib.contextmanager
def two_nodes(folder: Path, cpus_per_node: int = 4, object_store_mib: int = 128, gpus_per_node: int = 0) -> Iterator[TwoNodes]:
    """Start a head and a worker node, end both with everything on them afterwards. Ray believes in ``gpus_per_node`` without looking."""
    folder.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix="rlkit-2n-"))  # short, for the sockets below it
    (temp / localhead.SHIM_NAME).write_text(localhead.SHIM)
    token, token_path = secrets.token_hex(32), folder / "token"
    token_path.write_text(token)
    port, client_port, metrics_port, *agents = localhead._free_ports(5)
    common = {"PYTHONPATH": str(temp), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    common |= {"DASHBOARD_METRIC_PORT": str(metrics_port), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    common |= {"GRPC_ENABLE_FORK_SUPPORT": "0"}  # else the first process that the Ray Client server forks for a session often dies
    common |= {"RAY_prestart_worker_first_driver": "0"}  # else each driver starts a worker for every CPU, most of them for nothing
    each = [
        f"--num-cpus={cpus_per_node}",
        f"--object-store-memory={object_store_mib * 2**20}",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str, **env: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-gpus={gpus_per_node}", *each, *options]
        with open(folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=temp,
                env=kernel_env(folder, **common, **env),
            )
        started.append(process)
        deadline = time.monotonic() + UP_WITHIN_S
        while "Ray runtime started" not in (folder / f"{name}.log").read_text(errors="replace"):
            assert process.poll() is None, (folder / f"{name}.log").read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, f"{name} was not up after {UP_WITHIN_S:.0f} s"
            time.sleep(0.1)

    try:
        start(
            "head",
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            f"--ray-client-server-port={client_port}",
            "--include-dashboard=false",
            f"--dashboard-agent-listen-port={agents[0]}",
            f"--temp-dir={temp}",
            "--disable-usage-stats",
            "--no-monitor",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # keeps 127.0.0.1 as the node's address
        )
        # A joining node takes the address from which it reaches the head; in capitals, the name is not replaced by the outer address.
        start("worker", f"--address=LOCALHOST:{port}", f"--dashboard-agent-listen-port={agents[1]}", '--resources={"second_node": 1}')
        yield TwoNodes(f"127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}", token_path, token, cpus_per_node)
    finally:
        for process in reversed(started):
            localhead._end_processes(process.pid)
            process.wait()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture(scope="module")
def two_node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("two-nodes")) as cluster:
        yield cluster
