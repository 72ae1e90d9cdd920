"""A text bar over a rollout, fed by the engines' own counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlkit import actors


class Progress:
    """A text bar over the samples of a rollout, for those that take longer than half a second."""

    EVERY_S = 0.5

    def __init__(self, handles: Sequence[Any], call: str, total: int) -> None:
        self._handles, self._call, self._total = handles, call, total
        self._last = self._begun = time.monotonic()
        self._asked: list[Any] = []
        self._done: dict[int, dict[str, Any]] = {}
        self._bar: Any = None

    def __call__(self, done: list[Any]) -> None:
        import ray

        now = time.monotonic()
        if now - self._last < self.EVERY_S:
            return
        if self._asked:
            ready, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
            if len(ready) < len(self._asked):
                return
            self._show([actors.get(r, "rollout progress") for r in self._asked], now)
        self._asked = [h.progress.remote() for h in self._handles]
        self._last = now

    def _show(self, reports: list[dict[str, Any]], now: float) -> None:
        from tqdm import tqdm

        for i, report in enumerate(reports):
            if report["call"] == self._call:
                self._done[i] = report
        samples = sum(r["samples"] for r in self._done.values())
        tokens = sum(r["tokens"] for r in self._done.values())
        if self._bar is None:
            self._bar = tqdm(total=self._total, desc="rollout", unit="sample", leave=False)
            self._bar.start_t -= now - self._begun
        self._bar.n = min(samples, self._total)
        self._bar.set_postfix_str(f"{tokens / max(now - self._begun, 1e-9):,.0f} tokens/s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
