"""`rlkit.connect` against real clusters, from kernels that are processes of their own with their own $HOME and $RLKIT_HOME."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rlkit import localhead
from tests.integration.clusters import TwoNodes, kernel_env, two_node_cluster  # noqa: F401

LIMIT_S = 180.0

PRELUDE = """
import json, os, sys, time
import rlkit as rl
from rlkit import actors, errors

SPEC = rl.ClusterSpec(name="test", num_cpus=2, num_gpus=0, object_store_gib=0.1)

class Counter:
    def __init__(self):
        self.n = 0
    def add(self):
        self.n += 1
        return self.n
    def where(self):
        import ray, rlkit
        return ray.get_runtime_context().get_node_id(), rlkit.__file__, sys.path

def facts(cluster):
    return {
        "address": cluster.address, "nodes": len(cluster.nodes), "cpus": cluster.cpus, "gpus": cluster.gpus, "memory": cluster.memory,
        "ray": cluster.ray_version, "python": cluster.python_version, "dashboard": cluster.dashboard_url, "local": cluster.is_local,
        "via": cluster.via, "repr": repr(cluster), "html": cluster._repr_html_(),
        "env": sorted(k for k in os.environ if k.startswith("RAY_AUTH")),
    }

def refused(*args, **changes):
    start = time.monotonic()
    try:
        rl.connect(*args, **changes)
    except errors.RlkitError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["nothing", "", time.monotonic() - start]
