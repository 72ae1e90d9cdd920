"""A run's event log: what its lines mean, how they are read and written, and what they add up to.

``events.jsonl`` is the truth: one JSON object a line, appended and never rewritten. A reader rebuilds everything from it:

    {"kind": "begin",  "step": 3, "version": 3}                    a step was started at this policy version
    {"kind": "phase",  "step": 3, "phase": "rollout", "seconds": 0.41, ...}
    {"kind": "step",   "step": 3, "version": 4, "updates": 1, "metrics": {...}, "positions": {...}}   the step is complete
    {"kind": "checkpoint", "step": 3, "path": "checkpoints/step-000003"}
    {"kind": "rewind", "step": 1}                                  resumed from step 1: later step lines no longer count
    {"kind": "engine", "step": 3, "name": "engine-1", "why": ..., "moved": ..., "seconds": 0.2, "text": ...}   it died, or was replaced
    {"kind": "part" | "note" | "open" | "close", ...}

Every line also has ``t``, seconds since the epoch. A last line cut short by a crash is dropped when the log is opened again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import RunError
from rlkit.types import RolloutShard, ScoreShard

EVENTS_FILE, MONITOR_FILE = "events.jsonl", "monitor.jsonl"


def samples_file(folder: Path, step: int) -> Path:
    """Where the samples of a step lie in a run's folder."""
    return folder / "samples" / f"step-{step:06d}.parquet"


class History:
    """What a run's events add up to: the steps that count, the position to go on from, the parts that were made."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}  # step -> its latest "step" event that still counts
        self.begun: dict[int, int] = {}  # step -> policy version when it was begun
        self.parts: dict[str, dict[str, Any]] = {}
        self.seed: int | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            self.steps[event["step"]] = dict(event)
        elif kind == "begin":
            self.begun[event["step"]] = event["version"]
        elif kind == "rewind":
            self.steps = {s: e for s, e in self.steps.items() if s <= event["step"]}
            self.begun = {s: v for s, v in self.begun.items() if s <= event["step"]}
        elif kind == "part":
            self.parts[event["name"]] = dict(event)
        elif kind == "open":
            self.seed = event["seed"]

    @property
    def committed(self) -> int:
        """The last complete step, -1 when there is none."""
        return max(self.steps, default=-1)


def line_of(event: Mapping[str, Any]) -> str:
    """The event as one line of the log. NaN is not JSON: a value that is not finite becomes null, which `Run.metrics` has as NaN."""
    return json.dumps(finite(event), separators=(",", ":"), allow_nan=False) + "\n"


def is_event(value: Any) -> bool:
    """Whether a JSON value is a line of the log: it has a kind, a time where it has one, and what its kind needs."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str) or not is_time(value.get("t", 0.0)):
        return False
    kind, step = value["kind"], value.get("step")
    if kind in ("step", "begin", "rewind") and not (isinstance(step, int) and abs(step) < 2**53):
        return False
    if kind == "step":
        metrics = value.get("metrics", {})
        return "t" in value and isinstance(metrics, dict) and all(v is None or is_number(v) for v in metrics.values())
    if kind == "phase":
        times = (value.get("seconds"), value.get("t_start"))
        return isinstance(value.get("phase"), str) and all(v is None or is_time(v) for v in times) and (step is None or is_number(step))
    return kind != "part" or isinstance(value.get("name"), str)


def is_sample(value: Any) -> bool:
    """Whether a JSON value is a line of the monitor's file."""
    if not isinstance(value, dict) or "node" not in value or not is_time(value.get("t")):
        return False
    gpus = value.get("gpus") or []
    return isinstance(gpus, list) and all(isinstance(gpu, dict) and isinstance(gpu.get("roles") or {}, dict) for gpu in gpus)


def is_time(value: Any) -> bool:
    """Whether a JSON value is seconds, or seconds since the epoch that a calendar has."""
    return is_number(value) and abs(value) < 1e12


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float holds; JSON has whole numbers of any size."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def read_events(path: Path, repair: bool = False) -> list[dict[str, Any]]:
    """The events of a log file. A last line without its newline is what a crash left: it is ignored, and cut off with ``repair``.

    Raises:
        RunError: a complete line is not a JSON object; names file and line.
    """
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if repair and len(whole) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    out = []
    damaged = "the run's log is damaged there. Remove that line, or start afresh with resume=False, which keeps the old folder."
    for n, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
        except ValueError as error:  # not JSON, or not even UTF-8
            raise RunError(f"{path}, line {n} is not JSON ({getattr(error, 'msg', error)}); {damaged}") from error
        if not is_event(event):
            raise RunError(f"{path}, line {n} is not an event; {damaged}")
        out.append(event)
    return out


SAMPLE_COLUMNS = frozenset(  # that the file of every step's samples has
    ["prompt_id", "question", "answer", "response", "tokens", "logprobs", "n_tokens", "finish_reason", "verdict", "extracted", "reward"]
)


def sample_rows(step: int, shard: RolloutShard, score: ScoreShard) -> list[dict[str, Any]]:
    """One dict a sample, as the samples' Parquet files hold them."""
    rows = []
    for i, sample in enumerate(shard.samples()):
        at = divmod(i, shard.group_size)
        rows.append(
            {
                "step": step,
                "prompt_id": sample.prompt.id,
                "index": sample.index,
                "question": sample.prompt.question,
                "answer": sample.prompt.answer,
                "response": sample.text,
                "tokens": sample.tokens.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "n_tokens": len(sample.tokens),
                "finish_reason": sample.finish_reason,
                "verdict": score.verdicts[i],
                "extracted": score.extracted[i],
                "reward": float(score.rewards[at]),
            }
            | {f"reward/{name}": float(values[at]) for name, values in score.parts.items()}
        )
    return rows


def finite(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite become None, numpy scalars plain numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # numpy scalars
        return finite(value.item())
    return value
