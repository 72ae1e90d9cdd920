"""One GRPO step of rlkit against TRL's GRPOTrainer: same tiny model, same prompts, same sampling, same machine, one run.

    python benchmarks/step_time.py [--rounds 3] [--steps 8]

A step is 16 prompts x 8 samples x 32 tokens (end-of-sequence is held back, so that both generate exactly 32) and one AdamW update in
float32. The two take turns, `rounds` times each; the first step of every turn is not counted. The last lines say where rlkit's time
goes. Overhead is all that is not generation, forward and backward, or optimizer: grading, advantages, sync, logging and waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile

import machine
import step
import with_trl

import rlkit as rl

PROMPTS, GROUP, TOKENS = 16, 8, 32
LR = 1e-4


def trl_turn(path: str, tasks: rl.Tasks, steps: int) -> list[float]:
    """Seconds of each step of TRL's trainer."""
    return with_trl.seconds_of_steps(
        path,
        tasks.take(PROMPTS * steps),
        steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        learning_rate=LR,
        generation_kwargs={"min_new_tokens": TOKENS},
        use_cpu=True,
        bf16=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--engines", type=int, default=1, help="vLLM engines, which share the cores")
    parser.add_argument("--ranks", type=int, default=1, help="ZeRO ranks, which share the cores")
    args = parser.parse_args()
    from rlkit.models import resolve

    with tempfile.TemporaryDirectory() as storage:
        cluster = rl.connect("laptop", storage=storage)
        run = rl.Run("step-time", cluster, resume=False)
        tasks = rl.load_tasks("arithmetic")
        cores = os.cpu_count() or 1
        sampler = run.sampler("tiny", engines=args.engines, threads=max(1, cores // args.engines), cpus_per_engine=0.5 / args.engines)
        learner = run.learner("tiny", lr=LR, ranks=args.ranks, threads=max(1, cores // args.ranks), cpus_per_rank=0.5 / args.ranks)
        path = str(resolve("tiny").path)
        ours: list[dict[str, float]] = []
        theirs: list[float] = []
        for _ in range(args.rounds):
            ours += step.timed(run, sampler, learner, tasks, run.committed + 1 + args.steps, PROMPTS, GROUP, TOKENS)
            theirs += trl_turn(path, tasks, args.steps)
        run.close()
        cluster.shutdown()
    ours_s, theirs_s = statistics.median(r["total"] for r in ours), statistics.median(theirs)
    phases = {k: statistics.median(r[k] for r in ours) for k in ours[0] if not k.endswith("tokens_per_s")}
    overhead = statistics.median(r["total"] - r["rollout"] - r["forward_backward"] - r["optimizer"] for r in ours)
    result = {
        "shape": f"{PROMPTS} prompts x {GROUP} samples x {TOKENS} tokens",
        "engines": args.engines,
        "ranks": args.ranks,
        "steps_counted": len(ours),
        "rlkit_s": round(ours_s, 4),
        "trl_s": round(theirs_s, 4),
        "trl_over_rlkit": round(theirs_s / ours_s, 2),
        "phases_s": {k: round(v, 4) for k, v in phases.items()},
        "overhead_s": round(overhead, 4),
        "overhead_share": round(overhead / ours_s, 3),
    }
    name = "step_time" if (args.engines, args.ranks) == (1, 1) else f"step_time_{args.engines}_engines_{args.ranks}_ranks"
    path_out = machine.save(name, result)
    print(json.dumps(result, indent=1))
    print(f"written to {path_out.name}")


if __name__ == "__main__":
    main()
