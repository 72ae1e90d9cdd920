"""One GPU against two, and what two allow: engines and ranks on both, an engine over both, or one card for each side.

    python benchmarks/two_gpus.py                                # all sections, benchmarks/results/two_gpus.json
    python benchmarks/two_gpus.py --only apart losses            # some; what the file has of the others stays
    python benchmarks/two_gpus.py --quick                        # the tiny model on the CPU: a test of this script; saves nothing

- ``two_engines``, ``tensor_parallel``, ``apart``: two steps and a sync with ZeRO-2 and with ZeRO-3, for two engines beside two ranks
  (SmolLM2-135M, weights by CUDA IPC), one engine over both cards beside two ranks (the 1.5B shape, since SmolLM2's nine heads are odd; CUDA
  IPC, each worker from its own card), and engine and rank apart (SmolLM2-135M, NCCL). Every sync compares the checksums of all tensors.
- ``losses``: the same ten batches on one rank and on two, from the same weights. All were sampled before the first update and are weighted
  by `tis_cap`'s ratio, so that the loss depends on what was learnt; without that it is the same number whatever the weights. Differences
  are absolute: a loss is a mean of advantages times ratios, which are of the order of 1 and nearly cancel.
- ``killed``: one of two engines is killed in the middle of a rollout.
- ``scaling``: a GRPO step of a 1.5B shape, 128 prompts x 8 x 256 tokens, engine and rank on one card, then on both. Samples/s of the steps
  after the first.
- ``memory``: the peak of a rank's process in an update of the 1.5B shape under ZeRO-3, one rank against two; sequences of 4,096 tokens.
- ``ahead``: the 1.5B shape, engine and rank apart, 64 prompts x 8 x 256 tokens: rollouts awaited, and one step ahead (`Sampler.submit`).

Models have random weights of the named shape, but for SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import shapes
from step import timed
from sync import spread

import rlkit as rl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

UPDATES = 10
SMALL = {"max_model_len": 1024, "kv_cache_gib": 8.0, "enforce_eager": True, "cpus_per_engine": 1}
LARGE = {"max_model_len": 1024, "max_num_seqs": 512, "kv_cache_gib": 20.0, "cpus_per_engine": 1}


class Bench:
    """Where the sections find models and clusters; ``quick`` is the CPU and the tiny model."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.model = "tiny" if quick else "smollm2"

    def large(self) -> str:
        """The 1.5B shape, written once."""
        if self.quick:
            return "tiny"
        path = self.folder / "1.5b"
        return str(path if path.exists() else shapes.write("1.5b", path))

    @contextmanager
    def run(self, name: str, gpus: int) -> Iterator[rl.Run]:
        """A run on a local cluster of ``gpus`` GPUs; afterwards the cluster is gone."""
        spec = {"name": f"two-gpus-{name}", "num_cpus": max(16, os.cpu_count() or 1), "num_gpus": 0 if self.quick else gpus}
        cluster = rl.connect(rl.ClusterSpec.make(spec, dashboard=False, storage=str(self.folder / "runs")))
        try:
            run = rl.Run(name, cluster, resume=False)
            try:
                yield run
            finally:
                run.close()
        finally:
            cluster.shutdown()

    def engines(self, two: bool, **settings: Any) -> dict[str, Any]:
        """Settings of the sampler; on the CPU those that placement would choose on GPUs."""
        if not self.quick:
            return settings
        many = 2 if two and settings.get("tensor_parallel_size", 1) == 1 else 1
        return {"engines": many, "max_model_len": 128, "kv_cache_gib": 0.1, "cpus_per_engine": 0.1, "threads": 1}

    def ranks(self, two: bool, **settings: Any) -> dict[str, Any]:
        found = {"cpus_per_rank": 1, "lr": 1e-6, "max_logprob_gap": 0.5} | settings
        if self.quick:
            found |= {"ranks": settings.get("ranks", 2 if two else 1), "cpus_per_rank": 0.1, "threads": 1, "kernels": "plain"}
            found["micro_batch_tokens"] = 2048
        return found


def table(run: rl.Run) -> list[str]:
    """`run.placement` with what was predicted and measured."""
    return repr(run.placement()).splitlines()


