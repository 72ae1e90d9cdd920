"""TRL's GRPOTrainer, timed step by step."""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import Any

import rlkit as rl


def seconds_of_steps(path: str, prompts: list[rl.Prompt], steps: int, **config: Any) -> list[float]:
    """Seconds of the steps after the first. ``config`` are settings of GRPOConfig beside those that make both sides do the same:
    no reference, plain sampling at temperature 1, a constant learning rate, nothing saved or logged."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=path,
            args=GRPOConfig(
                output_dir=out,
                max_steps=steps,
                lr_scheduler_type="constant",
                beta=0.0,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                seed=0,
                **config,
            ),
            reward_funcs=lambda completions, completion_ids, **_: [
                float(sum(t == ids[0] for t in ids)) / len(ids) for ids in completion_ids
            ],
            train_dataset=Dataset.from_list([{"prompt": [dict(m) for m in p.messages]} for p in prompts]),
            callbacks=[Clock()],
        )
        trainer.train()
    return [b - a for a, b in itertools.pairwise(times)]
