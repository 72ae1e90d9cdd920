"""What a dashboard sends to the browser, and what it costs the kernel, against plotly's FigureWidget with the same data.

    python benchmarks/widget_wire.py [--points 100000] [--ticks 50]

A real kernel holds a run on disk with 8 metrics at every step. Bytes are those of the kernel's messages as they leave it: signature,
headers, content and buffers, which JupyterLab's server forwards to the browser as they are. This process answers in the browser's place.

- opening: everything from the widget's birth until it holds the whole history; plotly.js is counted apart.
- a tick: one more step, so one new point on each of 8 curves. ``ms`` is the kernel's own time for it, reading the log included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from typing import Any

import machine
import zmq
from jupyter_client.manager import KernelManager

TRACES = 8
METRICS = (
    "reward/mean",
    "verdict/correct",
    "length/mean",
    "policy/entropy",
    "policy/approx_kl",
    "policy/grad_norm",
    "policy/logprob_gap",
    "policy/lr",
)
TICK_BYTES, TICK_MS, OPEN_BYTES = 2_000, 2.0, 3_000_000  # what must not be exceeded
WAIT_S = 300

SETUP = """
import json, os, statistics, time
from pathlib import Path
import numpy as np
os.environ["RLKIT_WIDGETS"] = "1"
folder, points, metrics = Path({folder!r}), {points}, {metrics!r}
data = np.random.default_rng(0).standard_normal((points + 1000, len(metrics))).cumsum(axis=0)

def line(step):
    values = dict(zip(metrics, data[step].tolist()))
    return json.dumps(dict(t=1.8e9 + 1.7 * step, kind="step", step=step, version=step, updates=1, metrics=values)) + chr(10)

folder.mkdir()
log = (folder / "events.jsonl").open("a")
log.write(json.dumps(dict(t=1.8e9, kind="open", name=folder.name, seed=0)) + chr(10))
log.writelines(line(step) for step in range(points))
log.flush()
at = points
"""
OURS = """
from rlkit.widgets import {what} as What
began = time.perf_counter()
board = What(folder)
read = time.perf_counter() - began
view = board.open_view()
"""
# The view's thread would send the ticks itself: it is held back by its own lock, and what it does every half second is done here and timed.
OUR_TICKS = """
spent = []
with view._change:
    for _ in range({ticks}):
        log.write(line(at)); log.flush(); at += 1
        began = time.perf_counter()
        board.read(); view._tick()
        spent.append(1e3 * (time.perf_counter() - began))
print(json.dumps(spent))
"""
PLOTLYS = """
import plotly.graph_objects as go
steps = np.arange(points, dtype=float)
figure = go.FigureWidget([go.Scatter(x=steps, y=data[:points, i], name=name) for i, name in enumerate(metrics)])
"""
PLOTLY_TICKS = """
spent = []
for n in range(points, points + {ticks}):
    began = time.perf_counter()
    steps = np.arange(n + 1, dtype=float)
    with figure.batch_update():
        for i, trace in enumerate(figure.data):
            trace.x, trace.y = steps, data[: n + 1, i]
    spent.append(1e3 * (time.perf_counter() - began))
print(json.dumps(spent))
"""


class Kernel:
    """A kernel, and a count of what it publishes."""

    def __init__(self, sockets: str) -> None:
        self.manager = KernelManager(transport="ipc", ip=f"{sockets}/kernel")  # socket files: no port that others could reach
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        self.messages: list[dict[str, Any]] = []  # {"type", "bytes", "content"} of every message so far
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(b"")
        self._socket.connect(self.manager._make_url("iopub"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart()
            frames = frames[frames.index(b"<IDS|MSG>") + 1 :]
            kind = json.loads(frames[1])["msg_type"]
            content = json.loads(frames[4]) if kind.startswith("comm") or kind == "stream" else {}
            self.messages.append({"type": kind, "bytes": sum(map(len, frames)), "content": content})

    def run(self, code: str) -> str:
        """Run a cell; returns what it printed.

        Raises:
            RuntimeError: it failed.
        """
        since = len(self.messages)
        reply = self.client.execute(code, reply=True, timeout=WAIT_S)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        self.settle()
        return "".join(m["content"]["text"] for m in self.messages[since:] if m["type"] == "stream")

    def settle(self) -> None:
        """Until nothing has come for half a second."""
        before = -1
        while before != len(self.messages):
            before = len(self.messages)
            time.sleep(0.5)

    def say(self, comm: str, content: dict[str, Any]) -> None:
        """A widget's message, as the browser sends it."""
        data = {"comm_id": comm, "data": {"method": "custom", "content": content}}
        self.client.session.send(self.client.shell_channel.socket, "comm_msg", data)

    def until(self, kind: str, since: int) -> None:
        """Until a custom message of that kind has come.

        Raises:
            TimeoutError: it has not.
        """
        end = time.monotonic() + WAIT_S
        while not any(custom(m) == kind for m in self.messages[since:]):
            if time.monotonic() > end:
                raise TimeoutError(f"no {kind} message came within {WAIT_S} s")
            time.sleep(0.05)
        self.settle()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def custom(message: dict[str, Any]) -> str | None:
    """The kind of one of our own messages."""
    data = message["content"].get("data", {})
    return data.get("content", {}).get("kind") if data.get("method") == "custom" else None


