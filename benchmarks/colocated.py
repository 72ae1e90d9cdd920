"""One GRPO step of a large model with engine and learner on one card: peak memory by phase, measured against `rlkit.placement`.

    python benchmarks/colocated.py --shape 7b          # Llama-2-7B's shape, random weights; needs about 115 GiB of host memory
    python benchmarks/colocated.py --shape tiny        # a smoke test, on the CPU too, with fewer and shorter samples; saves nothing there

The model is written in bfloat16 to a temporary folder. The learner is ZeRO-3 with its optimizer in host memory and
gradient checkpointing; the engine sleeps (level 2: its weights are dropped and come with the sync) while the learner works. 16 prompts x 8
samples x 128 tokens.

Measured is what the driver says is in use on the card (NVML, every 20 ms), less what was in use before; predicted is the sum over roles in
each phase. `rank_host_peak_gib` is the learner's process in host memory. After `run.close` the card must be as it was before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import shapes

import rlkit as rl
from rlkit.models import size
from rlkit.placement import plan

GIB = 2**30
PROMPTS, GROUP, TOKENS = 16, 8, 128
SHAPES = ("7b", "1.5b", "tiny")
LEFT_GIB = 0.1  # of the card that may be in use more than before once the run is closed
CLOSE_S = 60.0


class Watch:
    """The most that is in use on the card in each phase, in GiB beyond what was in use at the start. Nothing without a GPU."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._label: str | None = None
        self._nvml: Any = None
        if Path("/dev/nvidiactl").exists():
            try:
                import pynvml
            except ImportError:
                from vllm.third_party import pynvml  # vLLM brings a copy
            pynvml.nvmlInit()
            card = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])  # NVML counts all of them
            self._nvml, self._card = pynvml, pynvml.nvmlDeviceGetHandleByIndex(card)
            self.before = self.used()
            threading.Thread(target=self._look, daemon=True).start()

    @property
    def on(self) -> bool:
        return self._nvml is not None

    def used(self) -> float:
        """GiB in use on the card by everybody."""
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._card).used) / GIB

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        self._label = label
        try:
            yield
        finally:
            self._label = None

    def _look(self) -> None:
        while True:
            label = self._label
            if label is not None:
                self.peaks[label] = max(self.peaks.get(label, 0.0), self.used() - self.before)
            time.sleep(0.02)


