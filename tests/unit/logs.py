"""Runs on disk for tests of what reads them: a log that is written line by line, samples, monitor samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GIB = 2**30


class Log:
    """``Log(folder)`` starts a run's folder; each method adds lines. Steps are 10 s apart, from t = 1000."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.write({"kind": "open", "name": folder.name, "seed": seed, "t": 1000.0})

    def write(self, event: dict[str, Any]) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def step(self, step: int, t: float | None = None, **metrics: float | None) -> None:
        """A complete step; ``reward_mean=0.5`` is the metric ``reward/mean``."""
        named = {name.replace("_", "/", 1): value for name, value in metrics.items()}
        self.write(
            {"kind": "step", "t": 1000.0 + 10 * step if t is None else t, "step": step, "version": step + 1, "updates": 1, "metrics": named}
        )

    def steps(self, n: int, since: int = 0) -> None:
        """Steps whose reward is a hundredth of their number."""
        for step in range(since, n):
            self.step(step, reward_mean=step / 100, reward_std=0.3, policy_entropy=1.0)

    def phase(self, name: str, start: float, seconds: float, step: int | None = 0, **facts: Any) -> None:
        self.write({"kind": "phase", "t": start + seconds, "phase": name, "step": step, "t_start": start, "seconds": seconds} | facts)

    def monitor(self, t: float, gpus: int = 0, node: str = "10.0.0.1", **facts: Any) -> None:
        """A monitor's sample; each GPU holds 3 GiB, 2 of them an engine's."""
        cards = [
            {"index": i, "uuid": f"GPU-{i}", "name": "H200", "utilization": 50.0 + i, "memory": 3 * GIB, "memory_total": 141 * GIB,
             "roles": {"engine": 2 * GIB, "learner": GIB, "other": 0}, "power": 300.0, "temperature": 40.0}
            for i in range(gpus)
        ]  # fmt: skip
        sample = {
            "t": t,
            "node": node,
            "cpu": 25.0,
            "memory": 8 * GIB,
            "memory_total": 16 * GIB,
            "object_store": None,
            "gpus": cards,
            "note": "",
        }
        with (self.folder / "monitor.jsonl").open("a") as file:
            file.write(json.dumps(sample | facts) + "\n")

    def samples(self, step: int, prompts: int = 2, group: int = 2) -> None:
        """Prompt p's first sample is right and its others are wrong; of prompt 0 all are right."""
        import pandas as pd

        rows = [
            {
                "step": step, "prompt_id": f"p{p}", "index": g, "question": f"question {p}?", "answer": str(p),
                "response": f"it is {p + g}",
                "tokens": [1, 2, 3], "logprobs": [-0.5, -1.0, float("nan")], "n_tokens": 3,
                "finish_reason": "length" if p == 1 and g == 1 else "stop",
                "verdict": "correct" if g == 0 or p == 0 else "wrong", "extracted": str(p + g), "reward": 1.0 if g == 0 or p == 0 else 0.0,
                "reward/math": 1.0 if g == 0 or p == 0 else 0.0, "advantage": 0.5,
            }
            for p in range(prompts)
            for g in range(group)
        ]  # fmt: skip
        (self.folder / "samples").mkdir(exist_ok=True)
        pd.DataFrame(rows).to_parquet(self.folder / "samples" / f"step-{step:06d}.parquet", index=False)