"""


def start(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A kernel that runs ``code`` after the prelude, away from this checkout: Ray puts a driver's folder on its workers' path."""
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.Popen(command, cwd=env["HOME"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(kernel: subprocess.Popen[str]) -> Any:
    """What it printed last, as JSON."""
    out, err = kernel.communicate(timeout=LIMIT_S)
    assert kernel.returncode == 0, err[-4000:]
    return json.loads(out.strip().splitlines()[-1])


def run(code: str, env: dict[str, str]) -> Any:
    return result(start(code, env))


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """A home on which a local cluster may be started; none is left afterwards."""
    home = tmp_path_factory.mktemp("home")
    made = kernel_env(home)
    yield made
    for record in (home / ".rlkit" / "clusters").glob("*.json"):
        localhead._end_processes(localhead._read(record).pid)


def head_of(env: dict[str, str]) -> localhead.Head:
    head = localhead._read(Path(env["RLKIT_HOME"]) / "clusters" / "test.json")
    assert head is not None
    return head


def of_session(pid: int) -> list[psutil.Process]:
    return [p for p in localhead._members(pid) if localhead._runs(p)]


def test_two_kernels_at_once_start_one_local_cluster_on_loopback(env):
    code = "c = rl.connect(SPEC)\nprint(json.dumps(facts(c) | {'same': rl.connect(SPEC) is c, 'ps': c.ps()}))"
    first, second = (result(kernel) for kernel in [start(code, env), start(code, env)])
    head = head_of(env)
    assert first["address"] == second["address"] == head.address
    assert first["same"]
    assert (first["nodes"], first["cpus"], first["gpus"], first["local"], first["via"]) == (1, 2, 0, True, "driver")
    assert first["ps"] == {}
    assert first["env"] == []  # no RAY_AUTH_* is left behind in the kernel
    assert "1 node, 2 CPUs, 0 GPUs" in first["repr"]
    assert first["dashboard"].startswith("http://127.0.0.1:")
    assert first["dashboard"] in first["html"]
    listening = [c for p in of_session(head.pid) for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    folder = Path(env["RLKIT_HOME"]) / "clusters"
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    token = Path(head.token_path).read_text()
    assert token not in json.dumps([first, second])
    assert token not in (folder / "test.log").read_text()


def test_actor_and_cluster_survive_a_killed_kernel(env):
    code = """
import ray
cluster = rl.connect(SPEC)
actor = actors.spawn(Counter, "counter", actors.namespace("survivor"))
print(json.dumps([ray.get(actor.add.remote()), ray.get(actor.add.remote())]), flush=True)
time.sleep(600)
"""
    kernel = start(code, env)
    assert kernel.stdout is not None
    line = kernel.stdout.readline()
    assert line, kernel.communicate()[1][-4000:]
    assert json.loads(line) == [1, 2]
    before = head_of(env)
    kernel.send_signal(signal.SIGKILL)
    kernel.communicate()
    code = """
import ray
cluster = rl.connect(SPEC)
actor = actors.find("counter", actors.namespace("survivor"))
found = [cluster.address, cluster.ps(), ray.get(actor.add.remote())]
actors.end([actor])
print(json.dumps(found))
"""
    assert run(code, env) == [before.address, {"survivor": ["counter"]}, 3]
    assert head_of(env) == before


def test_what_a_connected_kernel_is_refused(env):
    code = """
cluster = rl.connect(SPEC)
out = [refused(SPEC.but(num_cpus=1)), refused(SPEC.but(name="other")), refused("127.0.0.1:6379"), refused(SPEC.but(min_gpus=1))]
out.append([cluster is rl.connect(SPEC)])
cluster.disconnect()
out.append([repr(cluster)])
print(json.dumps(out))
"""
    settings, other, address, gpus, same, text = run(code, env)
    assert settings[0] == "ClusterError"
    assert "num_cpus is 2 there and 1 here" in settings[1]
    for error in (other, address):
        assert error[0] == "ClusterError"
        assert "disconnect()" in error[1]
    assert gpus[0] == "ResourceError"
    assert same == [True]
    assert "disconnected" in text[0]


def test_config_with_gpus_is_refused_before_a_cluster_is_started(env):
    found = run("print(json.dumps(refused('one_gpu')))", env)
    assert found[0] == "ResourceError"
    assert "1 GPUs asked for (num_gpus), 0 there" in found[1]
    assert not (Path(env["RLKIT_HOME"]) / "clusters" / "one_gpu.json").exists()


def test_head_that_was_killed_is_cleaned_up_and_replaced(env):
    before = head_of(env)
    os.kill(before.pid, signal.SIGKILL)
    address = run("print(json.dumps(rl.connect(SPEC).address))", env)
    assert address != before.address
    assert not of_session(before.pid)
    assert not Path(before.temp_dir).exists()


def test_shutdown_leaves_nothing(env):
    before = head_of(env)
    run("c = rl.connect(SPEC); actors.spawn(Counter, 'left', 'rlkit-left'); c.shutdown(); print('null')", env)
    assert not of_session(before.pid)
    assert not Path(before.temp_dir).exists()
    assert {p.suffix for p in (Path(env["RLKIT_HOME"]) / "clusters").iterdir()} == {".lock", ".log"}


BOTH_NODES = """
import ray, warnings
cluster = rl.connect(sys.argv[1] if len(sys.argv) > 1 else ADDRESS)
space = actors.namespace("both-" + cluster.via)
made = [actors.spawn(Counter, "first", space, cpus=1), actors.spawn(Counter, "second", space, cpus=1, resources={"second_node": 0.1})]
places = ray.get([a.where.remote() for a in made])
add = ray.get(made[0].add.remote())
found = facts(cluster) | {"places": places, "same": rl.connect(ADDRESS) is cluster, "ps": cluster.ps(), "add": add}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cluster.shutdown()
found["warned"] = [str(w.message) for w in caught if "rlkit did not start it" in str(w.message)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("via", ["driver", "client"])
def test_two_nodes(two_node_cluster: TwoNodes, tmp_path, via):  # noqa: F811
    address = two_node_cluster.address if via == "driver" else two_node_cluster.client_address
    found = run(f"ADDRESS = {address!r}\n" + BOTH_NODES, two_node_cluster.env(tmp_path))
    assert (found["address"], found["via"], found["local"], found["same"]) == (address, via, False, True)
    assert (found["nodes"], found["cpus"], found["gpus"]) == (2, 2 * two_node_cluster.cpus_per_node, 0)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    (node_a, file_a, path_a), (node_b, file_b, _) = found["places"]
    assert node_a != node_b
    # The library came over the cluster, and only it: not from this checkout.
    assert file_a == file_b
    assert "py_modules" in file_a
    shipped = next(Path(p) for p in path_a if "py_modules" in p)
    assert {p.name for p in shipped.iterdir()} == {"rlkit"}
    assert found["ps"][f"both-{via}"] == ["first", "second"]
    assert found["warned"]
    # The actors outlive that kernel; a driver finds them.
    code = f"""
import ray
cluster = rl.connect({two_node_cluster.address!r})
space = actors.namespace("both-{via}")
again = ray.get(actors.find("first", space).add.remote())
actors.end(actors.started_with(space, ''))
print(json.dumps([again, cluster.ps()]))
"""
    assert run(code, two_node_cluster.env(tmp_path)) == [found["add"] + 1, {}]


def test_what_an_address_is_refused_for(two_node_cluster: TwoNodes, tmp_path):  # noqa: F811
    c = two_node_cluster
    wrong = tmp_path / "wrong-token"
    wrong.write_text("0" * 64)
    asks = {
        "missing": [c.address, {}],
        "missing over ray://": [c.client_address, {}],
        "wrong": [c.address, {"token_path": str(wrong)}],
        "wrong over ray://": [c.client_address, {"token_path": str(wrong)}],
        "no such file": [c.address, {"token_path": str(tmp_path / "none")}],
        "client as gcs": [c.client_address.removeprefix("ray://"), {}],
        "gcs as client": [f"ray://{c.address}", {}],
        "gpus": [c.address, {"token_path": str(c.token_path), "min_gpus": 1}],
        "nodes": [c.address, {"token_path": str(c.token_path), "min_nodes": 3}],
        "gpus over ray://": [c.client_address, {"token_path": str(c.token_path), "learner": {"gpus_per_rank": 1}}],
    }
    code = f"import ray\nasks = {asks!r}\nprint(json.dumps({{k: refused(a, **more) for k, (a, more) in asks.items()}}))"
    found = run(code, kernel_env(tmp_path))
    expected = {
        "missing": ("AuthError", "none was found"),
        "missing over ray://": ("AuthError", "RAY_AUTH_TOKEN_PATH"),
        "wrong": ("AuthError", "wrong-token (the setting token_path)"),
        "wrong over ray://": ("AuthError", "wrong-token (the setting token_path)"),
        "no such file": ("AuthError", "Cannot read"),
        "client as gcs": ("ConnectError", f"connect to '{c.client_address}'"),
        "gcs as client": ("ConnectError", f"connect to '{c.address}'"),
        "gpus": ("ResourceError", "1 GPUs asked for (min_gpus), 0 there"),
        "nodes": ("ResourceError", "3 nodes asked for (min_nodes), 2 there"),
        "gpus over ray://": ("ResourceError", "1 ranks x 1"),
    }
    assert {k: v[0] for k, v in found.items()} == {k: v[0] for k, v in expected.items()}, found
    for key, (_, part) in expected.items():
        assert part in found[key][1], (key, found[key])
    # Ray Client can only be asked for resources through a session, which takes Ray seconds to open.
    assert max(seconds for key, (_, _, seconds) in found.items() if key != "gpus over ray://") < 5
    assert not any(c.token in message or "0" * 64 in message for _, message, _ in found.values())


def test_other_ray_version(two_node_cluster: TwoNodes, tmp_path):  # noqa: F811
    """The cluster reports another version: what it stored about itself at its start is replaced while the test runs."""
    from ray.core.generated import gcs_service_pb2 as messages
    from ray.core.generated import gcs_service_pb2_grpc as services

    c = two_node_cluster
    place = {"key": b"CLUSTER_METADATA", "namespace": b"cluster"}
    call = {"metadata": [("authorization", f"Bearer {c.token}")], "timeout": 10}
    with grpc.insecure_channel(c.address) as channel:
        store = services.InternalKVGcsServiceStub(channel)
        before = store.InternalKVGet(messages.InternalKVGetRequest(**place), **call).value
        other = json.dumps(json.loads(before) | {"ray_version": "2.40.0", "python_version": "3.9.1"}).encode()
        try:
            store.InternalKVPut(messages.InternalKVPutRequest(**place, value=other, overwrite=True), **call)
            start_s = time.monotonic()
            found = run(f"import ray\nprint(json.dumps(refused({c.address!r})))", c.env(tmp_path))
            assert time.monotonic() - start_s < 30
        finally:
            store.InternalKVPut(messages.InternalKVPutRequest(**place, value=before, overwrite=True), **call)
    assert found[0] == "VersionMismatchError"
    assert "Ray 2.40.0 there" in found[1]
    assert "Python 3.9.1 there" in found[1]
    assert found[2] < 5