def comm_bytes(messages: list[dict[str, Any]], kind: str | None = None) -> int:
    return sum(m["bytes"] for m in messages if m["type"].startswith("comm") and (kind is None or custom(m) == kind))


def ours(kernel: Kernel, what: str, ticks: int) -> dict[str, Any]:
    """Open one of our views as a page that has plotly.js from an earlier one, or as the first."""
    since = len(kernel.messages)
    kernel.run(OURS.format(what=what))
    comm = next(m["content"]["comm_id"] for m in kernel.messages[since:] if "spec" in m["content"].get("data", {}).get("state", {}))
    kernel.say(comm, {"kind": "hello", "page": "benchmark", "library": True, "nonce": 1})
    kernel.until("start", since)
    opening = kernel.messages[since:]
    library = comm_bytes(opening, "library")
    since = len(kernel.messages)
    spent = json.loads(kernel.run(OUR_TICKS.format(ticks=ticks)))
    sent = [m["bytes"] for m in kernel.messages[since:] if custom(m) == "tick"]
    assert len(sent) == ticks, f"{len(sent)} messages for {ticks} ticks"
    read_s = float(kernel.run("print(read)"))
    kernel.run("board.close()")
    return {
        "open_bytes": comm_bytes(opening) - library,
        "library_bytes": library,
        "read_s": round(read_s, 2),
        "tick_bytes": max(sent),
        "tick_ms": round(statistics.median(spent), 3),
        "tick_ms_p95": round(sorted(spent)[int(0.95 * len(spent))], 3),
    }


def plotlys(kernel: Kernel, ticks: int) -> dict[str, Any]:
    since = len(kernel.messages)
    kernel.run(PLOTLYS)
    opening = comm_bytes(kernel.messages[since:])
    since = len(kernel.messages)
    spent = json.loads(kernel.run(PLOTLY_TICKS.format(ticks=ticks)))
    return {
        "open_bytes": opening,
        "tick_bytes": comm_bytes(kernel.messages[since:]) // ticks,
        "tick_ms": round(statistics.median(spent), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=100_000, help="steps in the history")
    parser.add_argument("--ticks", type=int, default=50, help="new steps that are timed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kernel = Kernel(scratch)
        try:
            kernel.run(SETUP.format(folder=f"{scratch}/wire", points=args.points, metrics=METRICS))
            result: dict[str, Any] = {"points": args.points, "traces": TRACES, "ticks": args.ticks}
            result["RewardCurves"] = ours(kernel, "RewardCurves", args.ticks)
            result["Dashboard"] = ours(kernel, "Dashboard", args.ticks)
            result["FigureWidget"] = plotlys(kernel, max(3, args.ticks // 10))
        finally:
            kernel.end()
    print(json.dumps(result, indent=1))
    for name in ("RewardCurves", "Dashboard"):
        found = result[name]
        assert found["tick_bytes"] < TICK_BYTES, (name, found)
        assert found["tick_ms"] < TICK_MS, (name, found)
        assert found["open_bytes"] <= OPEN_BYTES, (name, found)
    if args.points >= 100_000:
        print(f"written to {machine.save('widget_wire', result)}")


if __name__ == "__main__":
    main()
