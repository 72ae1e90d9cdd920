"""Tokens a second of rollouts on one GPU, against transformers' `generate`, vLLM's own scheduler and the memory-bandwidth floor.

    python benchmarks/rollout.py [--model smollm2] [--only baseline small large] [--engines 1 2 4] [--quick]

- ``small``: SmolLM2-135M, 1,024 and 4,096 prompts of 20 tokens, 256 new tokens each (end-of-sequence is held back), with and without
  the sampler's log-probs, for each number of engines on the card; and 1,024 prompts with one engine and vLLM's own scheduler.
- ``baseline``: transformers' `generate`, batches of 64 and 1,024 prompts of 20 tokens, 128 new tokens each.
- ``large``: a 1.5B Qwen2.5 shape with random weights: a rollout of half the tokens taken from one of all of them. The longer the
  prompts, the less of a rollout that difference is (``share_of_rollout``), and the noisier. The floor of a decode step is the time to read
  all weights once and the keys and values of every sequence once, at the copy bandwidth that this run measured: what no decoder can beat
  that does not cache them elsewhere.

On the CPU ``--quick`` runs the same code on the bundled tiny model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import shapes

import rlkit as rl

PROMPT, TOKENS = 20, 256


def prompts(count: int, length: int, model: str) -> list[rl.Prompt]:
    """``count`` different prompts of about ``length`` tokens of the model's tokenizer."""
    from rlkit.models import load_tokenizer, resolve

    rng = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "bcdfghjklmnpqrstvwz" for b in "aeiou"]
    text = " ".join(rng.choice(words, 100))
    a_word = len(load_tokenizer(resolve(model).path)(text)["input_ids"]) / 100
    texts = (" ".join(rng.choice(words, max(1, round(length / a_word)))) for _ in range(count))
    return [rl.Prompt(id=f"p{i}", messages=({"role": "user", "content": t},), template="plain") for i, t in enumerate(texts)]


def rate(sampler: Any, asked: list[rl.Prompt], tokens: int, logprobs: bool) -> dict[str, float]:
    rollouts = sampler.generate(asked, n=1, max_tokens=tokens, min_tokens=tokens, logprobs=logprobs, progress=False)
    return {
        "tokens_per_s": round(rollouts.tokens_per_second),
        "seconds": round(rollouts.seconds, 3),
        "prompt_tokens": float(rollouts.prompt_lengths.mean()),
    }


