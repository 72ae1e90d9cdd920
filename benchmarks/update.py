"""Tokens per second of an update on one GPU, and how much of the GPU's matrix rate that is.

    python benchmarks/update.py                        # all sections, benchmarks/results/update.json
    python benchmarks/update.py --only smollm2 --kernels liger
    python benchmarks/update.py --quick                # tiny shapes, on the CPU if there is no GPU; saves nothing

Sections:

- ``matrix``: the rate of a bfloat16 matrix product of 8192 x 8192 by 8192 x 8192 on random data, median of 50.
- ``qwen``: a 1.5B Qwen2.5 shape with random weights, 64 sequences of 4,096 tokens (256 of prompt), ZeRO-2, one optimizer step.
- ``smollm2``: the SmolLM2-135M shape with random weights, 1,024 samples with lengths like those of a rollout, against a plain loop:
  transformers and DeepSpeed ZeRO-2 in bfloat16, 64 samples a batch padded to its longest, gradient checkpointing, fp32 log-softmax of
  all logits.

Times are of whole updates: packing on the host, forward, backward, optimizer step. Each case is a process of its own, warmed up by an
update of the same shapes; the median of three is reported. Tokens are real ones, of prompts and responses, never padding. The gradient's
norm at the first step tells whether the cases of a section compute the same: ``norm`` in the table is its ratio to that of the first case.

Model FLOPs are 6 x parameters x tokens (a tied embedding counts once, as the head) + 6 x layers x hidden x T^2 a sequence of T tokens for
causal attention: 2 x T^2 x hidden for scores and their product with the values, forward, and twice that backward. Recomputation does not
count. ``mfu`` is their rate over the matrix rate; ``mfu_needed`` counts the head on the responses' tokens alone, which is what is computed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import shapes

REPEATS = 3
HEADER = "section  measure kernels   micro  chunk  tokens/s    MFU x plain peak GiB    norm"


# ---- what is worked on


def shape_of(section: str, quick: bool) -> str:
    return "tiny" if quick else {"qwen": "1.5b", "smollm2": "135m"}[section]


def lengths_of(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Prompt tokens (P,) and response tokens (P, G) of a case; the same each time."""
    p, g = case["prompts"], case["group"]
    if case["lengths"] == "fixed":
        return np.full(p, case["prompt_tokens"]), np.full((p, g), case["response_tokens"])
    rng = np.random.default_rng(0)
    responses = np.exp(rng.normal(np.log(140), 0.6, (p, g))).astype(np.int64)
    return rng.integers(40, 121, p), np.clip(responses, 8, 256)


def make_work(case: dict[str, Any], prompts: int | None = None) -> Any:
    """Random tokens and advantages, of the first ``prompts`` prompts, as the learner gets them."""
    from rlkit.types import Prompt, RolloutShard
    from rlkit.zero.work import Work

    prompt_lens, lengths = lengths_of(case)
    prompt_lens, lengths = prompt_lens[:prompts], lengths[:prompts]
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, case["vocab"], int(lengths.sum())).astype(np.int32)
    shard = RolloutShard(
        tuple(Prompt(str(i), ({"role": "user", "content": "?"},)) for i in range(len(prompt_lens))),
        tuple(rng.integers(5, case["vocab"], n).astype(np.int32) for n in prompt_lens),
        tokens,
        lengths.astype(np.int32),
        np.zeros(len(tokens), np.float32),
        ("",) * lengths.size,
        ("stop",) * lengths.size,
    )
    advantages = rng.standard_normal(lengths.shape).astype(np.float32)
    keep = np.ones(len(prompt_lens), bool)
    return Work((shard,), None, (len(prompt_lens),), prompt_lens, lengths, advantages, keep, 1.0, 4096, False, 0, None)


def flops(case: dict[str, Any], params: int) -> dict[str, float]:
    """Model FLOPs of the forward and backward pass over a case, and those with the head on the responses' tokens alone."""
    prompt_lens, lengths = lengths_of(case)
    totals = prompt_lens[:, None] + lengths
    attention = 6.0 * case["layers"] * case["hidden"] * float((totals.astype(np.float64) ** 2).sum())
    whole = 6.0 * params * float(totals.sum()) + attention
    head = 6.0 * case["vocab"] * case["hidden"]
    return {"model": whole, "needed": whole - head * float(totals.sum() - lengths.sum())}


