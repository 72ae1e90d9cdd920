"""Bytes between a notebook and its cluster over ray://, for one step of 64 prompts x 8 samples.

    python benchmarks/link_traffic.py [--steps 3] [--max_tokens 40]

The notebook's connection goes through a small proxy on loopback that counts what passes in each direction. The first step is not
counted: it carries the reward's code and the handles of actors, once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import tempfile
import threading
from pathlib import Path

import machine

import rlkit as rl
from rlkit import localhead
from rlkit.cluster import load_spec

PROMPTS, GROUP = 64, 8


class CountingProxy:
    """Forwards TCP connections on a free loopback port to ``port`` and counts bytes both ways."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.up = self.down = 0  # bytes, notebook -> cluster and back
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def total(self) -> int:
        return self.up + self.down

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pump, args=(here, there, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(there, here, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):  # either end may close first
            while data := source.recv(1 << 16):
                with self._lock:
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def measure(head: localhead.Head, steps: int, max_tokens: int, storage: str) -> dict[str, object]:
    """Connect through the proxy, train ``steps`` steps, and return the bytes of each."""
    proxy = CountingProxy(head.client_port)
    address = f"ray://127.0.0.1:{proxy.port}"
    cluster = rl.connect("laptop", address=address, storage=storage, token_path=head.token_path)
    run = rl.Run("link", cluster, resume=False)
    tasks = rl.load_tasks("arithmetic")
    sampler, learner = run.sampler("tiny"), run.learner("tiny", lr=1e-4)
    rows = []
    for step in run.steps(steps, progress=False):
        up, down = proxy.up, proxy.down
        rollouts = sampler.generate(tasks.batch(PROMPTS), n=GROUP, max_tokens=max_tokens, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"))
        sampler.sync(learner)
        run.log(step, scored, stats)
        rows.append({"up": proxy.up - up, "down": proxy.down - down, "tokens": int(rollouts.lengths.sum())})
    run.close()
    cluster.disconnect()
    counted = [r["up"] + r["down"] for r in rows[1:]]
    return {"shape": f"{PROMPTS} prompts x {GROUP} samples", "steps": rows, "bytes_a_step": max(counted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max_tokens", type=int, default=40)
    args = parser.parse_args()
    spec = load_spec("laptop", name="link-traffic", dashboard=False)
    head, _ = localhead.find_or_start(spec)
    try:
        with tempfile.TemporaryDirectory() as storage:
            result = measure(head, args.steps, args.max_tokens, str(Path(storage).resolve()))
    finally:
        localhead.stop(spec.name)
    machine.save("link_traffic", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