def small(run: rl.Run, model: str, engines: list[int], sizes: list[int], tokens: int, gpus: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for n in engines:
        begun = time.monotonic()
        sampler = run.sampler(model, engines=n, gpus_per_engine=gpus / n, cpus_per_engine=0.1, restart=True, **settings_of(gpus, n))
        row: dict[str, Any] = {"start_s": round(time.monotonic() - begun, 1)}
        rate(sampler, prompts(64 * n, PROMPT, model), 8, True)
        for size in sizes:
            asked = prompts(size, PROMPT, model)
            for logprobs in (True, False):
                key = f"{size} prompts, {'log-probs' if logprobs else 'none'}"
                rate(sampler, asked, min(32, tokens), logprobs)  # shapes seen for the first time cost a moment
                row[key] = rate(sampler, asked, tokens, logprobs)
                print(n, key, row[key], flush=True)
        out[f"{n} engines"] = row
        sampler.close()
    sampler = run.sampler(
        model, engines=1, gpus_per_engine=gpus, cpus_per_engine=0.1, scheduler="vllm", restart=True, **settings_of(gpus, 1)
    )
    asked = prompts(sizes[0], PROMPT, model)
    rate(sampler, asked, min(32, tokens), True)
    out["vLLM's scheduler"] = {f"{sizes[0]} prompts, log-probs": rate(sampler, asked, tokens, True)}
    sampler.close()
    return out


def settings_of(gpus: float, engines: int) -> dict[str, Any]:
    return {"kv_cache_gib": 40.0 / engines, "max_num_seqs": 1024, "max_model_len": 1024, "sleep_level": 0} if gpus else {}


def large(run: rl.Run, folder: Path, shape: str, loads: list[tuple[int, int, int]], bandwidth: float, gpus: float) -> dict[str, Any]:
    """``loads`` are (sequences, prompt tokens, new tokens); bandwidth in bytes/s."""
    path = shapes.write(shape, folder / shape, context=16384)
    begun = time.monotonic()
    most = max(s for s, _, _ in loads)
    settings = {"gpu_memory_utilization": 0.85, "max_num_seqs": most, "max_model_len": 9216, "sleep_level": 0} if gpus else {}
    sampler = run.sampler(str(path), gpus_per_engine=gpus, engines=1, cpus_per_engine=0.1, restart=True, **settings)
    out: dict[str, Any] = {"parameters": shapes.parameters(shape), "start_s": round(time.monotonic() - begun, 1)}
    weights = 2 * shapes.parameters(shape)
    for sequences, length, tokens in loads:
        asked = prompts(sequences, length, str(path))
        rate(sampler, asked[:32], 4, True)
        # Two rollouts that differ in length only: their difference is decoding alone, without prompts and start.
        short, long = rate(sampler, asked, tokens // 2, True), rate(sampler, asked, tokens, True)
        steps = tokens - tokens // 2
        seconds = long["seconds"] - short["seconds"]
        context = long["prompt_tokens"] + tokens // 2 + steps / 2
        floor = steps * (weights + sequences * context * shapes.kv_bytes(shape)) / bandwidth
        key = f"{sequences} sequences, prompts of {length}, {tokens} new"
        out[key] = {
            "decode_tokens_per_s": round(sequences * steps / seconds),
            "step_ms": round(seconds / steps * 1e3, 3),
            "floor_ms": round(floor / steps * 1e3, 3),
            "share_of_bandwidth": round(floor / seconds, 3),
            "share_of_rollout": round(seconds / long["seconds"], 3),
        }
        print(key, out[key], flush=True)
    sampler.close()
    return out


def baseline(model: str, batches: list[int], tokens: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from rlkit.models import load_tokenizer, resolve

    path = resolve(model).path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(path)
    net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    rng, out = np.random.default_rng(0), {}
    for batch in batches:
        ids = torch.from_numpy(rng.integers(100, min(40_000, len(tokenizer)), (batch, PROMPT))).to(device)
        options = {"do_sample": True, "top_k": 0, "temperature": 1.0, "pad_token_id": 0}
        with torch.inference_mode():
            net.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
            begun = time.monotonic()
            net.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        out[f"batch {batch}"] = round(batch * tokens / (time.monotonic() - begun))
        print("transformers generate, batch", batch, out[f"batch {batch}"], "tokens/s", flush=True)
    return out


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 4 GB."""
    import torch

    x = torch.empty(2**31, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * x.numel() * 2 / sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=("baseline", "small", "large"), default=["baseline", "small", "large"])
    parser.add_argument("--quick", action="store_true", help="the tiny model, small numbers: a test of this script")
    args = parser.parse_args()
    import torch

    gpus = 1.0 if torch.cuda.is_available() else 0.0
    sizes, tokens, loads, shape = [1024, 4096], TOKENS, [(64, 8192, 256), (128, 4096, 256), (256, 1024, 256)], "1.5b"
    if args.quick:
        args.model, sizes, tokens, loads, shape, args.engines = "tiny", [16], 8, [(4, 8, 8)], "tiny", [1]
    result: dict[str, Any] = {"script": "benchmarks/rollout.py", "model": args.model, "new_tokens": tokens}
    if "baseline" in args.only:
        result["transformers_tokens_per_s"] = baseline(args.model, [4] if args.quick else [64, 1024], min(tokens, 128))
    bandwidth = copy_bandwidth() if gpus else float("inf")  # nothing to compare with on the CPU
    torch.cuda.empty_cache()
    if gpus:
        result["copy_tb_per_s"] = round(bandwidth / 1e12, 3)
    with tempfile.TemporaryDirectory() as storage:
        cluster = rl.connect("one_gpu" if gpus else "laptop", storage=storage, name="bench-rollout", dashboard=False)
        run = rl.Run("rollout", cluster, resume=False)
        if "small" in args.only:
            result["small"] = small(run, args.model, args.engines, sizes, tokens, gpus)
        if "large" in args.only:
            result["large"] = large(run, Path(storage), shape, loads, bandwidth, gpus)
        run.close()
        cluster.shutdown()
    if not args.quick:
        print(f"written to {machine.save('rollout', result).name}")
    print(result)


if __name__ == "__main__":
    main()