def settings(shape: str, gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the sampler and of the learner."""
    cores = len(os.sched_getaffinity(0))
    learner: dict[str, Any] = {
        "zero_stage": 3,
        "offload_optimizer": True,
        "gradient_checkpointing": True,
        "micro_batch_tokens": 20_480,  # all samples at once: each micro-batch more carries its gradients to host memory and back
        "lr": 1e-6,
        "max_logprob_gap": 0.5,  # random weights: the gap is reported, and is not what is measured here
    }
    if not gpu:
        return (
            {"engine": "hf", "engines": 1, "sleep_level": 2, "cpus_per_engine": 0.1, "threads": 1, "max_model_len": 256},
            learner | {"offload_between_turns": True, "cpus_per_rank": 0.1, "threads": 1},
        )
    sampler = {
        "engines": 1,
        "gpus_per_engine": 0.5,
        "cpus_per_engine": 2,
        "sleep_level": 2,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": PROMPTS * GROUP,
        "max_num_batched_tokens": 8192,
        "kv_cache_gib": {"7b": 40.0, "1.5b": 16.0, "tiny": 1.0}[shape],
        "vllm": {"load_format": "dummy"},  # its weights come with the first sync
    }
    threads = max(1, cores - 4)
    # The optimizer goes group by group over host memory; small groups keep its temporaries small.
    groups = {"zero_optimization": {"sub_group_size": 200_000_000}}
    return sampler, learner | {
        "gpus_per_rank": 0.4,
        "cpus_per_rank": threads,
        "threads": threads,
        "offload_between_turns": False,  # 2 bytes a parameter stay on the card; the rest is in host memory anyway
        "deepspeed": groups,
    }


def one_step(cluster: rl.Cluster, model: str, shape: str, watch: Watch, name: str = "colocated") -> dict[str, Any]:
    """A run with one full step; the result as it is saved."""
    gpu = watch.on
    sampler_settings, learner_settings = settings(shape, gpu)
    tokens = TOKENS if gpu else 8
    prompts = [f"w{3 + i} w{4 + i} w{5 + i}" for i in range(PROMPTS if gpu else 2)]

    def spread(prompt: Any, sample: Any) -> float:
        return float(sample.tokens.sum() % 7)  # any number with spread: a random model has no right answers

    seconds: dict[str, float] = {}

    @contextmanager
    def phase(label: str) -> Iterator[None]:
        begun = time.perf_counter()
        with watch(label):
            yield
        seconds[label] = round(time.perf_counter() - begun, 3)
        print(f"{label}: {seconds[label]} s", flush=True)

    run = rl.Run(name, cluster, resume=False)
    try:
        with phase("start_engine"):
            sampler = run.sampler(model, **sampler_settings)
        with phase("start_learner"):
            learner = run.learner(model, **learner_settings)  # and the engine gets its weights
        for step in run.steps(1, progress=False):
            with phase("rollout"):
                rollouts = sampler.generate(prompts, n=GROUP, max_tokens=tokens, min_tokens=tokens, progress=False)
            batch = rl.advantages(rl.score(rollouts, spread), "grpo")
            with phase("turn"):
                run.turns.training()  # what `update` does first; apart from it here, since the card is still full when it begins
            with phase("update"):
                stats = learner.update(batch)
            with phase("sync"):
                sync = sampler.sync(learner)
            run.log(step, batch, stats)
        with phase("rollout_after"):
            after = sampler.generate(prompts, n=GROUP, max_tokens=tokens, min_tokens=tokens, progress=False)
        nodes = [dataclasses.replace(n, memory=0.0) for n in cluster.nodes]  # unchecked: Ray counts file cache as taken
        made = plan(nodes, size(model), sampler.spec, learner.spec, gpu_memory_gib=cluster.gpu_memory_gib())
        predicted = {k: round(v / GIB, 2) for k, v in made.peaks().items()}
        phases = [e for e in run.events if e["kind"] == "phase"]
        host = max(v for e in phases for k, v in e.items() if k.startswith("memory/rank-0/rss_gib"))
        cards = [v for e in phases if e["phase"] == "sync" for k, v in e.items() if k.startswith("memory/") and k.endswith("/card_gib")]
        memory = {k: round(float(v), 2) for k, v in run.metrics.iloc[-1].items() if str(k).startswith("memory/")}
        result: dict[str, Any] = {
            "shape": shape,
            "parameters": learner.info["parameters"],
            "samples": int(rollouts.lengths.size),
            "tokens": int(rollouts.lengths.sum()),
            "seconds": seconds,
            "transport": sync.transport,
            "policy_version_after": after.policy_version,
            "logprob_gap": round(stats["logprob_gap"], 4),
            "metrics": memory,
            "rank_host_peak_gib": round(host, 2),
            "predicted_gib": predicted,
            "roles": repr(made).splitlines(),
        }
    finally:
        run.close()
    if gpu:
        # A sync ends with the cache awake again, as in a rollout; at its fullest before that engine and rank looked at the card themselves.
        measured = watch.peaks | {"rollout": max(watch.peaks["rollout"], watch.peaks["rollout_after"]), "sync": max(cards) - watch.before}
        result["measured_gib"] = {k: round(v, 2) for k, v in measured.items()}
        result["predicted_over_measured"] = {k: round(v / measured[k], 3) for k, v in predicted.items()}
        result["peak_gib"] = {"predicted": max(predicted.values()), "measured": round(max(measured[k] for k in predicted), 2)}
        result["peak_gib"]["ratio"] = round(result["peak_gib"]["predicted"] / result["peak_gib"]["measured"], 3)
        deadline = time.monotonic() + CLOSE_S
        while (left := watch.used() - watch.before) > LEFT_GIB and time.monotonic() < deadline:
            time.sleep(0.2)
        result["left_gib"] = round(left, 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--folder", help="where the model is written for the time of the run; default: a temporary folder")
    parser.add_argument("--write-only", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_only:
        shapes.write(args.shape, Path(args.write_only), context=2048)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = Path(folder) / "model"
        model.mkdir()
        begun = time.perf_counter()
        # In a process of its own: one that drew on the GPU would hold a context there for as long as it lives.
        subprocess.run([sys.executable, __file__, "--shape", args.shape, "--write-only", str(model)], check=True)
        print(f"model written in {time.perf_counter() - begun:.1f} s", flush=True)
        watch = Watch()
        spec = {"name": "colocated", "num_cpus": os.cpu_count(), "num_gpus": int(watch.on), "object_store_gib": 1, "dashboard": False}
        cluster = rl.connect(rl.ClusterSpec.make(spec, storage=folder))
        try:
            result = one_step(cluster, str(model), args.shape, watch)
        finally:
            cluster.shutdown()
    print(json.dumps(result, indent=1))
    if not watch.on:
        return 0
    path = machine.save("colocated" if args.shape == "7b" else f"colocated_{args.shape.replace('.', '_')}", result)
    print(f"written to {path.name}")
    print(f"{'phase':10s} {'predicted':>10s} {'measured':>10s} GiB")
    for name, value in result["predicted_gib"].items():
        print(f"{name:10s} {value:10.1f} {result['measured_gib'][name]:10.1f}")
    good = abs(result["peak_gib"]["ratio"] - 1) <= 0.15 and result["left_gib"] <= LEFT_GIB
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
