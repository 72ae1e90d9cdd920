"""Weight sync from a ZeRO-2 rank to vLLM engines on the same GPU: seconds, where they go, and whether engine and learner agree afterwards.

    python benchmarks/sync.py                   # all sections, benchmarks/results/sync.json
    python benchmarks/sync.py --only 1.5b       # one of them
    python benchmarks/sync.py --quick           # the tiny model on the CPU, through the object store

Models have random bfloat16 weights, but with --quick, which takes the bundled tiny model in float32 and syncs twice. Each section starts
the rank and the engines, takes one optimizer step, and syncs: the first time, when
memory is made and kernels are compiled, then ten times. Seconds are those of `Sampler.sync` from call to return: packing and checksums
on the rank (publish), loading (load) and reading back what the engine computes with (verify) in the slowest engine, and messages (rest).
Every sync compares the checksums of all tensors. The gap is the mean absolute difference between the engine's and the learner's log-probs
of the greedy responses, in nats: before the step, after it but before the sync (stale), and after the last sync.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import shapes

import rlkit as rl

SYNCS = 10
PROMPTS, GROUP, TOKENS = 16, 4, 32
LR = 1e-3  # of the one step: large, so that log-probs from before it are seen to be stale, in bfloat16 too
SECTIONS = {"1.5b": ("1.5b", 1), "smollm2": ("135m", 1), "smollm2-4": ("135m", 4)}  # shape, engines


def gap(sampler: Any, learner: Any, tasks: Any) -> float:
    """Mean absolute difference of the engines' log-probs of greedy responses to the learner's, in nats."""
    import ray

    rollouts = sampler.generate(tasks.take(PROMPTS), n=1, max_tokens=TOKENS, temperature=0.0, progress=False)
    there = learner.logprobs(rollouts)
    differences = [np.abs(ray.get(a).logprobs - ray.get(b)) for a, b in zip(rollouts.shards, there, strict=True)]
    return float(np.concatenate(differences).mean())


def spread(prompt: rl.Prompt, sample: rl.Sample) -> float:
    """A reward that costs nothing and has spread: the share of even tokens."""
    return float((sample.tokens % 2 == 0).mean())


def measure(name: str, model: str, engines: int, cluster: Any, syncs: int) -> dict[str, Any]:
    """One section: start, step, sync, close."""
    run = rl.Run(f"sync-{name}", cluster, resume=False)
    begun = time.perf_counter()
    sampler = run.sampler(model, engines=engines)
    learner = run.learner(model, lr=LR)
    started = time.perf_counter() - begun
    tasks = rl.load_tasks("arithmetic")
    first = sampler.sync(learner)
    before = gap(sampler, learner, tasks)
    scored = rl.score(sampler.generate(tasks.take(PROMPTS), n=GROUP, max_tokens=TOKENS, min_tokens=TOKENS, progress=False), spread)
    learner.update(rl.advantages(scored, "grpo"))
    stale = gap(sampler, learner, tasks)
    rows = []
    for _ in range(syncs):
        stats = sampler.sync(learner)
        parts = {k: round(v, 4) for k, v in stats.parts.items()}
        rows.append({"seconds": round(stats.seconds, 4), **parts, "rest": round(stats.seconds - sum(stats.parts.values()), 4)})
    after = gap(sampler, learner, tasks)
    seconds = statistics.median(r["seconds"] for r in rows)
    result = {
        "model": Path(model).name,
        "bytes": stats.bytes,
        "tensors_checked": stats.checked,
        "engines": engines,
        "transport": stats.transport,
        "checksum_ok": stats.checksum_ok,
        "start_s": round(started, 1),
        "first_sync_s": round(first.seconds, 3),
        "sync_s": seconds,
        "sync_s_max": max(r["seconds"] for r in rows),
        "parts_s": {k: statistics.median(r[k] for r in rows) for k in rows[0]},
        "gb_per_s": round(stats.bytes / seconds / 1e9, 1),
        "policy_version": stats.version,
        "logprob_gap": {"before_step": before, "stale": stale, "after_sync": after},
        "syncs": rows,
    }
    run.close()
    return result


def on_cluster(name: str, model: str, engines: int, spec: rl.ClusterSpec, syncs: int) -> dict[str, Any]:
    """`measure` on a local cluster of its own."""
    cluster = rl.connect(spec)
    try:
        return measure(name, model, engines, cluster, syncs)
    finally:
        cluster.shutdown()


def cluster_spec(storage: str, quick: bool, engines: int) -> rl.ClusterSpec:
    """One GPU for all, or with ``quick`` the CPU."""
    sampler: dict[str, Any] = {"max_model_len": 128, "enforce_eager": True, "cpus_per_engine": 0.5, "threads": 1}
    learner: dict[str, Any] = {"zero_stage": 2, "cpus_per_rank": 0.5, "micro_batch_tokens": 4096}
    if quick:
        sampler |= {"kv_cache_gib": 0.1}
        learner |= {"threads": 1}
    else:
        sampler |= {"gpus_per_engine": 0.5 / engines, "gpu_memory_utilization": 0.1, "kv_cache_gib": 1.0, "max_num_seqs": 64}
        learner |= {"gpus_per_rank": 0.4}
    return rl.ClusterSpec.make(
        {
            "name": "sync",
            "num_cpus": os.cpu_count(),
            "num_gpus": 0 if quick else 1,
            "dashboard": False,
            "storage": storage,
            "sampler": sampler,
            "learner": learner,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--quick", action="store_true", help="the tiny model on the CPU, two syncs; nothing is written to results/")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            result["tiny"] = on_cluster("tiny", "tiny", 1, cluster_spec(folder, True, 1), 2)
            print(json.dumps(result))
            return
        for name in [args.only] if args.only else SECTIONS:
            shape, engines = SECTIONS[name]
            path = Path(folder) / shape
            if not path.exists():
                shapes.write(shape, path)
            result[name] = on_cluster(name, str(path), engines, cluster_spec(folder, False, engines), SYNCS)
            print(name, json.dumps(result[name], indent=1), flush=True)
            machine.save("sync", result)


if __name__ == "__main__":
    main()