# ---- what a process of its own measures


def timed(step: Callable[[], Any], gpu: bool, repeats: int) -> dict[str, Any]:
    """Seconds of each of ``repeats`` calls and the peak memory over them."""
    import torch

    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    return {"seconds": seconds, "median_seconds": statistics.median(seconds), "peak_gib": peak}


def measure_rlkit(case: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """Updates by `rlkit.zero.train.Trainer` on one rank."""
    from rlkit.config import TrainSpec
    from rlkit.losses import Objective
    from rlkit.zero import engine as zero
    from rlkit.zero import peers, train, work

    spec = TrainSpec(zero_stage=2, gpus_per_rank=float(gpu), lr=1e-6, packing="varlen", max_logprob_gap=float("inf"), **case["spec"])
    zero.join(0, 1, case["store"], gpu, 600.0)
    start = time.perf_counter()
    engine = zero.Engine(case["model"], spec)
    out: dict[str, Any] = {"start_seconds": time.perf_counter() - start} | engine.facts
    trainer, objective = train.Trainer(engine, peers.Peers()), Objective()
    planned = spec.but(packing=engine.facts["packing"])
    warm, _ = work.plan(make_work(case, case["warm_prompts"]), objective, planned, 0)
    whole, facts = work.plan(make_work(case), objective, planned, 0)
    start = time.perf_counter()
    first = trainer.update(warm[0], lambda: False)
    out |= {"warm_up_seconds": time.perf_counter() - start, "grad_norm": first["norms"][0]}
    out["entropy"] = first["sums"]["entropy"] / first["tokens"]
    if case.get("profile"):
        profile(lambda: trainer.update(warm[0], lambda: False))
    last: dict[str, Any] = {}
    out |= timed(lambda: last.update(trainer.update(whole[0], lambda: False)), gpu, case["repeats"])
    return out | {"micro_batches": facts["update/micro_batches"], "padding": facts["update/padding"], "phases": last["seconds"]}


def measure_plain(case: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """The loop that one writes first: padded batches, full logits."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    from rlkit.zero import engine as zero

    zero.join(0, 1, case["store"], gpu, 600.0)
    if not gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at start otherwise
    deepspeed.init_distributed("nccl" if gpu else "gloo", verbose=False)
    device, batch = torch.device("cuda", 0) if gpu else torch.device("cpu"), case["batch"]
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.bfloat16 if gpu else torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    work = make_work(case)
    shard = work.shards[0]
    offsets, group = shard.offsets(), shard.group_size
    rows, starts = [], []
    for i, n in enumerate(work.lengths.reshape(-1).tolist()):
        prompt = shard.prompt_tokens[i // group]
        rows.append(torch.from_numpy(np.concatenate([prompt, shard.tokens[offsets[i] : offsets[i] + n]]).astype(np.int64)))
        starts.append(len(prompt))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": len(rows) // batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    if gpu:
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    advantages = torch.from_numpy(work.advantages.reshape(-1)).to(device)
    total = float(work.lengths.sum())

    def step() -> None:
        for first in range(0, len(rows), batch):
            part = rows[first : first + batch]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
            places = torch.arange(ids.shape[1], device=device)
            ends = torch.tensor([len(r) for r in part], device=device)[:, None]
            begins = torch.tensor(starts[first : first + batch], device=device)[:, None]
            logits = engine(input_ids=ids, attention_mask=(places < ends).long(), use_cache=False).logits
            logp = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]
            mask = (places[1:] >= begins) & (places[1:] < ends)
            loss = -(advantages[first : first + batch, None] * logp * mask).sum() / total
            engine.backward(loss * (len(rows) // batch))  # DeepSpeed takes the mean over the batches
            engine.step()

    step()
    norm = float(engine.get_global_grad_norm())
    return timed(step, gpu, case["repeats"]) | {"grad_norm": norm}


def profile(step: Callable[[], Any]) -> None:
    """The kernels that took most of one call, on standard error."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        step()
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=70), file=sys.stderr)


