"""What `connect` says about addresses, tokens, versions and resources. Sockets are real and on loopback; no Ray runs."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
import ray

from rlkit.config import ClusterSpec
from rlkit.errors import AuthError, ConfigError, ConnectError, ResourceError, VersionMismatchError
from rlkit.preflight import Node, Token, check_resources, check_versions, find_token, look, parse_address

GIB = 2**30


@contextlib.contextmanager
def server(answer: bytes | None):
    """A port that sends ``answer`` to whoever connects and hangs up, or with None says nothing and holds on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        held = []

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        for connection in held:
            connection.close()


def found(token_path: str | None = None) -> Token:
    token = find_token(token_path)
    assert token is not None
    return token


@pytest.fixture
def no_token(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("address", "kind", "host", "port"),
    [
        ("head:6379", "gcs", "head", 6379),
        ("ray://10.0.0.1:10001", "client", "10.0.0.1", 10001),
        ("[::1]:6379", "gcs", "::1", 6379),
    ],
)
def test_addresses(address, kind, host, port):
    target = parse_address(address)
    assert (target.kind, target.host, target.port, target.address) == (kind, host, port, address)


@pytest.mark.parametrize("address", ["head", "http://head:8265", "head:0", "head:70000", "ray://", "a b:1", ""])
def test_bad_addresses(address):
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(address)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_dead_port(scheme):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ConnectError, match=rf"nothing listens on port {port} of 127\.0\.0\.1.*6379.*10001.*8265"):
        look(parse_address(f"{scheme}127.0.0.1:{port}"), None, 5.0)
    assert time.monotonic() - start < 2


def test_name_that_does_not_exist():
    start = time.monotonic()
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid"):
        look(parse_address("no-such-host.invalid:6379"), None, 3.0)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_port_that_answers_something_else(scheme):
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(ConnectError, match="does not speak Ray's protocol"):
        look(parse_address(f"{scheme}127.0.0.1:{port}"), None, 5.0)


def test_port_that_says_nothing():
    start = time.monotonic()
    with server(None) as port, pytest.raises(ConnectError, match=r"no answer within 1 s \(connect_timeout_s\)"):
        look(parse_address(f"127.0.0.1:{port}"), None, 1.0)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_grpc_server_that_is_not_ray(scheme):
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with pytest.raises(ConnectError, match="Something other than Ray"):
            look(parse_address(f"{scheme}127.0.0.1:{port}"), None, 5.0)
    finally:
        other.stop(None)


def test_no_token_anywhere(no_token):
    assert find_token(None) is None


def test_order_in_which_tokens_are_read(no_token, monkeypatch):
    default = no_token / ".ray" / "auth_token"
    default.parent.mkdir()
    default.write_text("from-default\n")
    assert found().value == "from-default"
    named = no_token / "named"
    named.write_text(" from-path ")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    assert found().value == "from-path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from-env")
    assert found().value == "from-env"
    setting = no_token / "setting"
    setting.write_text("from-setting")
    token = found(str(setting))
    assert token.value == "from-setting"
    assert "token_path" in token.source


def test_token_is_in_no_repr(no_token, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "very-secret")
    assert "very-secret" not in repr(found())


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_named_token_file_that_is_missing_or_empty(no_token, monkeypatch, content):
    path = no_token / "named"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AuthError, match=r"named.*token_path"):
        find_token(str(path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with pytest.raises(AuthError, match=r"named.*RAY_AUTH_TOKEN_PATH"):
        find_token(None)


def test_versions():
    mine = ".".join(map(str, sys.version_info[:3]))
    check_versions(ray.__version__, mine, "a:1")
    with pytest.raises(VersionMismatchError, match=rf"a:1.*Ray 2\.40\.0 there, {ray.__version__} here"):
        check_versions("2.40.0", mine, "a:1")
    with pytest.raises(VersionMismatchError, match=rf"Python 3\.9\.1 there, {mine} here"):
        check_versions(ray.__version__, "3.9.1", "a:1")
    other_patch = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro + 1}"
    with pytest.raises(VersionMismatchError, match="Python"):
        check_versions(ray.__version__, other_patch, "a:1")
    check_versions(ray.__version__, other_patch, "a:1", python_level="minor")


NODES = [Node("a", cpus=4, gpus=1, memory=8 * GIB, head=True), Node("b", cpus=4, memory=8 * GIB)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_nodes": 3}, r"3 nodes asked for \(min_nodes\), 2 there"),
        ({"min_cpus": 9}, r"9 CPUs asked for \(min_cpus\), 8 there"),
        ({"min_gpus": 2}, r"2 GPUs asked for \(min_gpus\), 1 there"),
        ({"min_memory_gib": 17}, r"17 GiB of memory asked for \(min_memory_gib\), 16 there"),
        ({"sampler": {"engines": 2, "gpus_per_engine": 0.5}, "learner": {"gpus_per_rank": 0.5}}, r"1\.5 GPUs.*2 engines x 0\.5 \+ 1 ranks"),
        ({"sampler": {"tensor_parallel_size": 2}}, r"2 GPUs.*1 engines x 2"),
        ({"learner": {"ranks": 8}}, r"9 CPUs.*1 engines x 1 \+ 8 ranks x 1"),
    ],
)
def test_resources_that_are_missing(settings, message):
    with pytest.raises(ResourceError, match=message):
        check_resources(ClusterSpec.make(settings), NODES, "at a:1")


def test_every_shortage_is_named_at_once():
    with pytest.raises(ResourceError, match=r"min_nodes.*min_gpus"):
        check_resources(ClusterSpec(min_nodes=3, min_gpus=2), NODES, "at a:1")


def test_resources_that_are_there():
    check_resources(ClusterSpec(min_nodes=2, min_cpus=8, min_gpus=1, min_memory_gib=16), NODES, "at a:1")
    check_resources(ClusterSpec(), [Node("a", cpus=1)], "at a:1")  # nothing asked for
