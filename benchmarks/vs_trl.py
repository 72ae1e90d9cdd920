"""A whole GRPO step against TRL's GRPOTrainer with vLLM in the same process, on the same card, one after the other in one run.

    python benchmarks/vs_trl.py [--steps 5] [--trl_steps 3]

Both: SmolLM2-135M in bfloat16, the same prompts, 128 x 8 samples of exactly 256 tokens at temperature 1, no reference, one AdamW update a
step over all 1,024 samples, no activation recomputation. TRL generates with one vLLM engine (``vllm_mode="colocate"``, the memory that
rlkit's engine has) and updates in eight micro-batches of 128 rows. The first step of each is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import step

import rlkit as rl

PROMPTS, GROUP, TOKENS, ROWS = 128, 8, 256, 128


def trl(model: str, steps: int) -> dict[str, Any]:
    """Seconds of each counted step of TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkit.models import resolve

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    tasks = rl.load_tasks("word_problems")
    rows = [{"prompt": [dict(m) for m in p.messages]} for p in tasks.take(PROMPTS)] * (steps + 1)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=PROMPTS * GROUP // ROWS,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            max_steps=steps + 1,
            learning_rate=step.LR,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=1024,
            generation_kwargs={"min_tokens": TOKENS},
            gradient_checkpointing=False,
            bf16=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=str(resolve(model).path),
            args=config,
            reward_funcs=lambda completions, completion_ids, **_: [
                float(sum(t == ids[0] for t in ids)) / len(ids) for ids in completion_ids
            ],
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        started = time.perf_counter() - begun
        trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(times)]
    return {"start_s": round(started, 1), "seconds": [round(s, 3) for s in seconds], "step_s": round(statistics.median(seconds), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trl_steps", type=int, default=3)
    parser.add_argument("--only_trl", type=Path, help="measure TRL alone and write what it gave to this file")
    args = parser.parse_args()
    if args.only_trl is not None:
        args.only_trl.write_text(json.dumps(trl(args.model, args.trl_steps)))
        return
    ours = step.measure(args.model, args.steps, **step.settings(False, True))
    print(json.dumps(ours), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trl.json"
        env = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would compile a sampler for a minute at start
        command = [sys.executable, __file__, "--model", args.model, "--trl_steps", str(args.trl_steps), "--only_trl", str(target)]
        subprocess.run(command, check=True, env=env)
        theirs = json.loads(target.read_text())
    result = {
        "shape": ours["shape"],
        "rlkit": ours,
        "trl": theirs,
        "rlkit_samples_per_s": ours["samples_per_s"],
        "trl_samples_per_s": round(PROMPTS * GROUP / theirs["step_s"], 1),
        "rlkit_over_trl": round(theirs["step_s"] / ours["step_s"], 2),
    }
    print(json.dumps(result, indent=1))
    print(f"written to {machine.save('vs_trl', result).name}")


if __name__ == "__main__":
    main()
