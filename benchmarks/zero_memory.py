"""Measured bytes of parameters, gradients and optimizer states per rank, for ZeRO stages 0 to 3 on 1, 2 and 4 ranks.

    python benchmarks/zero_memory.py            # table, and benchmarks/results/zero_memory.json

What is measured: after one optimizer step (so that Adam's states exist) and two backward passes of the next one (so that gradients are
live and accumulated), every tensor that DeepSpeed's engine holds is walked and the bytes of distinct storages are added up. Nothing is
computed from a formula.

What it is compared with: ZeRO (Rajbhandari et al. 2020), section 5 and figure 1, with 4 bytes a parameter and 4 a gradient since training
is in fp32. The paper's K, the bytes of optimizer states per parameter, is 8 for ZeRO-0 (Adam's two moments) and 12 for stages 1 to 3:
DeepSpeed steps on its own fp32 copy of the weights also when the weights are fp32 already. The buckets through which gradients are
reduced are counted apart: the paper has them among the temporary buffers (section 6.2), of constant size for large models
(``reduce_bucket_size``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import machine

KINDS = ("parameters", "gradients", "optimizer")
TOLERANCE = 0.10


def formula(psi: int, stage: int, ranks: int) -> dict[str, float]:
    """Bytes per rank by the paper, for psi parameters in fp32."""
    k = 8 if stage == 0 else 12
    return {
        "parameters": 4 * psi / (ranks if stage == 3 else 1),
        "gradients": 4 * psi / (ranks if stage >= 2 else 1),
        "optimizer": k * psi / (ranks if stage >= 1 else 1),
    }


def make_model(path: Path) -> None:
    """A random Qwen2 of about 9M parameters in fp32: large enough that padding and alignment are small beside it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=320,
        intermediate_size=880,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)


def tensors(thing: Any) -> Iterator[Any]:
    """Every tensor in nested lists, tuples and dicts."""
    import torch

    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors(value)


def storage_bytes(found: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the distinct storages behind tensors, leaving out those in ``seen`` and adding to it."""
    total = 0
    for tensor in found:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def measure(engine: Any) -> dict[str, int]:
    """Bytes of what this rank's engine holds, by kind. A storage counts once, as the first kind that it is found as."""
    ds, optimizer = engine.ds, engine.ds.optimizer
    parameters = [p for _, p in engine.model.named_parameters()]
    seen: set[int] = set()
    weights = [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    flat = [getattr(optimizer, name, []) for name in ("bit16_groups_flat", "fp16_partitioned_groups_flat")]
    gradients: list[Any] = [p.grad for p in parameters] + [getattr(p, "grad_accum", None) for p in parameters]
    for name in ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer", "accumulated_grads_in_cpu"):
        gradients.append(getattr(optimizer, name, None))
    gradients += [m.grad for m in engine.master()]
    buckets = [list(vars(bucket).values()) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return {
        "parameters": storage_bytes(tensors(weights + flat), seen),
        "gradients": storage_bytes(tensors(gradients), seen),
        "optimizer": storage_bytes(tensors([engine.master(), [dict(s) for s in ds.basic_optimizer.state.values()]]), seen),
        "buffers": storage_bytes(tensors(buckets), seen),
    }


def run_rank(rank: int, ranks: int, store: str, model: str, out: str) -> None:
    """One rank: all four stages one after the other; writes what it measured."""
    import warnings

    warnings.simplefilter("ignore")
    import numpy as np
    import torch

    from rlkit.config import TrainSpec
    from rlkit.zero import engine as zero
    from rlkit.zero import layout

    torch.set_num_threads(1)
    zero.join(rank, ranks, store, cuda=False, timeout_s=600)
    found = []
    for stage in (0, 1, 2, 3):
        extra = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
        engine = zero.Engine(model, TrainSpec(ranks=ranks, zero_stage=stage, cpus_per_rank=1, deepspeed=extra))
        psi = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
        ids = torch.randint(0, 1000, (2, 16), generator=torch.Generator().manual_seed(rank)).numpy()
        inputs = layout.padded(list(ids), np.array([4, 4]))

        def backward(engine: zero.Engine = engine, inputs: layout.Inputs = inputs) -> None:
            logprobs, _ = engine(inputs)
            engine.backward(-logprobs.mean())

        backward()
        engine.step(1e-4)
        backward()
        backward()
        found.append({"stage": stage, "ranks": ranks, "rank": rank, "psi": psi} | measure(engine))
        engine.discard()
        engine.ds.destroy()
    Path(out).write_text(json.dumps(found))


def run_group(ranks: int, model: str, folder: Path) -> list[dict[str, int]]:
    """All stages on so many ranks, each a process of this machine."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    outs = [str(folder / f"{ranks}-{r}.json") for r in range(ranks)]
    processes = [context.Process(target=run_rank, args=(r, ranks, str(folder / f"store-{ranks}"), model, outs[r])) for r in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(p.exitcode for p in processes):
        raise SystemExit(f"A rank of {ranks} ended with {[p.exitcode for p in processes]}.")
    return [row for out in outs for row in json.loads(Path(out).read_text())]


def summary(rows: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Per stage and number of ranks: the mean over ranks, the rank that holds most, the formula and the ratio of mean to formula."""
    out = []
    for ranks, stage in sorted({(r["ranks"], r["stage"]) for r in rows}):
        mine = [r for r in rows if (r["ranks"], r["stage"]) == (ranks, stage)]
        want = formula(mine[0]["psi"], stage, ranks)
        measured = {k: sum(r[k] for r in mine) / len(mine) for k in KINDS}
        largest = {k: max(r[k] for r in mine) for k in (*KINDS, "buffers")}
        out.append(
            {
                "ranks": ranks,
                "stage": stage,
                "measured": measured,
                "largest_rank": largest,
                "formula": want,
                "ratio": {k: measured[k] / want[k] for k in KINDS} | {"total": sum(measured.values()) / sum(want.values())},
            }
        )
    return out


def table(entries: list[dict[str, Any]]) -> str:
    """MB per rank, measured / formula; the ratio of the totals and of the part that is furthest off; the buckets of the largest rank."""
    lines = ["ranks  ZeRO  parameters MB      gradients MB       optimizer MB       total MB           total  worst part  buckets MB"]
    for e in entries:
        cells = [f"{e['measured'][k] / 1e6:7.2f} /{e['formula'][k] / 1e6:7.2f}" for k in KINDS]
        cells.append(f"{sum(e['measured'].values()) / 1e6:7.2f} /{sum(e['formula'].values()) / 1e6:7.2f}")
        worst = max((e["ratio"][k] for k in KINDS), key=lambda r: abs(r - 1))
        row = "".join(f"{c:19s}" for c in cells)
        lines.append(
            f"{e['ranks']:5d}  {e['stage']:4d}  {row}{e['ratio']['total']:5.3f}  {worst:10.3f}  {e['largest_rank']['buffers'] / 1e6:10.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    rows: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        for ranks in args.ranks:
            rows += run_group(ranks, str(Path(folder) / "model"), Path(folder))
    entries = summary(rows)
    print(f"{rows[0]['psi'] / 1e6:.2f}M parameters, fp32, mean over ranks")
    print(table(entries))
    machine.save("zero_memory", {"parameters": rows[0]["psi"], "dtype": "float32", "entries": entries})
    off = [e for e in entries if any(abs(r - 1) > TOLERANCE for r in e["ratio"].values())]
    for e in off:
        print(f"More than {TOLERANCE:.0%} from the formula: ZeRO-{e['stage']} on {e['ranks']} ranks, {e['ratio']}", file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
