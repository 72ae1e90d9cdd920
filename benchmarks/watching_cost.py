"""What an open dashboard costs a run: step times with and without one, in one kernel, in turns.

    python benchmarks/watching_cost.py [--pairs 12] [--steps 4] [--config laptop] [--model tiny] [--prompts 16] [--max_tokens 48]

A Jupyter kernel trains a model (8 samples a prompt, all of one length, so that steps take equally long) in cells of a few steps; before
every other cell a `Dashboard` is opened, and closed after it. Cells are run as JupyterLab runs them, and the dashboard is greeted as a page
greets it, so it sends what it would send to a page, twice a second. Which of a pair comes first changes from pair to pair. The figure is
the mean over pairs of (time with / time without), with a 95 % interval from their spread; it needs a quiet machine. Beside it stands the
CPU time that a step takes in the kernel, and in the run's recorder and monitor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import machine
from jupyter_client.manager import KernelManager

VIEW_MIME = "application/vnd.jupyter.widget-view+json"
SETUP = """
import os, time
import psutil
os.environ.setdefault("RLKIT_HOME", {home!r})
import rlkit as rl
from rlkit import localhead
from rlkit.widgets import Dashboard
cluster = rl.connect({config!r}, storage={home!r})
run = rl.Run("watched", cluster)
tasks, sampler, learner = rl.load_tasks("arithmetic"), run.sampler({model!r}), run.learner({model!r}, lr=1e-5)

def used():
    # CPU seconds of this kernel's process, and of the run's recorder and monitor.
    own, others = time.process_time(), 0.0
    (head,) = localhead.living()
    for process in psutil.Process(head.pid).children(recursive=True):
        if " ".join(process.cmdline()[:1]).startswith(("ray::Recorder", "ray::Monitor")):
            others += sum(process.cpu_times()[:2])
    return own, others

def block(steps):
    before, begun = used(), time.perf_counter()
    for step in run.steps(run.committed + 1 + steps, progress=False):
        rollouts = sampler.generate(tasks.batch({prompts}), n=8, max_tokens={max_tokens}, min_tokens={max_tokens}, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math())
        stats = learner.update(rl.advantages(scored, "grpo"))
        sampler.sync(learner)
        run.log(step, scored, stats)
    took, after = time.perf_counter() - begun, used()
    print(*(value / steps for value in (took, after[0] - before[0], after[1] - before[1])))
"""


class Kernel:
    """A Jupyter kernel that runs cells as JupyterLab asks for it."""

    def __init__(self, folder: Path) -> None:
        self._manager = KernelManager(transport="ipc", ip=f"{folder}/k")
        self._manager.start_kernel(cwd=str(Path.cwd()))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def greet(self) -> None:
        """Say what a page says that shows the widget which was displayed last."""
        content = {"method": "custom", "content": {"kind": "hello", "page": "benchmark", "library": False}}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", {"comm_id": self._widget, "data": content}))

    def run(self, code: str, cell: str) -> tuple[str, int, int]:
        """(what the cell printed, messages of widgets meanwhile, their bytes)."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        message = self._client.session.msg("execute_request", content)
        message["metadata"] = {"cellId": cell}
        self._client.shell_channel.send(message)
        printed, count, size = "", 0, 0
        while True:
            reply: dict[str, Any] = self._client.get_iopub_msg(timeout=600)
            kind = reply["msg_type"]
            if kind == "error":
                raise SystemExit("\n".join(reply["content"]["traceback"]))
            if kind == "stream" and reply["content"]["name"] == "stdout":
                printed += reply["content"]["text"]
            if kind in ("display_data", "execute_result") and VIEW_MIME in reply["content"]["data"]:
                self._widget = reply["content"]["data"][VIEW_MIME]["model_id"]
            if kind == "comm_msg":
                count += 1
                size += len(json.dumps(reply["content"])) + sum(len(b) for b in reply["buffers"])
            ours = reply["parent_header"].get("msg_id") == message["header"]["msg_id"]
            if ours and reply["content"].get("execution_state") == "idle":
                return printed, count, size

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--config", default="laptop")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max_tokens", type=int, default=48)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    messages = size = 0
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        job = {key: getattr(args, key) for key in ("config", "model", "prompts", "max_tokens")}
        kernel.run(SETUP.format(home=folder, **job), "setup")
        try:
            kernel.run(f"block({args.steps})", "warm")
            for pair in range(args.pairs):
                for which in ("with", "without") if pair % 2 else ("without", "with"):
                    if which == "with":
                        kernel.run("board = Dashboard(run)\nboard", "board")
                        kernel.greet()
                    printed, count, sent = kernel.run(f"block({args.steps})", "block")
                    took, own, others = map(float, printed.splitlines()[-1].split())
                    seconds[which].append(took)
                    cpu[which].append((own, others))
                    if which == "with":
                        messages, size = messages + count, size + sent
                        kernel.run("board.close()", "close")
        finally:
            kernel.run("run.close(); cluster.shutdown()", "end")
            kernel.end()
    if messages < args.pairs * args.steps:
        raise SystemExit(f"The dashboards sent {messages} messages only: they were not watched.")
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    result = {
        **job,
        "pairs": args.pairs,
        "steps_a_block": args.steps,
        "seconds_a_step": {name: round(statistics.mean(values), 4) for name, values in seconds.items()},
        "ratio": round(statistics.mean(ratios), 4),
        "ratio_median": round(statistics.median(ratios), 4),
        "interval_95": [round(statistics.mean(ratios) - 1.96 * error, 4), round(statistics.mean(ratios) + 1.96 * error, 4)],
        "cpu_ms_a_step": {
            name: {
                "kernel": round(1e3 * statistics.mean(a for a, _ in both), 1),
                "recorder and monitor": round(1e3 * statistics.mean(b for _, b in both), 1),
            }
            for name, both in cpu.items()
        },
        "messages": messages,
        "bytes": size,
    }
    print(json.dumps(result))
    machine.save("watching_cost" if args.config == "laptop" else "watching_cost_gpu", result)


if __name__ == "__main__":
    main()
