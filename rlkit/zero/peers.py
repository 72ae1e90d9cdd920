"""How ranks agree: on small numbers, and on errors, so that all of them go on or all of them stop."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from rlkit.errors import LearnerError, OutOfMemoryError, RlkitError


class Peers:
    """The ranks, talking over gloo about control (on GPUs too, beside NCCL). Every method is collective."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo") if self.world > 1 and dist.get_backend() != "gloo" else None

    def share(self, values: Sequence[float]) -> np.ndarray:
        """(world, k) float64: the k numbers of every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.world == 1:
            return mine[None].numpy()
        out = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(out, mine, group=self._group)
        return torch.stack(out).numpy()

    def agree(self, guard: Guard, undo: Callable[[], None] | None = None) -> None:
        """Go on only when no rank holds an error; otherwise run ``undo`` and raise the first rank's error on all of them.

        Raises:
            RlkitError: the error of the lowest rank that has one.
        """
        if not self.share([float(guard.error is not None)]).any():
            return
        self.fail(guard, undo)

    def fail(self, guard: Guard, undo: Callable[[], None] | None = None) -> None:
        """As `agree`, when all ranks know already that one of them has an error."""
        held: list[RlkitError | None] = [guard.as_rlkit(self.rank)]
        if self.world > 1:
            held = [None] * self.world
            dist.all_gather_object(held, guard.as_rlkit(self.rank), group=self._group)
        if undo is not None:
            undo()
        first = next(e for e in held if e is not None)
        raise first from guard.error


class Guard:
    """Holds the first error of its blocks until `Peers.agree`: a rank that raised alone would leave the others waiting in a collective.

    ``what`` names the work in the message; errors of rlkit keep their type, others become `LearnerError` with the end of their traceback.
    """

    def __init__(self, what: str, kind: type[RlkitError] = LearnerError) -> None:
        self.what, self.kind = what, kind
        self.error: BaseException | None = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if isinstance(error, torch.OutOfMemoryError) and dist.get_world_size() == 1:
            return False  # nobody waits for this rank, and the caller can say what was full
        self.error = self.error or error
        return True

    def as_rlkit(self, rank: int) -> RlkitError | None:
        if self.error is None or isinstance(self.error, RlkitError):
            return self.error
        trace = "".join(traceback.format_exception(self.error)[-4:]).rstrip()
        kind = OutOfMemoryError if isinstance(self.error, torch.OutOfMemoryError) else self.kind
        return kind(f"{self.what} failed on rank {rank}: {type(self.error).__name__}: {self.error}\n{trace}")


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's time to ``seconds[name]``."""
    import time

    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
