"""The monitor on real GPUs, as a script: python tests/gpu/monitor_on_gpus.py MODEL OUT.json [SECONDS]

A loop of GRPO in bfloat16 runs on one card, engine and learner beside each other, while nvidia-smi is asked once a second as well. Checked:
the monitor's memory, power and temperature are those of nvidia-smi, memory is told by role and adds up, the card is seen to work, and the
run's dashboard says so in pictures, which are written beside OUT.json. Measured: what the monitor's process costs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import rlkit as rl
from rlkit import localhead
from rlkit.widgets import Dashboard, GpuMonitor

ASKED = ("memory.used", "utilization.gpu", "power.draw", "temperature.gpu")
GIB = 2**30


def smi() -> list[float]:
    """What nvidia-smi says of the first card that this process may see: MiB, percent, W, degrees."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    return [float(value) for value in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(",")]


def watch(into: list[dict[str, Any]], over: threading.Event) -> None:
    while not over.wait(1.0):
        into.append({"t": time.time(), **dict(zip(ASKED, smi(), strict=True))})


def monitor_process() -> psutil.Process:
    (head,) = localhead.living()
    (found,) = [p for p in psutil.Process(head.pid).children(recursive=True) if " ".join(p.cmdline()[:1]).startswith("ray::Monitor")]
    return found


def nearest(samples: list[dict[str, Any]], t: float) -> dict[str, Any]:
    return min(samples, key=lambda sample: abs(sample["t"] - t))


def main() -> None:
    model, out = sys.argv[1], Path(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 40.0
    with tempfile.TemporaryDirectory() as storage:
        spec = rl.ClusterSpec.make(
            {
                "name": "monitor-on-gpus",
                "num_cpus": os.cpu_count(),
                "num_gpus": 1,
                "dashboard": False,
                "storage": storage,
                "sampler": {"gpus_per_engine": 0.4, "kv_cache_gib": 8.0, "max_model_len": 512, "enforce_eager": True},
                "learner": {"gpus_per_rank": 0.4, "zero_stage": 2, "lr": 1e-6, "micro_batch_tokens": 16384},
            }
        )
        cluster = rl.connect(spec)
        run = rl.Run("monitored", cluster)
        tasks, sampler, learner = rl.load_tasks("word_problems"), run.sampler(model), run.learner(model)
        said: list[dict[str, Any]] = []
        over = threading.Event()
        process, begun = monitor_process(), time.monotonic()
        thread = threading.Thread(target=watch, args=(said, over), daemon=True)
        thread.start()
        cpu = sum(process.cpu_times()[:2])
        for step in run.steps(10_000, progress=False):
            rollouts = sampler.generate(tasks.batch(32), n=8, max_tokens=256, progress=False)
            scored = rl.score(rollouts, rl.rewards.Math() + 0.01 * rl.rewards.Length(128, 64))
            stats = learner.update(rl.advantages(scored, "grpo"))
            sampler.sync(learner)
            run.log(step, scored, stats)
            if time.monotonic() - begun > seconds:
                break
        took = time.monotonic() - begun
        cost = 100 * (sum(process.cpu_times()[:2]) - cpu) / took
        over.set()
        thread.join()
        time.sleep(3)
        source = rl.watch.source(run)
        found = [s for s in source.poll().monitor if said[0]["t"] <= s["t"] <= said[-1]["t"]]
        gpus = [s["gpus"][0] | {"t": s["t"]} for s in found]
        pairs = [(g, nearest(said, g["t"])) for g in gpus]
        off = statistics.median(abs(g["memory"] / 2**20 - s["memory.used"]) for g, s in pairs)
        last = gpus[-1]
        texts = source.token_texts()(run.samples(run.committed)["tokens"].iloc[0])
        result = {
            "samples": len(gpus),
            "card": last["name"],
            "memory_off_by_mib": off,
            "temperature_off_by": statistics.median(abs(g["temperature"] - s["temperature.gpu"]) for g, s in pairs),
            "power_w": [min(g["power"] for g in gpus), max(g["power"] for g in gpus)],
            "power_of_nvidia_smi": [min(s["power.draw"] for s in said), max(s["power.draw"] for s in said)],
            "utilization": [statistics.mean(g["utilization"] for g in gpus), statistics.mean(s["utilization.gpu"] for s in said)],
            "roles_gib": {role: round(last["roles"][role] / GIB, 2) for role in last["roles"]},
            "note": found[-1]["note"],
            "monitor_percent_of_a_core": round(cost, 3),
            "steps": run.committed + 1,
            "words": repr(GpuMonitor(run)),
        }
        print(json.dumps(result, indent=1), flush=True)
        board = Dashboard(run)
        out.with_suffix(".html").write_text(board._repr_html_())
        run.close()
        cluster.shutdown()
        out.write_text(json.dumps(result, indent=1))
    assert len(gpus) > 0.9 * seconds - 5
    assert off < 300, "memory is not that of nvidia-smi"
    assert result["temperature_off_by"] <= 2
    assert all(0 <= g["utilization"] <= 100 for g in gpus)
    assert result["utilization"][0] > 5
    assert abs(result["utilization"][0] - result["utilization"][1]) < 25
    assert 50 < result["power_w"][0] <= result["power_w"][1] < 800
    assert all(sum(g["roles"].values()) >= g["memory"] for g in gpus)
    assert last["roles"]["engine"] > 8 * GIB, "the cache alone has 8 GiB"
    assert last["roles"]["learner"] > GIB
    assert last["roles"]["other"] < GIB
    assert found[-1]["note"] == ""
    assert any(texts)
    assert cost < 1.0


if __name__ == "__main__":
    main()
