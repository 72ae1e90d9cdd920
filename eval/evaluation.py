"""`evaluate`: a model or a live sampler, on one set or several, with everything that the numbers depend on written down."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit import templates
from rlkit.config import EngineSpec, as_plain
from rlkit.context import derive_seed
from rlkit.errors import ConfigError, DataError, TooLongError, nearest
from rlkit.eval import catalog
from rlkit.eval.metrics import METRICS, Metric, check_metric, gold_answers, grade_responses
from rlkit.eval.result import Evaluation, Evaluations, load, summarize
from rlkit.eval.sources import Live, Saved, Source
from rlkit.eval.spec import EvalSpec, cache_key, code_of
from rlkit.eval.store import SUMMARY, Store, add_spent, folder_name, nothing_spent
from rlkit.tasks import Tasks, load_tasks
from rlkit.types import Prompt

if TYPE_CHECKING:
    from rlkit.sampler import Sampler

FIRST_CHUNK = 64  # samples; then as many as take about CHUNK_S
CHUNK_S = 20.0
LARGEST_CHUNK = 8192
OUTPUT = "runs/eval"


def evaluate(
    model: Sampler | str | Path,
    data: str | Tasks | Sequence[str | Tasks],
    split: str = "test",
    *,
    data_dir: str | Path | None = None,
    output: str | Path | None = None,
    resume: bool = True,
    metric: Metric | None = None,
    cluster: Any = None,
    progress: bool | None = None,
    **settings: Any,
) -> Any:
    """Sample answers to every problem of a set, grade them, and report with everything that the numbers depend on.

    Args:
        model: a live sampler (its current weights; sync first if they should be the learner's), or a model's name, folder or hub id.
        data: a set by name ("gsm8k"), names with commas, "all" for every public set that is found, a path, a `Tasks`, or a list of these.
        split: of sets given by name.
        data_dir: where ``<name>/<split>.jsonl`` is looked for first.
        output: folder for samples, summaries and reports, one subfolder a set and configuration. A stopped evaluation of a saved model
            goes on there. None: ``runs/eval`` for a saved model; nothing is written for a live sampler.
        resume: False samples anew.
        metric: decides instead of the grader; see `rlkit.eval.register_metric` for one that goes with a set.
        cluster: for a saved model: what `rlkit.connect` returned or takes. None: the cluster that this kernel is connected to, else one on
            this machine, which is ended afterwards.
        progress: False shows none. Else how far it is, with the time left, once that takes longer than a second.
        **settings: fields of `EvalSpec` (n, temperature, max_tokens, template, shots, limit, seed ...); for a saved model also those of
            `rlkit.EngineSpec` (engine, dtype, max_model_len, tensor_parallel_size ...).

    Returns:
        An `Evaluation` for one set, `Evaluations` for several.

    Raises:
        ConfigError: an unknown setting. DataError: a set that is not there. ModelError: a model that cannot be loaded.
        RewardError: a problem without an answer, or a metric that failed.
    """
    spec, engine = _settings(settings)
    if output is not None and not str(output).strip():
        raise ConfigError("output is empty; name a folder.")
    if metric is not None:
        check_metric(metric)
    sets = [_dataset(d, split, data_dir, spec) for d in _names(data, split, data_dir)]
    metrics = [metric or METRICS.get(s.name) for s in sets]
    for s, decides in zip(sets, metrics, strict=True):
        if decides is None:
            gold_answers(s.prompts)  # refuses one without an answer now, not after hours of sampling
    show = progress is not False
    single = isinstance(data, Tasks) or (isinstance(data, str) and len(sets) == 1 and data.strip() != "all")
    if hasattr(model, "generate"):
        if engine:
            raise ConfigError(f"{', '.join(engine)}: settings of a sampler's engines cannot be changed here; the sampler has its own.")
        source: Source = Live(model)
    else:
        source = Saved(model, engine, cluster)
        output = OUTPUT if output is None else output
    with source:
        found = [_one(source, s, spec, output, resume, decides, show) for s, decides in zip(sets, metrics, strict=True)]
    return found[0] if single else Evaluations(found)


# --- data --------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Set:
    """The problems of one set as they go to the model, and a hash of all that."""

    name: str
    split: str
    prompts: list[Prompt]
    fingerprint: str


def _names(data: Any, split: str, data_dir: Any) -> list[str | Tasks]:
    if isinstance(data, Tasks):
        return [data]
    if isinstance(data, str | Path):
        text = str(data)
        if "/" in text or Path(text).suffix:  # a path, or an id on the hub
            return [text]
        return list(catalog.resolve(text, split=split, data_dir=data_dir))
    if not isinstance(data, list | tuple):
        raise DataError(f"evaluate() takes a set's name, a path, a Tasks, or a list of these; it was given {type(data).__name__}.")
    items = list(data)
    if not items:
        raise DataError("evaluate() was given no data set.")
    return [name for item in items for name in _names(item, split, data_dir)]


def _dataset(data: str | Tasks, split: str, data_dir: Any, spec: EvalSpec) -> _Set:
    tasks = data if isinstance(data, Tasks) else load_tasks(data, split=split, data_dir=data_dir, template=spec.template)
    style = tasks.template if isinstance(data, Tasks) and spec.template == "auto" else spec.template
    prompts = [dataclasses.replace(p, template=style) for p in tasks.take(min(spec.limit or len(tasks), len(tasks)))]
    if spec.shots:
        if isinstance(data, Tasks):
            raise ConfigError(f"shots={spec.shots} needs a set by name, whose train split has the examples; put them into your prompts.")
        messages = _examples(data, spec, data_dir, style)
        prompts = [dataclasses.replace(p, messages=(*messages, *p.messages)) for p in prompts]
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(repr((p.id, [dict(m) for m in p.messages], p.answer, p.template, p.meta.get("choices"))).encode())
    return _Set(tasks.name, tasks.split, prompts, digest.hexdigest()[:16])


def _examples(name: str, spec: EvalSpec, data_dir: Any, style: str) -> list[dict[str, str]]:
    """``shots`` solved examples as turns of the dialogue, drawn by the seed from the train split, which no problem of a test is in."""
    try:
        train = load_tasks(name, split="train", data_dir=data_dir, solutions=True)
    except DataError as error:
        raise DataError(f"shots={spec.shots} takes its examples from the train split of {name!r}: {error}") from error
    if spec.shots > len(train):
        raise DataError(f"shots={spec.shots}: the train split of {name!r} has {len(train)} rows.")
    out = []
    for i in np.random.default_rng(derive_seed(spec.seed, spec.shots)).permutation(len(train))[: spec.shots]:
        example = train[int(i)]
        solution = str(example.meta.get("solution") or "").strip()
        if style == "r1":
            text = f"<think> {solution} </think> <answer> {example.answer} </answer>"
        else:
            told = solution.rpartition("####")[0].rstrip() if "####" in solution else solution
            text = told if "\\boxed" in told else f"{told}\nThe final answer is \\boxed{{{example.answer}}}.".strip()
        out += [{"role": "user", "content": example.question}, {"role": "assistant", "content": text}]
    return out


# --- one set -----------------------------------------------------------------------------------------------------------------------------


def _one(source: Source, data: _Set, spec: EvalSpec, output: Any, resume: bool, metric: Metric | None, show: bool) -> Evaluation:
    rules = spec.rules or templates.rules(data.prompts[0].template)
    config = {
        "dataset": data.name,
        "split": data.split,
        "problems": len(data.prompts),
        "data": data.fingerprint,
        "rules": list(rules),
        "metric": None if metric is None else getattr(metric, "__name__", repr(metric)),
        **source.facts,
    }
    key = cache_key(spec, **config, code=None if metric is None else code_of(metric))
    config = {"spec": as_plain(spec), **config}
    grading = {"metric": metric, "timeout_s": spec.timeout_s, "rel_tol": spec.rel_tol}
    store: Store | None = None
    if output is not None:
        folder = Path(output).expanduser() / folder_name(source.name) / f"{folder_name(data.name)}-{folder_name(data.split)}-{key}"
        if resume and (folder / SUMMARY).is_file() and (finished := load(folder)).key == key:
            return finished
        store = Store(folder, key, config, spec.n)
    spent = store.spent if store is not None else nothing_spent()
    with store.open(resume) if store is not None else contextlib.nullcontext({}) as done:
        missing = [i for i, p in enumerate(data.prompts) if p.id not in done]
        for rows, rollout_s, grading_s in _chunks(source, data, missing, spec, rules, grading, show):
            for row in rows:
                done.setdefault(row["id"], []).append(row)
            if store is not None:
                store.append(rows, rollout_s, grading_s)
            else:
                add_spent(spent, rows, rollout_s, grading_s)
        result = summarize(
            tuple(row for p in data.prompts for row in done[p.id]),
            dataset=data.name,
            split=data.split,
            model=source.name,
            n=spec.n,
            key=key,
            config=config,
            spent=spent,
            policy_version=source.policy_version,
            folder=None if store is None else store.folder,
        )
        if store is not None:
            store.finish(result.summary(), result.report())
    return result


def _chunks(
    source: Source, data: _Set, missing: Sequence[int], spec: EvalSpec, rules: Sequence[str], grading: dict[str, Any], show: bool
) -> Iterator[tuple[list[dict[str, Any]], float, float]]:
    """(rows of some problems, seconds sampling, seconds grading), in parts that take about `CHUNK_S`.

    A problem's samples have seeds that depend on its place in the set alone, so the parts change nothing.
    """
    from rlkit.progress import Progress

    total = len(data.prompts) * spec.n
    there = total - len(missing) * spec.n
    size, at = max(1, FIRST_CHUNK // spec.n), 0
    shown: Progress | None = None
    try:
        while at < len(missing):
            part = list(missing[at : at + size])
            at += len(part)
            sampler = source.sampler  # started now, when it has not been
            if shown is None:
                owner = sampler.owner
                shown = Progress(data.name, total, "sample", show=show and not owner.quiet, done=there, owner=owner)
            start = time.monotonic()
            answers = _sample(sampler, data, part, spec)
            sampled = time.monotonic()
            verdicts = grade_responses([a["response"] for a in answers], [data.prompts[a.pop("place")] for a in answers], rules, **grading)
            rows = [a | {"verdict": v.verdict, "extracted": v.extracted, "rule": v.rule} for a, v in zip(answers, verdicts, strict=True)]
            yield rows, sampled - start, time.monotonic() - sampled
            there += len(rows)
            shown(there)
            took = max(1e-3, time.monotonic() - start)
            size = int(min(size * 4, max(1, size * CHUNK_S / took), max(1, LARGEST_CHUNK // spec.n)))
    finally:
        if shown is not None:
            shown.close(whole=there == total)


def _sample(sampler: Any, data: _Set, part: Sequence[int], spec: EvalSpec) -> list[dict[str, Any]]:
    """n answers to each problem of ``part``, in order; one that is too long for the context has empty ones."""
    answers: dict[str, list[Any]] = {}
    owner = sampler.owner
    for start, stop in _runs(part):
        prompts = data.prompts[start:stop]
        try:
            with owner.within("eval"):
                rollouts = sampler.generate(prompts, first=start, progress=False, **spec.sampling)
        except TooLongError:
            continue
        for sample in rollouts.samples():
            answers.setdefault(sample.prompt.id, []).append(sample)
    rows = []
    for i in part:
        prompt = data.prompts[i]
        for k in range(spec.n):
            sample = answers[prompt.id][k] if prompt.id in answers else None
            rows.append(
                {
                    "place": i,
                    "id": prompt.id,
                    "sample": k,
                    "question": prompt.question,
                    "answer": prompt.answer,
                    "response": "" if sample is None else sample.text,
                    "tokens": 0 if sample is None else len(sample.tokens),
                    "finish": "too_long" if sample is None else sample.finish_reason,
                }
            )
    return rows


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[3, 4, 5, 9] -> (3, 6), (9, 10)."""
    start = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield places[start], places[i - 1] + 1
            start = i


# --- settings ----------------------------------------------------------------------------------------------------------------------------


def _settings(given: dict[str, Any]) -> tuple[EvalSpec, dict[str, Any]]:
    """Apart: what is the evaluation's and what the engine's. A name that both have (seed) is the evaluation's."""
    ours = [f.name for f in dataclasses.fields(EvalSpec)]
    theirs = [f.name for f in dataclasses.fields(EngineSpec)]
    for name in given:
        if name not in ours and name not in theirs:
            raise ConfigError(
                f"evaluate() has no setting {name!r}{nearest(name, [*ours, *theirs]) or '.'} Of the evaluation: {', '.join(ours)}. "
                f"Of the engines: {', '.join(theirs)}."
            )
    return EvalSpec.make({k: v for k, v in given.items() if k in ours}), {k: v for k, v in given.items() if k not in ours}
