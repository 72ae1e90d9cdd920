"""Sampling one token a row from logits, for the transformers engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit.config import SampleSpec

if TYPE_CHECKING:
    import torch


def pick(logits: torch.Tensor, sampling: SampleSpec, generators: list[torch.Generator]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row; returns tokens (rows,) int64 and their log-probs (rows,) float32.

    ``logits`` is (rows, V) float32. A token is the argmax of probability over an exponential variable, which is a draw from the
    distribution (the Gumbel-max trick, Maddison et al. 2014, in its exponential form); each row draws from its own generator.
    """
    import torch

    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logits = keep_top(logits / sampling.temperature, sampling.top_k, sampling.top_p)
        logprobs = logits.log_softmax(-1)
        noise = torch.empty_like(logits)
        for row, generator in zip(noise, generators, strict=True):
            row.exponential_(generator=generator)
        tokens = (logits.softmax(-1) / noise).argmax(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def keep_top(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with all but the ``top_k`` largest, then all outside the smallest set of mass ``top_p``, at -inf. 0 and 1.0 keep all."""
    import torch

    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # the mass of all larger tokens
        outside = before >= top_p
        outside[:, 0] = False
        logits = logits.masked_fill(outside.scatter(1, index, outside), -torch.inf)
    return logits
