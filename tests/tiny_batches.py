"""Batches with random responses for tests of the learner: no engine, no reward. Their log-probs are those of a plain transformers model."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit.config import SampleSpec
from rlkit.types import Batch, Prompt, Rollouts, RolloutShard, Scored


def plain_logprobs(model: Any, rows: list[list[int]], prompt_lens: list[int], temperature: float = 1.0) -> list[Any]:
    """One tensor of response log-probs a row, each row alone, no padding, from full logits. Differentiable."""
    import torch

    out = []
    for row, p in zip(rows, prompt_lens, strict=True):
        logp = torch.log_softmax(model(torch.tensor([row])).logits[0] / temperature, dim=-1)
        out.append(logp[p - 1 : len(row) - 1].gather(1, torch.tensor(row[p:])[:, None])[:, 0])
    return out


def rows_of(shards: list[RolloutShard]) -> tuple[list[list[int]], list[int]]:
    """Token lists of prompt + response of every sample, and prompt lengths."""
    rows, prompts = [], []
    for shard in shards:
        for i, sample in enumerate(shard.samples()):
            prompt = shard.prompt_tokens[i // shard.group_size].tolist()
            rows.append(prompt + sample.tokens.tolist())
            prompts.append(len(prompt))
    return rows, prompts


def make_shards(
    model: Any, prompts: int = 4, group: int = 4, seed: int = 0, shards: int = 2, longest: int = 12, temperature: float = 1.0
) -> list[RolloutShard]:
    """Random prompts of 3 to 8 tokens and responses of 1 to ``longest``, in shards, with ``model``'s log-probs."""
    import torch

    rng = np.random.default_rng(seed)
    out = []
    for part in np.array_split(np.arange(prompts), shards):
        prompt_tokens = tuple(rng.integers(5, 90, rng.integers(3, 9)).astype(np.int32) for _ in part)
        lengths = rng.integers(1, longest + 1, (len(part), group)).astype(np.int32)
        tokens = rng.integers(5, 90, int(lengths.sum())).astype(np.int32)
        bare = RolloutShard(
            tuple(Prompt(f"p{i}", ({"role": "user", "content": "?"},)) for i in part),
            prompt_tokens,
            tokens,
            lengths,
            np.zeros(len(tokens), np.float32),
            ("",) * lengths.size,
            ("stop",) * lengths.size,
        )
        with torch.no_grad():
            found = torch.cat(plain_logprobs(model, *rows_of([bare]), temperature)).numpy()
        out.append(RolloutShard(bare.prompts, prompt_tokens, tokens, lengths, found, bare.texts, bare.finish_reasons))
    return out


def make_batch(
    shards: list[RolloutShard],
    put: Any,
    version: int = 0,
    seed: int = 0,
    run: str | None = None,
    ref: list[Any] | None = None,
    **sampling: Any,
) -> Batch:
    """A `Batch` with random advantages over ``shards``; ``put`` stores them (``ray.put``)."""
    lengths = np.concatenate([s.lengths for s in shards])
    rollouts = Rollouts(
        id="r",
        shards=tuple(put(s) for s in shards),
        prompt_ids=tuple(p.id for s in shards for p in s.prompts),
        shard_sizes=tuple(len(s.prompts) for s in shards),
        prompt_lengths=np.array([len(t) for s in shards for t in s.prompt_tokens], np.int32),
        lengths=lengths,
        truncated=np.zeros(lengths.shape, bool),
        policy_version=version,
        sampling=SampleSpec.make({"n": lengths.shape[1], "max_tokens": 12} | sampling),
        engine="hf",
        seconds=1.0,
        run=run,
    )
    advantages = np.random.default_rng(seed).standard_normal(lengths.shape).astype(np.float32)
    scored = Scored(rollouts, advantages, {}, {}, {}, (), 0.0)
    refs = None if ref is None else tuple(put(np.asarray(r, np.float32)) for r in ref)
    return Batch(scored, advantages, np.ones(len(lengths), bool), "grpo", 0, refs)
