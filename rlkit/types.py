"""What flows through the loop: Prompt -> Rollouts -> Scored -> Batch -> UpdateStats.

Every value is frozen: a step returns a new value and never changes its input, so the same rollouts can be scored again or
weighted again without generating anything.

The heavy part of each value (tokens, log-probs, texts) stays in the cluster as *shards*, each a handle into Ray's object store that
holds whole groups. The driver holds only small arrays with one number a sample. ``fetch`` brings a shard here; a shard that is
already local (in unit tests, without Ray) passes through it unchanged.

Shapes: P prompts, G samples of each prompt (the group), N response tokens of all samples together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlkit.config import SampleSpec
from rlkit.errors import BatchError
from rlkit.reprs import Shown, html_table, number


@dataclass(frozen=True)
class Prompt(Shown):
    """One problem as it goes to the model.

    ``messages`` is a tuple of ``{"role": ..., "content": ...}``; ``template`` names the entry of `rlkit.templates` that turns them into
    text on the engine. ``answer`` is the gold answer as text, or ``None`` when a reward needs none.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    answer: str | None = None
    template: str = "auto"
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The option texts of a multiple choice, A first: ``meta["choices"]`` when it is a list of texts."""
        found = self.meta.get("choices")
        return tuple(found) if isinstance(found, list | tuple) and all(isinstance(text, str) for text in found) else None


@dataclass(frozen=True)
class Sample(Shown):
    """One response of a group, fetched to look at it or handed to a reward."""

    prompt: Prompt
    index: int  # which of the group's G samples
    text: str
    tokens: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32, nats, under the policy that sampled it, at its temperature
    finish_reason: str  # "stop" or "length"
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    verdict: str | None = None
    extracted: str | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class RolloutShard:
    """Whole groups of rollouts, in one object of the store. p prompts, G samples each, N response tokens in all."""

    prompts: tuple[Prompt, ...]  # p
    prompt_tokens: tuple[np.ndarray, ...]  # p x (T_prompt,) int32
    tokens: np.ndarray  # (N,) int32; samples one after the other, prompt-major: sample i is (i // G, i % G)
    lengths: np.ndarray  # (p, G) int32, response tokens of each sample (the end-of-sequence token counts when it was sampled)
    logprobs: np.ndarray  # (N,) float32, nats; NaN-free; zeros when log-probs were not asked for
    texts: tuple[str, ...]  # p * G, without special tokens
    finish_reasons: tuple[str, ...]  # p * G: "stop" | "length"

    @property
    def group_size(self) -> int:
        return int(self.lengths.shape[1])

    def offsets(self) -> np.ndarray:
        """(p*G + 1,) int64: sample i owns ``tokens[offsets[i]:offsets[i + 1]]``."""
        return np.concatenate([[0], np.cumsum(self.lengths.reshape(-1), dtype=np.int64)])

    def samples(self) -> Iterator[Sample]:
        """The shard's samples in order (prompt-major)."""
        offsets, group = self.offsets(), self.group_size
        for i, text in enumerate(self.texts):
            span = slice(offsets[i], offsets[i + 1])
            yield Sample(self.prompts[i // group], i % group, text, self.tokens[span], self.logprobs[span], self.finish_reasons[i])


@dataclass(frozen=True)
class ScoreShard:
    """What grading said about one `RolloutShard`, sample by sample (p * G entries each)."""

    rewards: np.ndarray  # (p, G) float32
    parts: Mapping[str, np.ndarray]  # name -> (p, G) float32, unweighted
    verdicts: tuple[str | None, ...]
    extracted: tuple[str | None, ...]


def fetch(ref: Any) -> Any:
    """The object behind a Ray reference; any other value passes through. Blocks until the object is here."""
    if not type(ref).__name__.endswith("ObjectRef"):  # ray.ObjectRef, and ClientObjectRef over ray://
        return ref
    import ray

    return ray.get(ref)


@dataclass(frozen=True)
class Rollouts(Shown):
    """P prompts x G samples, resting in the object store."""

    id: str
    shards: tuple[Any, ...]  # references to RolloutShard, whole groups each, in prompt order
    prompt_ids: tuple[str, ...]  # P, in order over all shards
    shard_sizes: tuple[int, ...]  # prompts in each shard; sums to P
    prompt_lengths: np.ndarray  # (P,) int32, tokens
    lengths: np.ndarray  # (P, G) int32, tokens
    truncated: np.ndarray  # (P, G) bool, finish reason "length"
    policy_version: int
    sampling: SampleSpec
    engine: str  # "vllm" | "hf"
    seconds: float
    dropped: tuple[tuple[str, int], ...] = ()  # (prompt id, its tokens): longer than the context leaves room for
    run: str | None = None
    step: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(P, G)."""
        return int(self.lengths.shape[0]), int(self.lengths.shape[1])

    @property
    def tokens_per_second(self) -> float:
        return float(self.lengths.sum()) / self.seconds if self.seconds > 0 else 0.0

    def samples(self, prompts: int | None = None) -> list[Sample]:
        """Fetch the samples of the first ``prompts`` prompts (all when None). Moves whole shards: look at a few."""
        return list(_samples(self.shards, self.shard_sizes, prompts))

    def __repr__(self) -> str:
        p, g = self.shape
        cut = f", {int(self.truncated.sum())} truncated" if self.truncated.any() else ""
        drop = f", {len(self.dropped)} prompts dropped as too long" if self.dropped else ""
        return (
            f"Rollouts({p} prompts x {g}, {int(self.lengths.sum())} tokens{cut}{drop}, {number(self.tokens_per_second)} tokens/s, "
            f"{self.engine}, policy version {self.policy_version})"
        )


@dataclass(frozen=True)
class Scored:
    """Rollouts with a reward a sample."""

    rollouts: Rollouts
    rewards: np.ndarray  # (P, G) float32
    parts: Mapping[str, np.ndarray]  # name -> (P, G) float32, before weighting
    weights: Mapping[str, float]
    verdicts: Mapping[str, np.ndarray]  # verdict -> (P, G) bool; empty when no reward grades answers
    shards: tuple[Any, ...]  # references to ScoreShard, one a rollout shard
    seconds: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.rollouts.shape

    @property
    def accuracy(self) -> float | None:
        """Share of samples graded correct, or None when no reward grades answers."""
        return float(self.verdicts["correct"].mean()) if "correct" in self.verdicts else None

    def samples(self, prompts: int | None = None) -> list[Sample]:
        """Fetch samples with their rewards, parts, verdicts and extracted answers."""
        plain = _samples(self.rollouts.shards, self.rollouts.shard_sizes, prompts)
        group = self.shape[1]
        out: list[Sample] = []
        details = _score_rows(self.shards, self.rollouts.shard_sizes, prompts, group)
        for i, (sample, (verdict, extracted)) in enumerate(zip(plain, details, strict=True)):
            at = (i // group, i % group)
            parts = {name: float(values[at]) for name, values in self.parts.items()}
            reward = float(self.rewards[at])
            out.append(dataclasses.replace(sample, reward=reward, parts=parts, verdict=verdict, extracted=extracted))
        return out

    def summary(self) -> dict[str, float]:
        """Scalars for the event log. Names are ``group/name``; lengths in tokens."""
        lengths, cut = self.rollouts.lengths, self.rollouts.truncated
        out = {
            "reward/mean": float(self.rewards.mean()),
            "reward/std": float(self.rewards.std()),
            "reward/no_spread_groups": float((np.ptp(self.rewards, axis=1) == 0).mean()),
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated": float(cut.mean()),
        }
        out |= {f"reward/{name}": float(values.mean()) for name, values in self.parts.items()}
        out |= {f"verdict/{name}": float(hits.mean()) for name, hits in self.verdicts.items()}
        return out

    def __repr__(self) -> str:
        p, g = self.shape
        acc = "" if self.accuracy is None else f", {self.accuracy:.1%} correct"
        return f"Scored({p} prompts x {g}, reward {self.rewards.mean():.3f} ± {self.rewards.std():.3f}{acc})"

    def _repr_html_(self) -> str:
        return samples_table(self.samples(prompts=2)) + f"<p>{self!r}</p>"


@dataclass(frozen=True)
class Batch(Shown):
    """Scored rollouts with an advantage a sample: what the learner takes."""

    scored: Scored
    advantages: np.ndarray  # (P, G) float32; every token of a sample carries its sample's advantage
    keep: np.ndarray  # (P,) bool; groups left out of the update are False
    estimator: str
    no_spread_groups: int  # groups whose G rewards are all equal, kept or not
    ref_logprobs: tuple[Any, ...] | None = None  # references to (N,) float32, one a rollout shard, nats
    ref_version: str | None = None  # which frozen model they came from

    @property
    def policy_version(self) -> int:
        return self.scored.rollouts.policy_version

    @property
    def n_samples(self) -> int:
        return int(self.keep.sum()) * self.advantages.shape[1]

    def summary(self) -> dict[str, float]:
        kept = self.advantages[self.keep]
        return {
            "advantage/mean": float(kept.mean()) if kept.size else 0.0,
            "advantage/std": float(kept.std()) if kept.size else 0.0,
            "advantage/no_spread_groups": float(self.no_spread_groups),
            "advantage/dropped_groups": float((~self.keep).sum()),
        }

    def __repr__(self) -> str:
        p, g = self.advantages.shape
        return (
            f"Batch({int(self.keep.sum())} of {p} prompts x {g}, {self.estimator}, {self.no_spread_groups} groups without spread, "
            f"policy version {self.policy_version}{', with reference log-probs' if self.ref_logprobs is not None else ''})"
        )


@dataclass(frozen=True)
class UpdateStats(Shown):
    """What one `Learner.update` did. ``metrics`` holds the scalars for the event log (names ``group/name``)."""

    policy_version: int  # after the update
    metrics: Mapping[str, float]
    seconds: float

    def __getitem__(self, name: str) -> float:
        """``stats["policy/kl"]``; a bare name is looked up under ``policy/``."""
        return self.metrics[name if "/" in name else f"policy/{name}"]

    def __repr__(self) -> str:
        shown = ("loss", "logprob_gap", "entropy", "clip_fraction", "kl", "grad_norm")
        parts = [f"{k} {number(self.metrics['policy/' + k])}" for k in shown if f"policy/{k}" in self.metrics]
        return f"UpdateStats(policy version {self.policy_version}, {', '.join(parts)}, {self.seconds:.2f} s)"


def require(value: Any, kind: type, verb: str, made_by: str) -> None:
    """Refuse a value of the wrong stage of the loop.

    Raises:
        BatchError: ``value`` is not a ``kind``; the message names the call that makes one.
    """
    if not isinstance(value, kind):
        raise BatchError(f"{verb} takes {kind.__name__}, which {made_by} returns; it was given {type(value).__name__}.")


def samples_table(samples: Sequence[Sample], width: int = 160) -> str:
    """An HTML table of samples, texts cut to ``width`` characters for display."""
    rows = []
    for s in samples:
        text = s.text if len(s.text) <= width else s.text[: width - 1] + "…"
        reward = "" if s.reward is None else f"{s.reward:+.2f}"
        rows.append((s.prompt.id, s.prompt.question[:80], text, len(s.tokens), s.finish_reason, s.verdict or "", reward))
    return html_table(("prompt", "question", "response", "tokens", "finish", "verdict", "reward"), rows)


def _samples(shards: Sequence[Any], sizes: Sequence[int], prompts: int | None) -> Iterator[Sample]:
    left = sum(sizes) if prompts is None else min(prompts, sum(sizes))
    for ref, size in zip(shards, sizes, strict=True):
        if left <= 0:
            return
        shard: RolloutShard = fetch(ref)
        take = min(left, size) * shard.group_size
        for i, sample in enumerate(shard.samples()):
            if i == take:
                break
            yield sample
        left -= size


def _score_rows(shards: Sequence[Any], sizes: Sequence[int], prompts: int | None, group: int) -> Iterator[tuple[str | None, str | None]]:
    left = sum(sizes) if prompts is None else min(prompts, sum(sizes))
    for ref, size in zip(shards, sizes, strict=True):
        if left <= 0:
            return
        shard: ScoreShard = fetch(ref)
        take = min(left, size) * group
        yield from zip(shard.verdicts[:take], shard.extracted[:take], strict=True)
        left -= size
