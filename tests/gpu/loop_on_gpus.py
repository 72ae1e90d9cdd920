"""The loop on real GPUs, as a script: python tests/gpu/loop_on_gpus.py MODEL OUT.json

Each case trains three steps of GRPO in bfloat16 with the weights going another way, and records what every sync and update measured.
On one GPU only the colocated cases run; on two, those with engine and learner apart too. Every sync verifies checksums; this script adds
that log-probs agree and that nothing is left on the GPUs afterwards. In the cases named "killed" an engine's process is killed in the
middle of the second step's rollout: the step must finish, and the engine be back at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from killing import killed_while_sampling

import rlkit as rl

CASES: list[dict[str, Any]] = [
    {"name": "colocated-ipc-zero2", "gpus": 1, "engine": 0.4, "rank": 0.4, "zero_stage": 2, "transport": "ipc"},
    {"name": "colocated-ipc-zero3", "gpus": 1, "engine": 0.4, "rank": 0.4, "zero_stage": 3, "transport": "ipc"},
    {"name": "colocated-killed-one-of-two", "gpus": 1, "engine": 0.2, "engines": 2, "rank": 0.4, "zero_stage": 2, "transport": "ipc"},
    {"name": "colocated-killed-the-only-one", "gpus": 1, "engine": 0.4, "rank": 0.4, "zero_stage": 2, "transport": "ipc"},
    {"name": "apart-nccl-zero2", "gpus": 2, "engine": 1, "rank": 1, "zero_stage": 2, "transport": "nccl"},
]


def used_mib() -> list[int]:
    """MiB in use on each card that this process may see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = ["-i", seen] if seen else []
    out = subprocess.run(
        ["nvidia-smi", *which, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    return [int(line) for line in out.stdout.split()]


def one(case: dict[str, Any], model: str, storage: str, steps: int = 3) -> dict[str, Any]:
    n = torch.cuda.device_count()
    spec = rl.ClusterSpec.make(
        {
            "name": f"gpu-{case['name']}",
            "num_cpus": os.cpu_count(),
            "num_gpus": case["gpus"],
            "dashboard": False,
            "storage": storage,
            "sampler": {
                "engines": case.get("engines", 1),
                "gpus_per_engine": case["engine"],
                "kv_cache_gib": 8.0,
                "max_model_len": 512,
                "enforce_eager": True,
            },
            "learner": {"gpus_per_rank": case["rank"], "zero_stage": case["zero_stage"], "lr": 1e-6, "micro_batch_tokens": 16384},
        }
    )
    idle = used_mib()
    begun = time.monotonic()
    cluster = rl.connect(spec)
    run = rl.Run(case["name"], cluster, resume=False)
    tasks = rl.load_tasks("word_problems")
    sampler = run.sampler(model)
    sampler_ready = time.monotonic()
    learner = run.learner(model)
    ready = time.monotonic()
    rows = []
    for step in run.steps(steps, progress=False):
        prompts = tasks.batch(16)
        if "killed" in case["name"] and step == 1:
            with killed_while_sampling(sampler.engines[0], sampler.info[0]["pid"]):
                rollouts = sampler.generate(prompts, n=8, max_tokens=128, min_tokens=128, progress=False)
            assert rollouts.shape == (16, 8)
        else:
            rollouts = sampler.generate(prompts, n=8, max_tokens=128, progress=False)
        scored = rl.score(rollouts, rl.rewards.Math() + 0.01 * rl.rewards.Length(128, 64))
        batch = rl.advantages(scored, "grpo")
        stats = learner.update(batch)
        sync = sampler.sync(learner)
        run.log(step, scored, stats)
        rows.append(
            {
                "gap": stats["logprob_gap"],
                "gap_max": stats["logprob_gap_max"],
                "rollout_s": rollouts.seconds,
                "tokens_per_s": rollouts.tokens_per_second,
                "update_s": stats.seconds,
                "sync_s": sync.seconds,
                "sync_parts": dict(sync.parts),
                "transport": sync.transport,
                "bytes": sync.bytes,
                "checked": sync.checked,
            }
        )
    if "killed" in case["name"]:
        deadline = time.monotonic() + 300
        while len(sampler.engines) < case.get("engines", 1) and time.monotonic() < deadline:
            time.sleep(2)
            sampler.sync(learner)  # takes a replacement in once it has started
        assert len(sampler.engines) == case.get("engines", 1), sampler.info
    told = [e for e in run.events if e["kind"] == "engine"]
    assert bool(told) is ("killed" in case["name"])
    peak = used_mib()
    path = learner.save(os.path.join(storage, case["name"], "ckpt"))
    version = learner.version
    assert learner.load(path) == version
    run.close()
    cluster.shutdown()
    time.sleep(2)
    left = used_mib()
    assert all(r["transport"] == case["transport"] for r in rows), [r["transport"] for r in rows]
    assert all(a - b < 100 for a, b in zip(left, idle, strict=True)), f"memory left on the GPUs: {idle} MiB before, {left} MiB after"
    return {
        "gpus_on_machine": n,
        "sampler_start_s": sampler_ready - begun,
        "learner_start_s": ready - sampler_ready,
        "steps": rows,
        "engine_events": [{k: e[k] for k in ("name", "why", "moved", "seconds")} for e in told],
        "used_mib": {"before": idle, "running": peak, "after": left},
    }


def main() -> None:
    model, out = sys.argv[1:3]
    wanted = sys.argv[3:] or [c["name"] for c in CASES]
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    failed = False
    with tempfile.TemporaryDirectory() as storage:
        for case in CASES:
            if case["gpus"] > torch.cuda.device_count() or case["name"] not in wanted:
                continue
            try:
                results[case["name"]] = one(case, model, storage)
            except Exception:  # noqa: BLE001  the other cases still say something; the exit status tells
                results[case["name"]] = {"error": traceback.format_exc()}
                failed = True
                cluster = sys.modules["rlkit.cluster"]._current
                if cluster is not None:
                    cluster.shutdown()
            print(case["name"], json.dumps(results[case["name"]])[-6000:], flush=True)
            with open(out, "w") as file:
                json.dump(results, file, indent=1)
    sys.exit(failed)


if __name__ == "__main__":
    main()
