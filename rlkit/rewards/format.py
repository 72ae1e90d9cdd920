"""Rewards for the form of a response, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rlkit.errors import ConfigError, nearest
from rlkit.rewards.base import Reward, RewardOut
from rlkit.rewards.extract import boxed
from rlkit.types import Prompt, Sample


def _think(text: str) -> bool:
    """``<think>...</think>`` and then ``<answer>...</answer>``, each once and nothing around them.

    DeepSeek-R1 (Guo et al. 2025), section 2.2.2, format rewards. The opening ``<think>`` may stand at the end of the prompt instead, as in
    the R1 template.
    """
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")) or text.count("<think>") > 1:
        return False
    body = text.strip()
    if "<think>" in body and not body.startswith("<think>"):
        return False
    thought, answer = body.removeprefix("<think>").split("</think>")
    answer = answer.strip()
    return bool(thought.strip()) and answer.startswith("<answer>") and answer.endswith("</answer>") and bool(answer[8:-9].strip())


STYLES = {"think": _think, "boxed": lambda text: boxed(text) is not None}


class Format(Reward):
    """``present`` when the whole response has the form, else ``absent``.

    Either a ``style`` ("think": thoughts, then the answer, in tags; "boxed": a ``\\boxed{}`` anywhere) or a ``pattern``, a regular
    expression that is searched for (``.`` matches newlines; use ``^`` and ``$`` to hold the ends). A pattern runs in a worker process,
    since it may take forever.

    Raises:
        ConfigError: both or neither of them, an unknown style, a pattern that does not compile.
    """

    def __init__(
        self, pattern: str | None = None, *, style: str | None = None, present: float = 1.0, absent: float = 0.0, name: str = "format"
    ) -> None:
        if pattern is not None and style is not None:
            raise ConfigError("Format takes a pattern or a style, not both.")
        style = "think" if pattern is None and style is None else style
        if style is not None and style not in STYLES:
            raise ConfigError(f"Format has no style {style!r}{nearest(style, STYLES) or '.'} Known: {', '.join(STYLES)}.")
        try:
            self.regex = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"Format pattern {pattern!r} is not a regular expression: {error}.") from None
        self.style, self.name = style, name
        self.present, self.absent = float(present), float(absent)
        self.isolated = self.each = pattern is not None

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardOut:
        hits = [self._fits(s.text) for s in samples]
        return RewardOut(np.where(np.array(hits, dtype=bool), self.present, self.absent))

    def _fits(self, text: str) -> bool:
        if self.regex is not None:
            return self.regex.search(text) is not None
        return STYLES[self.style or "think"](text)

    def __repr__(self) -> str:
        return f"Format({self.regex.pattern!r})" if self.regex is not None else f"Format(style={self.style!r})"