def steps(run: rl.Run, sampler: Any, learner: Any, count: int, tokens: int) -> dict[str, Any]:
    """``count`` steps of 16 prompts x 4, and what the last ones say."""
    tasks, until = rl.load_tasks("word_problems"), run.committed + 1 + count
    for step in run.steps(until, progress=False):
        rollouts = sampler.generate(tasks.batch(16), n=4, max_tokens=tokens, progress=False)
        scored = rl.score(rollouts, spread)
        stats = learner.update(rl.advantages(scored, "grpo"))
        sync = sampler.sync(learner)
        run.log(step, scored, stats)
    return {
        "transport": sync.transport,
        "engines": sync.engines,
        "checked": sync.checked,
        "checksum_ok": sync.checksum_ok,
        "sync_s": round(sync.seconds, 4),
        "bytes": sync.bytes,
        "logprob_gap": stats["logprob_gap"],
    }


def two_engines(bench: Bench) -> dict[str, Any]:
    return combinations(bench, "two-engines", bench.model, 2, {})


def tensor_parallel(bench: Bench) -> dict[str, Any]:
    return combinations(bench, "tensor-parallel", bench.large(), 2, {"tensor_parallel_size": 2})


def apart(bench: Bench) -> dict[str, Any]:
    return combinations(bench, "apart", bench.model, 1, {})


def combinations(bench: Bench, name: str, model: str, ranks: int, engines: dict[str, Any]) -> dict[str, Any]:
    """Two steps with ZeRO-2, then with ZeRO-3, on ``ranks`` ranks."""
    out: dict[str, Any] = {}
    with bench.run(name, 2) as run:
        learner = run.learner(model, **bench.ranks(ranks == 2, zero_stage=2, ranks=ranks))  # first: it says how many cards are left
        sampler = run.sampler(model, **bench.engines(ranks == 2, **SMALL, **engines))
        for stage in (2, 3):
            if stage == 3:
                learner = run.learner(model, restart=True, **bench.ranks(ranks == 2, zero_stage=3, ranks=ranks))
                sampler.sync(learner)
            key = f"ZeRO-{stage} on {ranks} rank{'s' * (ranks > 1)}"
            out[key] = steps(run, sampler, learner, 2, 16 if bench.quick else 64) | {"placement": table(run)}
            print(key, json.dumps(out[key]), flush=True)
    return out


def losses(bench: Bench) -> dict[str, Any]:
    """Metrics of ten updates with the same batches, by ZeRO stage and ranks."""
    kept = ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/logprob_gap", "policy/tis_weight")
    found: dict[str, list[dict[str, float]]] = {}
    with bench.run("losses", 2) as run:
        # What is compared is the learner: its engines are two in all cases, and sample once.
        common = {
            "lr": 1e-5,
            "max_lag": UPDATES,
            "max_logprob_gap": 100.0,
            "gpus_per_rank": 0.0 if bench.quick else 0.4,
            "micro_batch_tokens": 8192,
        }
        learner = run.learner(bench.model, **bench.ranks(True, **common, ranks=2, zero_stage=2))
        sampler = run.sampler(bench.model, **bench.engines(True, **SMALL))
        tasks = rl.load_tasks("word_problems")
        batches = []
        for i in range(UPDATES):
            rollouts = sampler.generate(tasks.batch(32), n=4, max_tokens=16 if bench.quick else 128, seed=i, progress=False)
            batches.append(rl.advantages(rl.score(rollouts, spread), "grpo", drop_no_spread=False))
        for stage, ranks in ((2, 2), (3, 2), (2, 1)):
            if (stage, ranks) != (2, 2):
                learner = run.learner(bench.model, restart=True, **bench.ranks(True, **common, ranks=ranks, zero_stage=stage))
            rows = [learner.update(batch, tis_cap=5.0).metrics for batch in batches]
            found[f"ZeRO-{stage} on {ranks}"] = [{k: v for k, v in row.items() if k in kept} for row in rows]
    one = found["ZeRO-2 on 1"]
    names = sorted(one[0])
    worst = {
        key: {n: max(abs(a[n] - b[n]) for a, b in zip(rows, one, strict=True)) for n in names}
        for key, rows in found.items()
        if rows is not one
    }
    return {"updates": UPDATES, "metrics": found, "largest_difference_to_one_rank": worst}


