"""Rollouts with local shards, for tests that need no cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.config import SampleSpec
from rlkit.types import Prompt, Rollouts, RolloutShard


def make_shard(texts: Sequence[Sequence[str]], answers: Sequence[str | None], first: int = 0) -> RolloutShard:
    """One token a character. ``texts`` is P lists of G responses; prompts are called p0, p1 ..."""
    prompts = tuple(Prompt(f"p{first + i}", ({"role": "user", "content": f"question {first + i}"},), a) for i, a in enumerate(answers))
    lengths = np.array([[len(t) for t in group] for group in texts], dtype=np.int32)
    flat = tuple(t for group in texts for t in group)
    tokens = np.array([ord(c) % 100 for t in flat for c in t], dtype=np.int32)
    return RolloutShard(
        prompts=prompts,
        prompt_tokens=tuple(np.arange(4, dtype=np.int32) for _ in prompts),
        tokens=tokens,
        lengths=lengths,
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        texts=flat,
        finish_reasons=("stop",) * len(flat),
    )


def make_rollouts(
    texts: Sequence[Sequence[str]], answers: Sequence[str | None], shards: int = 1, run: str | None = None, put=None
) -> Rollouts:
    """Rollouts of P x G responses in ``shards`` pieces, local or stored with ``put``."""
    cuts = np.array_split(np.arange(len(texts)), shards)
    made = [make_shard([texts[i] for i in cut], [answers[i] for i in cut], int(cut[0])) for cut in cuts]
    lengths = np.concatenate([s.lengths for s in made])
    return Rollouts(
        id="test",
        shards=tuple(put(s) if put else s for s in made),
        prompt_ids=tuple(f"p{i}" for i in range(len(texts))),
        shard_sizes=tuple(len(cut) for cut in cuts),
        prompt_lengths=np.full(len(texts), 4, dtype=np.int32),
        lengths=lengths,
        truncated=np.zeros(lengths.shape, dtype=bool),
        policy_version=0,
        sampling=SampleSpec(n=lengths.shape[1]),
        engine="hf",
        seconds=1.0,
        run=run,
    )