def matrix_rate(n: int, gpu: bool) -> dict[str, float]:
    """FLOP/s of one bfloat16 product of n x n matrices; on the CPU in float32."""
    import torch

    device, dtype, count = ("cuda", torch.bfloat16, 50) if gpu else ("cpu", torch.float32, 5)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = []
    for number in range(count + 10):
        if gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.mm(a, b, out=out)
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            torch.mm(a, b, out=out)
            taken = time.perf_counter() - begin
        if number >= 10:
            seconds.append(taken)
    return {"n": float(n), "median_seconds": statistics.median(seconds), "flops_per_second": 2.0 * n**3 / statistics.median(seconds)}


# ---- the sections


def cases(section: str, quick: bool, gpu: bool, kernels: list[str], micro: list[int]) -> list[dict[str, Any]]:
    """What a section measures, in order."""
    if section == "qwen":
        shape = shapes.SHAPES[shape_of("qwen", quick)]
        data = {"prompts": 16, "group": 4, "lengths": "fixed", "prompt_tokens": 256, "response_tokens": 3840, "warm_prompts": 4}
        if quick:
            data |= {"prompts": 2, "prompt_tokens": 8, "response_tokens": 24}
        specs = [{"kernels": k, "micro_batch_tokens": m} for m in micro or [16384, 32768] for k in kernels]
        if not quick and not micro:  # the logits of a whole micro-batch kept for the backward pass, not computed again
            specs += [{"kernels": k, "micro_batch_tokens": 16384, "logits_chunk": 16384} for k in kernels if k != "plain"]
    else:
        shape = shapes.SHAPES[shape_of("smollm2", quick)]
        data = {"prompts": 4 if quick else 128, "group": 8, "lengths": "rollout", "warm_prompts": None, "batch": 8 if quick else 64}
        specs = [{"kernels": k, "micro_batch_tokens": m} for m in micro or [16384, 65536] for k in kernels]
    if quick:
        specs = [{"kernels": "plain" if gpu else "auto", "micro_batch_tokens": 2048}]
    data |= {
        "repeats": 1 if quick else REPEATS,
        "vocab": shape["vocab_size"],
        "hidden": shape["hidden_size"],
        "layers": shape["num_hidden_layers"],
    }
    found = [data | {"measure": "rlkit", "spec": spec} for spec in specs]
    return found if section == "qwen" else [data | {"measure": "plain", "spec": {}}, *found]


