"""Progress of a rollout, from the engines' own counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlkit import actors
from rlkit.errors import ActorDiedError
from rlkit.progress import Progress


class RolloutProgress:
    """Feeds a `Progress` of samples while a rollout is waited for.

    ``handles`` may change meanwhile. Engines may be asked for parts of the call under names that begin with ``call``.
    """

    EVERY_S = 0.5

    def __init__(self, handles: Sequence[Any], call: str, shown: Progress) -> None:
        self._handles, self._call, self._shown = handles, call, shown
        self._last = self._begun = time.monotonic()
        self._asked: dict[Any, Any] = {}  # reference -> engine
        self._done: dict[tuple[Any, str], dict[str, Any]] = {}  # (engine, call) -> what it last said

    def __call__(self, done: list[Any]) -> None:
        import ray

        now = time.monotonic()
        if now - self._last < self.EVERY_S:
            return
        if self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            if len(ready) < len(self._asked):
                return
            for ref, handle in self._asked.items():
                try:
                    report = actors.get(ref, "rollout progress")
                except ActorDiedError:  # its samples are lost: whoever waits for them deals with it
                    self._done = {at: said for at, said in self._done.items() if at[0] is not handle}
                    continue
                if report["call"] is not None and report["call"].startswith(self._call):
                    self._done[handle, report["call"]] = report
            self._show(now)
        self._asked = {h.progress.remote(): h for h in self._handles}
        self._last = now

    def _show(self, now: float) -> None:
        samples = sum(r["samples"] for r in self._done.values())
        tokens = sum(r["tokens"] for r in self._done.values())
        self._shown(min(samples, self._shown.total or 0), f"{tokens / max(now - self._begun, 1e-9):,.0f} tokens/s")

    def close(self, whole: bool) -> None:
        if whole:
            self._shown(self._shown.total)
        self._shown.close(whole)
