"""Run by test_colocated.py in a process of its own: DeepSpeed's engines of all stages, without Ray. Prints one JSON object.

Per stage, two trainings: one undisturbed ("still"), and one where all states leave and come back between all calls and memory runs out once
in the middle of a backward pass ("moved"); with its optimizer offloaded, ZeRO-3 also shares its gradients there. What their checkpoints
hold must be the same bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tiny_batches import make_batch, make_shards

from rlkit.config import TrainSpec
from rlkit.losses import Objective
from rlkit.models import load_causal_lm
from rlkit.types import Batch
from rlkit.zero import checkpoint, engine, offload, recover, work
from rlkit.zero.peers import Peers
from rlkit.zero.train import Trainer


def job_of(batch: Batch, spec: TrainSpec) -> work.Job:
    """The batch as one rank's job, as the controller would make it."""
    objective = Objective()
    return work.plan(work.work_of(batch, objective), objective, spec, 0, steps=False)[0][0]


def fill_up(trainer: Trainer, job: work.Job) -> None:
    """A backward pass that runs out of memory half-way through the layers."""
    layers = [m for m in trainer.engine.model.modules() if type(m).__name__.endswith("DecoderLayer")]

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = layers[-1].register_full_backward_hook(full)
    try:
        trainer.forward_backward(job, lambda: False)
    except torch.OutOfMemoryError:
        recover.after_error(trainer.engine)
    finally:
        handle.remove()


def train(path: str, stage: int, offload_optimizer: bool, kind: str, target: Path) -> dict[str, object]:
    spec = TrainSpec(zero_stage=stage, offload_optimizer=offload_optimizer, lr=1e-2, micro_batch_tokens=64, max_logprob_gap=10.0)
    made = engine.Engine(path, spec)
    shared = offload.share_gradients(made) if kind == "moved" else 0
    mover, trainer = offload.Offload(made), Trainer(made, Peers())
    plain = load_causal_lm(path, torch.float32)
    jobs = [job_of(make_batch(make_shards(plain, prompts=2, seed=i), lambda shard: shard, seed=i), spec) for i in range(7)]
    away: list[float] = []

    def go_and_come() -> None:
        if kind == "moved":
            away.append(mover.move("off")["away"])
            mover.move("off")
            mover.move("parameters")
            mover.move("on")

    for step in range(3):
        if kind == "moved" and step == 1:
            trainer.forward_backward(jobs[6], lambda: False)
            fill_up(trainer, jobs[5])
        go_and_come()
        trainer.forward_backward(jobs[step], lambda: False)
        go_and_come()  # with gradients accumulated
        trainer.forward_backward(jobs[step + 3], lambda: False)
        trainer.step()
        go_and_come()
    needed = mover.needed()
    checkpoint.save(made, Peers(), target, {"version": 3, "steps": 3})
    manifest = json.loads((target / checkpoint.MANIFEST).read_text())
    made.ds.destroy()
    return {"files": {n: f["sha256"] for n, f in manifest["files"].items()}, "away": away, "needed": needed, "shared": shared}


def main(path: str, folder: str) -> None:
    engine.join(0, 1, str(Path(folder) / "store"), False, 60.0)
    torch.set_num_threads(1)
    out = {}
    for name, stage, outside in (("0", 0, False), ("1", 1, False), ("2", 2, False), ("3", 3, False), ("3 offloaded", 3, True)):
        out[name] = {kind: train(path, stage, outside, kind, Path(folder) / f"{kind} {name}") for kind in ("still", "moved")}
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
