"""`docs/benchmarks.md` from the results of the GPU benchmarks: python benchmarks/table.py

Nothing is measured here; a test compares the page with what this script makes of the committed results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
Row = tuple[str, str]

HEAD = """# Speed on a GPU

Made by `benchmarks/table.py` from `benchmarks/results/`; each script's docstring says what it measures. Ratios are of one run, or of
two calls of a script on one machine within minutes, put together, where the result lists its calls. These are figures of vLLM 0.26; the
version that rlkit pins runs on the CPU here and was not yet measured on a GPU. Models have random weights of the shape that is named, but
for rollouts and steps of SmolLM2. Decoding is measured as a difference of two rollouts, which is the noisier the longer the prompts are.
"""


def rollout(r: dict[str, Any]) -> list[Row]:
    base, rows = r["transformers_tokens_per_s"], []
    best = max(base.values())
    for engines, found in r["small"].items():
        many = {"1 engines": "1 engine", "vLLM's scheduler": "1 engine with vLLM's own scheduler"}.get(engines, engines)
        for load, v in found.items():
            if load.endswith("log-probs"):
                n, size = v["tokens_per_s"], load.partition(",")[0]
                figure = f"{n:,} tokens/s, {n / base['batch 64']:.0f} and {n / best:.1f} x transformers' generate at batch 64 and 1,024"
                rows.append((f"SmolLM2-135M, {size} x {r['new_tokens']} tokens, {many}", figure))
    if "scheduler" in r:  # one call
        ours, theirs = (r["scheduler"][f"{whose}'s"]["tokens_per_s"] for whose in ("rlkit", "vLLM"))
        what = "SmolLM2-135M, 1024 prompts, 1 engine, rlkit's scheduler and vLLM's own"
        rows.append((what, f"{ours:,} and {theirs:,} tokens/s, {ours / theirs:.1f} x"))
    for part in ("large", "large_again"):
        for load, v in r.get(part, {}).items():
            if isinstance(v, dict):
                share = v["share_of_bandwidth"]
                of = f"{share:.0%} of what memory bandwidth allows" if share <= 1 else "not resolved: prompts take most of these rollouts"
                rows.append((f"1.5B Qwen2.5 shape, decoding, {load}", f"{v['decode_tokens_per_s']:,} tokens/s, {of}"))
    return rows


def update(r: dict[str, Any]) -> list[Row]:
    rows = [("bf16 matrix product, 8192 x 8192 x 8192", f"{r['matrix']['flops_per_second'] / 1e12:.0f} TFLOP/s")]
    for e in r["qwen"]:
        what = f"1.5B Qwen2.5 shape, 4,096-token sequences packed, ZeRO-2, kernels {e['kernels']}"
        rows.append((what, f"{e['tokens_per_second']:,.0f} tokens/s, {e['mfu']:.1%} of the matrix rate, peak {e['peak_gib']:.0f} GiB"))
    for e in r["smollm2"]:
        if e["measure"] == "plain":
            rows.append(("SmolLM2-135M, plain ZeRO-2 loop with padding and recomputation", f"{e['tokens_per_second']:,.0f} tokens/s"))
        else:
            what = f"SmolLM2-135M, rlkit, kernels {e['kernels']}"
            rows.append((what, f"{e['tokens_per_second']:,.0f} tokens/s, {e['times_plain']:.1f} x the plain loop"))
    return rows


def sync(r: dict[str, Any]) -> list[Row]:
    rows = []
    for name, e in r.items():
        if name != "machine":
            p = e["parts_s"]
            parts = f"publish {p['publish']:.3f}, load {p['load']:.3f}, verify {p['verify']:.3f}"
            what = f"{name} shape, {e['bytes'] / 1e9:.1f} GB to {e['engines']} engine(s) by {e['transport']}, every tensor verified"
            rows.append((what, f"{e['sync_s']:.3f} s ({parts}), first {e['first_sync_s']:.1f} s"))
    return rows


def step(r: dict[str, Any]) -> list[Row]:
    p = r["phases_s"]
    parts = ", ".join(f"{k.replace('_', ' ')} {p[k]:.2f}" for k in ("rollout", "reward", "forward_backward", "optimizer", "sync"))
    return [
        (
            f"SmolLM2-135M, {r['shape']}",
            f"{r['step_s']:.2f} s, {r['samples_per_s']:.0f} samples/s ({parts}); overhead {r['overhead_share']:.1%}",
        )
    ]


def vs_trl(r: dict[str, Any]) -> list[Row]:
    return [
        (
            f"SmolLM2-135M, {r['shape']}",
            f"{r['rlkit_over_trl']:.1f} x TRL ({r['rlkit_samples_per_s']:.0f} and {r['trl_samples_per_s']:.0f} samples/s)",
        )
    ]


def colocated(r: dict[str, Any]) -> list[Row]:
    phases = ", ".join(f"{k} {r['measured_gib'][k]:.0f} ({v:.0f})" for k, v in r["predicted_gib"].items())
    what = f"{r['shape']} shape, {r['samples']} samples, ZeRO-3 with offload, engine asleep during the update"
    return [(what, f"GiB by phase, measured (predicted): {phases}; peak predicted / measured {r['peak_gib']['ratio']:.2f}")]


def two_gpus(r: dict[str, Any]) -> list[Row]:
    rows = []
    for name, what in (
        ("two_engines", "SmolLM2-135M, two engines beside two ranks"),
        ("tensor_parallel", "1.5B Qwen2.5 shape, one engine over both cards beside two ranks"),
        ("apart", "SmolLM2-135M, engine and rank apart"),
    ):
        for setting, v in r[name].items():
            if isinstance(v, dict):
                sent = f"{v['bytes'] / 1e9:.2f} GB by {v['transport']} in {v['sync_s']:.3f} s, {v['checked']} tensors equal in every engine"
                rows.append((f"{what}, {setting}", sent))
    worst = r["losses"]["largest_difference_to_one_rank"]
    told = "; ".join(f"{k} ranks: loss {v['policy/loss']:.4f}, gradient norm {v['policy/grad_norm']:.4f}" for k, v in worst.items())
    norm = r["losses"]["metrics"]["ZeRO-2 on 1"][0]["policy/grad_norm"]
    rows.append(
        ("ten updates, the same batches on one rank and on two: largest difference", f"{told} (gradient norms are near {norm:.1f})")
    )
    back = r["killed"]["events"][-1]["seconds"]
    rows.append(("one of two engines killed in a rollout", f"the step finished on the other, the engine was back after {back:.0f} s"))
    s = r["scaling"]
    one, two = (s[k]["samples_per_s"] for k in ("1 GPU", "2 GPUs"))
    rows.append((f"1.5B Qwen2.5 shape, {s['shape']}, one card and two", f"{one:.0f} and {two:.0f} samples/s, {s['speedup']:.2f} x"))
    m = r["memory"]
    peaks = [max(v for k, v in m[g]["peaks"].items() if k.endswith("allocated_gib")) for g in ("1 GPU", "2 GPUs")]
    what = "1.5B Qwen2.5 shape, ZeRO-3, peak of a rank in an update, one rank and two"
    rows.append((what, f"{peaks[0]:.1f} and {peaks[1]:.1f} GiB, {m['two_over_one']:.0%}"))
    a = r["ahead"]
    waits, ahead = a["step_s"]["awaited"], a["step_s"]["one step ahead"]
    rows.append(
        (f"1.5B Qwen2.5 shape, apart, {a['shape']}: awaited and one step ahead", f"{waits:.2f} and {ahead:.2f} s, {a['speedup']:.2f} x")
    )
    return rows


def watching_cost(r: dict[str, Any]) -> list[Row]:
    low, high = (value - 1 for value in r["interval_95"])
    what = f"steps of {r['model']} with a dashboard open, against steps without, {r['pairs']} pairs of {r['steps_a_block']} steps"
    return [(what, f"{r['ratio'] - 1:+.1%} in time; 95 % interval {low:+.1%} to {high:+.1%}")]


def monitor_on_gpus(r: dict[str, Any]) -> list[Row]:
    roles = ", ".join(f"{role} {gib:.1f}" for role, gib in r["roles_gib"].items())
    return [
        ("the monitor's process, once a second, while a loop runs on the card", f"{r['monitor_percent_of_a_core']:.2f} % of a core"),
        ("memory by role, GiB", roles),
        ("against nvidia-smi, median difference", f"{r['memory_off_by_mib']:.1f} MiB, {r['temperature_off_by']:.0f} °C"),
    ]


SECTIONS: list[tuple[str, str, Callable[[dict[str, Any]], list[Row]]]] = [
    ("rollout", "Rollout", rollout),
    ("update", "Update", update),
    ("sync", "Weight sync, engine and rank on one card", sync),
    ("step", "A whole GRPO step on one card", step),
    ("vs_trl", "A whole GRPO step against TRL", vs_trl),
    ("colocated", "A large model on one card", colocated),
    ("two_gpus", "Two GPUs", two_gpus),
    ("watching_cost_gpu", "What an open dashboard costs", watching_cost),
    ("monitor_on_gpus", "The monitor", monitor_on_gpus),
]


def page() -> str:
    """The page as Markdown."""
    out = [HEAD]
    for name, title, rows in SECTIONS:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        m = result["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in m["packages"].items() if k in ("vllm", "torch", "transformers", "trl", "ray"))
        script = result.get("script", f"benchmarks/{name.removesuffix('_gpu')}.py")
        out.append(f"## {title}\n`{script}`, {', '.join(m['gpus'])}, {m['cores']} cores, {versions}, {m['date']}\n")
        out.append("| what | figure |\n|---|---|\n" + "\n".join(f"| {a} | {b} |" for a, b in rows(result)) + "\n")
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written to {PAGE}")