def killed(bench: Bench) -> dict[str, Any]:
    from killing import killed_while_sampling  # type: ignore[import-not-found]  # of tests/

    tokens = 64 if bench.quick else 256
    with bench.run("killed", 2) as run:
        learner = run.learner(bench.model, **bench.ranks(True, zero_stage=2))
        sampler = run.sampler(bench.model, **bench.engines(True, **SMALL))
        tasks = rl.load_tasks("word_problems")
        for step in run.steps(2, progress=False):
            prompts = tasks.batch(16)
            begun = time.perf_counter()
            if step == 1:
                with killed_while_sampling(sampler.engines[0], sampler.info[0]["pid"]):
                    rollouts = sampler.generate(prompts, n=8, max_tokens=tokens, min_tokens=tokens, progress=False)
            else:
                rollouts = sampler.generate(prompts, n=8, max_tokens=tokens, min_tokens=tokens, progress=False)
            seconds = time.perf_counter() - begun
            stats = learner.update(rl.advantages(rl.score(rollouts, spread), "grpo"))
            sampler.sync(learner)
            run.log(step, None, stats)
        left, deadline = len(sampler.engines), time.monotonic() + 240
        while len(sampler.engines) < 2 and time.monotonic() < deadline:
            time.sleep(1)
            sampler.sync(learner)
        sync = sampler.sync(learner)
        told = [{k: e.get(k) for k in ("name", "text", "moved", "seconds")} for e in run.events if e["kind"] == "engine"]
        return {
            "samples": int(rollouts.lengths.size),
            "rollout_s": round(seconds, 2),
            "engines_after_the_step": left,
            "engines_at_the_end": sync.engines,
            "checksum_ok": sync.checksum_ok,
            "events": told,
        }


def scaling(bench: Bench) -> dict[str, Any]:
    prompts, group, tokens = (4, 4, 8) if bench.quick else (128, 8, 256)
    out: dict[str, Any] = {"shape": f"{prompts} prompts x {group} samples x {tokens} tokens"}
    for gpus in (1, 2):
        with bench.run(f"scaling-{gpus}", gpus) as run:
            train = {"zero_stage": 2, "micro_batch_tokens": 32768, "gradient_checkpointing": False}
            learner = run.learner(bench.large(), **bench.ranks(gpus == 2, **train))
            sampler = run.sampler(bench.large(), **bench.engines(gpus == 2, **LARGE))
            rows = timed(run, sampler, learner, rl.load_tasks("word_problems"), 4, prompts, group, tokens)
            seconds = statistics.median(r["total"] for r in rows)
            out[f"{gpus} GPU{'s' * (gpus > 1)}"] = {
                "engines": len(sampler.engines),
                "ranks": learner.spec.ranks,
                "step_s": round(seconds, 3),
                "samples_per_s": round(prompts * group / seconds, 2),
                "phases_s": {k: round(statistics.median(r[k] for r in rows), 3) for k in rows[0]},
                "placement": table(run),
            }
            print(json.dumps(out), flush=True)
    out["speedup"] = round(out["1 GPU"]["step_s"] / out["2 GPUs"]["step_s"], 3)
    return out


