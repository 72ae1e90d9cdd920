"""A whole GRPO step against TRL's GRPOTrainer with vLLM in the same process, on the same card, one after the other in one run.

    python benchmarks/vs_trl.py [--steps 5] [--trl_steps 3]

Both: SmolLM2-135M in bfloat16, the same prompts, 128 x 8 samples of exactly 256 tokens at temperature 1, no reference, one AdamW update a
step over all 1,024 samples, no activation recomputation. TRL generates with one vLLM engine (``vllm_mode="colocate"``, the memory that
rlkit's engine has) and updates in eight micro-batches of 128 rows. The first step of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import step
import with_trl

import rlkit as rl

PROMPTS, GROUP, TOKENS, ROWS = 128, 8, 256, 128


def trl(model: str, steps: int) -> dict[str, Any]:
    """Seconds of each counted step of TRL's trainer."""
    from rlkit.models import resolve

    seconds = with_trl.seconds_of_steps(
        str(resolve(model).path),
        rl.load_tasks("word_problems").take(PROMPTS) * (steps + 1),
        steps + 1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=PROMPTS * GROUP // ROWS,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        learning_rate=step.LR,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25,
        vllm_max_model_length=1024,
        generation_kwargs={"min_tokens": TOKENS},
        bf16=True,
    )
    return {"seconds": [round(s, 3) for s in seconds], "step_s": round(statistics.median(seconds), 4)}


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