def run_case(case: dict[str, Any], gpu: bool, timeout_s: float) -> dict[str, Any]:
    """A case in a process of its own; what went wrong in it is its result."""
    environment = os.environ | {"DS_ACCELERATOR": "cuda" if gpu else "cpu", "LOCAL_RANK": "0", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    if not gpu:
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(case | {"store": str(Path(folder) / "store"), "gpu": gpu, "result": str(Path(folder) / "result.json")})
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--case", text], env=environment, timeout=timeout_s, check=False, stderr=subprocess.PIPE
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {timeout_s:.0f} s"}
        errors = done.stderr.decode(errors="replace")
        if case.get("profile") or done.returncode:
            print(errors[-12000:], file=sys.stderr)
        if done.returncode:
            return {"error": errors.strip().splitlines()[-1][:300] if errors.strip() else f"ended with {done.returncode}"}
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def run_section(section: str, args: argparse.Namespace, gpu: bool, until: float, report: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measure the cases of a section and report after each."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    kernels = args.kernels or ["compile", *(["liger"] if installed else []), "plain"]
    shape = shape_of(section, args.quick)
    params = shapes.parameters(shape)
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shapes.write(shape, Path(folder))
        for case in cases(section, args.quick, gpu, kernels, args.micro):
            left = until - time.monotonic()
            if left < 30:
                print(f"{section}: no time left for {case['spec'] or case['measure']}", file=sys.stderr)
                break
            case |= {"model": folder, "profile": args.profile and case["measure"] == "rlkit"}
            found = run_case(case, gpu, left)
            prompt_lens, lengths = lengths_of(case)
            tokens = int((prompt_lens[:, None] + lengths).sum())
            entry = {"measure": case["measure"], "parameters": params, "tokens": tokens} | case["spec"] | found
            if "median_seconds" in found:
                entry["tokens_per_second"] = tokens / found["median_seconds"]
                entry |= {f"{k}_flops_per_second": v / found["median_seconds"] for k, v in flops(case, params).items()}
            print(f"{section} {json.dumps(entry)}", file=sys.stderr, flush=True)
            entries.append(entry)
            report(entries)


def finish(result: dict[str, Any]) -> None:
    """Ratios: to the matrix rate, to the plain loop, and of the first gradient's norm to that of the section's first case."""
    rate = result.get("matrix", {}).get("flops_per_second")
    for section in ("qwen", "smollm2"):
        for entry in result.get(section, []):
            if rate and "model_flops_per_second" in entry:
                entry["mfu"] = entry["model_flops_per_second"] / rate
                entry["mfu_needed"] = entry["needed_flops_per_second"] / rate
        norms = [e["grad_norm"] for e in result.get(section, []) if "grad_norm" in e]
        for entry in result.get(section, []):
            if "grad_norm" in entry:
                entry["grad_norm_ratio"] = entry["grad_norm"] / norms[0]
    plain = [e for e in result.get("smollm2", []) if e["measure"] == "plain" and "tokens_per_second" in e]
    for entry in result.get("smollm2", []):
        if plain and "tokens_per_second" in entry:
            entry["times_plain"] = entry["tokens_per_second"] / plain[0]["tokens_per_second"]


def table(result: dict[str, Any]) -> str:
    lines = []
    if "matrix" in result:
        lines.append(f"matrix product: {result['matrix']['flops_per_second'] / 1e12:.1f} TFLOP/s")
    lines.append(HEADER)
    for section in ("qwen", "smollm2"):
        for e in result.get(section, []):
            micro, chunk = str(e.get("micro_batch_tokens", "-")), str(e.get("logits_chunk", "-"))
            head = f"{section:8s} {e['measure']:7s} {e.get('kernels', '-'):8s} {micro:>6s} {chunk:>6s} "
            if "error" in e:
                lines.append(head + e["error"])
                continue
            cells = [f"{e['tokens_per_second']:9,.0f}", f"{e['mfu']:6.1%}" if "mfu" in e else f"{'-':>6s}"]
            cells.append(f"{e['times_plain']:7.2f}" if "times_plain" in e else f"{'-':>7s}")
            cells.append(f"{e['peak_gib']:8.1f}" if e["peak_gib"] else f"{'-':>8s}")
            cells.append(f"{e['grad_norm_ratio']:7.4f}")
            lines.append(head + " ".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["matrix", "qwen", "smollm2"], default=["matrix", "qwen", "smollm2"])
    parser.add_argument("--kernels", nargs="+", choices=["plain", "liger", "compile"], help="default: all that are installed")
    parser.add_argument("--micro", nargs="+", type=int, default=[], help="tokens of a micro-batch; default: two sizes a section")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that the script runs; saves nothing")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take the time of each case")
    parser.add_argument("--budget_s", type=float, default=3600.0, help="seconds after which no further case is started")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = json.loads(args.case)
        measured = (measure_rlkit if case["measure"] == "rlkit" else measure_plain)(case, case["gpu"])
        Path(case["result"]).write_text(json.dumps(measured))
        return 0
    import torch

    gpu, until = torch.cuda.is_available(), time.monotonic() + args.budget_s
    result: dict[str, Any] = {}

    def save() -> None:
        finish(result)
        if not args.quick:
            machine.save("update", result)

    if "matrix" in args.only:
        result["matrix"] = matrix_rate(256 if args.quick else 8192, gpu)
        save()
    for section in ("qwen", "smollm2"):
        if section in args.only:

            def report(entries: list[dict[str, Any]], section: str = section) -> None:
                result[section] = entries
                save()

            run_section(section, args, gpu, until, report)
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
