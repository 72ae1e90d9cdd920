"""A penalty on responses that come close to the limit, so that the policy learns to finish in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.errors import ConfigError
from rlkit.rewards.base import Reward, RewardOut
from rlkit.types import Prompt, Sample


class Length(Reward):
    """Soft overlong punishment, in tokens: 0 up to ``max_tokens - buffer``, then falling linearly to -1 at ``max_tokens`` and beyond.

    DAPO (Yu et al. 2025), equation 13, with L_max = ``max_tokens`` and L_cache = ``buffer``.

    Raises:
        ConfigError: ``buffer`` not from 1 to ``max_tokens``.
    """

    isolated = False

    def __init__(self, max_tokens: int, buffer: int, *, name: str = "length") -> None:
        if not 1 <= buffer <= max_tokens:
            raise ConfigError(f"Length(max_tokens={max_tokens!r}, buffer={buffer!r}): buffer must be from 1 to max_tokens.")
        self.max_tokens, self.buffer, self.name = int(max_tokens), int(buffer), name

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        lengths = np.array([len(s.tokens) for s in samples], dtype=np.float64)
        return RewardOut(np.clip((self.max_tokens - self.buffer - lengths) / self.buffer, -1.0, 0.0))

    def __repr__(self) -> str:
        return f"Length(max_tokens={self.max_tokens}, buffer={self.buffer})"
