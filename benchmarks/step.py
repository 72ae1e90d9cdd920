"""Where the time of a GRPO step goes: SmolLM2-135M, 128 prompts x 8 samples x 256 tokens, one update, engine and learner on one GPU.

    python benchmarks/step.py [--model smollm2] [--steps 6] [--quick]

End-of-sequence is held back, so that every response has all its tokens. Overhead is what is neither generation, grading, forward and
backward, optimizer nor sync: advantages, fetching and packing the batch, logging, waiting. The first step is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import machine

import rlkit as rl

COUNTED = ("rollout", "reward", "forward_backward", "optimizer", "sync")
LR = 1e-6


def one(prompt: rl.Prompt, sample: rl.Sample) -> float:
    """A reward that costs nothing and has spread: the share of the response's first token among its tokens."""
    return float((sample.tokens == sample.tokens[0]).mean())


def timed(
    run: rl.Run, engines: Any, ranks: Any, tasks: rl.Tasks, until: int, prompts: int, group: int, tokens: int
) -> list[dict[str, float]]:
    """Seconds of the run's steps up to ``until`` in all, from the end of one to the end of the next, and by phase; without the first."""
    rows, last = [], time.perf_counter()
    for step in run.steps(until, progress=False):
        rollouts = engines.generate(tasks.batch(prompts), n=group, max_tokens=tokens, min_tokens=tokens, progress=False)
        scored = rl.score(rollouts, one)
        stats = ranks.update(rl.advantages(scored, "grpo"), loss="ppo_clip")
        engines.sync(ranks)
        run.log(step, scored, stats)
        now = time.perf_counter()
        row = run.metrics.iloc[-1]  # reading the log back is the benchmark's own cost
        rows.append({"total": now - last} | {k.removeprefix("time/"): float(v) for k, v in row.items() if str(k).startswith("time/")})
        rows[-1] |= {"tokens_per_s": rollouts.tokens_per_second, "update_tokens_per_s": float(row["update/tokens_per_second"])}
        last = time.perf_counter()
    return rows[1:]


def measure(
    model: str, steps: int, prompts: int, group: int, tokens: int, *, gpus: bool, sampler: dict[str, Any], learner: dict[str, Any]
) -> dict[str, Any]:
    """Medians over ``steps`` steps: seconds in all and by phase, samples/s, overhead."""
    with tempfile.TemporaryDirectory() as storage:
        cluster = rl.connect("one_gpu" if gpus else "laptop", storage=storage, name="bench-step", dashboard=False)
        run = rl.Run("step", cluster, resume=False)
        begun = time.monotonic()
        engines = run.sampler(model, **sampler)
        ranks = run.learner(model, lr=LR, **learner)
        started = time.monotonic() - begun
        rows = timed(run, engines, ranks, rl.load_tasks("word_problems"), steps + 1, prompts, group, tokens)
        run.close()
        cluster.shutdown()
    phases = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    overhead = statistics.median(r["total"] - sum(r[k] for k in COUNTED) for r in rows)
    return {
        "shape": f"{prompts} prompts x {group} samples x {tokens} tokens",
        "sampler": sampler,
        "learner": learner,
        "start_s": round(started, 1),
        "step_s": round(phases["total"], 4),
        "samples_per_s": round(prompts * group / phases["total"], 1),
        "phases_s": {k: round(v, 4) for k, v in phases.items()},
        "overhead_s": round(overhead, 4),
        "overhead_share": round(overhead / phases["total"], 4),
    }


def settings(quick: bool, gpus: bool) -> dict[str, Any]:
    """Arguments of `measure` but for model and steps."""
    if quick:
        small = {"prompts": 4, "group": 4, "tokens": 8, "gpus": gpus}
        return small | {"sampler": {"max_num_seqs": 16}, "learner": {"micro_batch_tokens": 4096}}
    return {
        "prompts": 128,
        "group": 8,
        "tokens": 256,
        "gpus": gpus,
        "sampler": {"gpus_per_engine": 0.5, "kv_cache_gib": 30.0, "max_num_seqs": 1024, "max_model_len": 1024, "cpus_per_engine": 1},
        "learner": {
            "gpus_per_rank": 0.4,
            "zero_stage": 2,
            "offload_optimizer": False,
            "gradient_checkpointing": False,
            "micro_batch_tokens": 65536,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="the tiny model, small numbers: a test of this script")
    args = parser.parse_args()
    import torch

    result = measure("tiny" if args.quick else args.model, args.steps, **settings(args.quick, torch.cuda.is_available()))
    print(json.dumps(result, indent=1))
    if not args.quick:
        print(f"written to {machine.save('step', result).name}")


if __name__ == "__main__":
    main()