def memory(bench: Bench) -> dict[str, Any]:
    """One rank against two; rollouts are what a sequence of 4,096 tokens is made of, so the engines sample few and long ones."""
    out: dict[str, Any] = {}
    length = 64 if bench.quick else 4000
    engines = {"max_model_len": 4096, "kv_cache_gib": 8.0, "max_num_seqs": 8, "cpus_per_engine": 1}
    for gpus in (1, 2):
        with bench.run(f"memory-{gpus}", gpus) as run:
            train = {"zero_stage": 3, "micro_batch_tokens": 4096, "gradient_checkpointing": True, "logits_chunk": 1024}
            learner = run.learner(bench.large(), **bench.ranks(gpus == 2, **train))
            sampler = run.sampler(bench.large(), **bench.engines(gpus == 2, **engines))
            for step in run.steps(1, progress=False):
                prompts = rl.load_tasks("word_problems").take(2)
                rollouts = sampler.generate(prompts, n=4, max_tokens=length, min_tokens=length, progress=False)
                stats = learner.update(rl.advantages(rl.score(rollouts, spread), "grpo", drop_no_spread=False))
                sampler.sync(learner)
                run.log(step, None, stats)
            update = [e for e in run.events if e["kind"] == "phase" and e["phase"] == "update"][-1]
            peaks = {k: round(v, 2) for k, v in update.items() if k.startswith("memory/rank-")}
            out[f"{gpus} GPU{'s' * (gpus > 1)}"] = {"ranks": learner.spec.ranks, "peaks": peaks, "placement": table(run)}
            print(json.dumps(out), flush=True)
    what = "rss_gib" if bench.quick else "allocated_gib"
    one, two = (max(v for k, v in out[key]["peaks"].items() if k.endswith(what)) for key in ("1 GPU", "2 GPUs"))
    out["two_over_one"] = round(two / one, 3)
    return out


def ahead(bench: Bench) -> dict[str, Any]:
    prompts, group, tokens = (4, 4, 8) if bench.quick else (64, 8, 256)
    ask: dict[str, Any] = {"n": group, "max_tokens": tokens, "min_tokens": tokens}
    count = 5
    with bench.run("ahead", 2) as run:
        train = {"zero_stage": 2, "micro_batch_tokens": 32768, "gradient_checkpointing": False, "max_lag": 1}
        learner = run.learner(bench.large(), **bench.ranks(False, **train))
        sampler = run.sampler(bench.large(), **bench.engines(False, **LARGE))
        tasks = rl.load_tasks("word_problems")

        def awaited() -> list[float]:
            return [r["total"] for r in timed(run, sampler, learner, tasks, run.committed + 1 + count, prompts, group, tokens)]

        def one_step_off() -> list[float]:
            pending = sampler.submit(tasks.batch(prompts), **ask)
            times, last = [], time.perf_counter()
            for step in run.steps(run.committed + 1 + count, progress=False):
                rollouts = pending.result()
                pending = sampler.submit(tasks.batch(prompts), **ask)
                scored = rl.score(rollouts, spread)
                stats = learner.update(rl.advantages(scored, "grpo"), tis_cap=2.0)
                sampler.sync(learner)
                run.log(step, scored, stats)
                times.append(time.perf_counter() - last)
                last = time.perf_counter()
            pending.cancel()
            lags.append(float(stats.policy_version - 1 - rollouts.policy_version))
            return times[1:]

        lags: list[float] = []
        found = {"awaited": awaited(), "one step ahead": one_step_off()}
        medians = {k: statistics.median(v) for k, v in found.items()}
        return {
            "shape": f"{prompts} prompts x {group} samples x {tokens} tokens",
            "seconds": {k: [round(s, 3) for s in v] for k, v in found.items()},
            "step_s": {k: round(v, 3) for k, v in medians.items()},
            "policy_lag": lags[0],
            "speedup": round(medians["awaited"] / medians["one step ahead"], 3),
            "placement": table(run),
        }


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "two_engines": two_engines,
    "tensor_parallel": tensor_parallel,
    "apart": apart,
    "losses": losses,
    "killed": killed,
    "scaling": scaling,
    "memory": memory,
    "ahead": ahead,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    kept = machine.RESULTS / "two_gpus.json"
    result: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() and not args.quick else {}
    result.pop("machine", None)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.quick)
        for name in args.only:
            begun = time.monotonic()
            try:
                result[name] = SECTIONS[name](bench)
            except Exception:  # noqa: BLE001  the other sections still say something; the exit status tells
                traceback.print_exc()
                failed.append(name)
                continue
            result[name]["date"] = machine.facts()["date"]
            print(name, json.dumps(result[name], indent=1), f"{time.monotonic() - begun:.0f} s", flush=True)
            if not args.quick:
                machine.save("two_gpus", result)
    print("failed:", ", ".join(failed) or "nothing")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
