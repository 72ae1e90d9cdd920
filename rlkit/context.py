"""Who a sampler, a learner or a grader works for.

`rlkit.run.Run` is the owner in a notebook: it logs phases, holds the lease that keeps a second kernel out, and derives seeds.
`Owner` alone, with no run behind it, serves tests and short scripts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlkit.actors import namespace
from rlkit.background import say
from rlkit.turns import Turns

if TYPE_CHECKING:
    from rlkit.progress import Progress
    from rlkit.seats import Seat


class Stateful(Protocol):
    """Something whose position a resumed run restores, such as the order of a task set."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Owner:
    """A name, a namespace, a seed, and hooks around each phase of the loop."""

    def __init__(self, name: str, seed: int = 0, cluster: Any = None) -> None:
        self.name = name
        self.namespace = namespace(name)
        self.seed = seed
        self.cluster = cluster
        self.step: int | None = None  # the step of `Run.steps` that is being worked on
        self._calls = itertools.count()
        self._within = ""
        self._took: dict[str, float] = {}  # seconds that the last phase of a name took
        self.shown: Progress | None = None  # the loop's, on whose line its phases are shown
        self.quiet = False  # the loop over the steps shows nothing
        self.turns = Turns(self)
        register(self)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Phases in this block are logged as ``name/rollout`` and so on: an evaluation's rollouts are not the training step's."""
        before, self._within = self._within, f"{self._within}{name}/"
        try:
            yield
        finally:
            self._within = before

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Around ``"rollout"``, ``"reward"``, ``"reference"``, ``"update"``, ``"sync"`` or ``"checkpoint"``.

        Yields a dict for the phase's numbers; ``seconds`` is added at the end. `Run` checks its lease first and logs the phase after.
        """
        facts: dict[str, Any] = {}
        start = time.monotonic()
        try:
            yield facts
        finally:
            self._took[name] = facts["seconds"] = time.monotonic() - start

    def progress(self, phase: str, total: int | None = None, unit: str = "", show: bool = True) -> Progress:
        """Progress of a phase; the time left is guessed from the last one like it until something can be counted."""
        from rlkit.progress import Progress

        return Progress(phase, total, unit, show=show and not self.quiet, usual_s=self._took.get(f"{self._within}{phase}"), owner=self)

    def report(self, progress: dict[str, Any]) -> None:
        """How far the phase in progress is. `Run` tells its recorder, for whoever watches."""

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Say ``text`` to the reader. `Run` keeps it in the event log too, with ``facts``."""
        say(text)

    def check(self) -> None:
        """Refuse a change by a kernel that does not drive the run (any more). `Run` looks at its lease; a plain owner has none."""

    def seat(self, name: str) -> Seat | None:
        """Where the actor of that name has to sit; None leaves it to Ray."""
        return None

    def part(self, name: str) -> Any | None:
        """The owner's ``"learner"`` or other part, when it has one in this process."""
        return None

    def register_stateful(self, key: str, thing: Stateful) -> None:
        """Called by whatever has a position that a resume must restore. `Run` saves and restores it; a plain owner has no history."""

    def call_seed(self) -> int:
        """The next sampling seed: a function of the owner's seed, the step and how many were asked for before.

        `Run` counts from the start of each step, so that a step that is done again draws the same; a plain owner counts all.
        """
        return derive_seed(self.seed, -1 if self.step is None else self.step, next(self._calls))


def derive_seed(*parts: int) -> int:
    """A 31-bit seed from integers, well mixed and stable over versions and machines."""
    # With their number in front: SeedSequence pads with zeros, so that [1] and [1, 0] would give the same.
    return int(np.random.SeedSequence([len(parts), *(p % 2**32 for p in parts)]).generate_state(1)[0] >> 1)


_owners: dict[str, Owner] = {}


def register(owner: Owner) -> None:
    """Make ``owner`` the one that values carrying its name belong to; the latest of a name wins."""
    _owners.pop(owner.name, None)
    _owners[owner.name] = owner


def owner_of(name: str | None) -> Owner | None:
    """The owner in this process of values that carry ``name``, or None."""
    return None if name is None else _owners.get(name)


def active_owner() -> Owner | None:
    """The owner whose step is being worked on in this process, or None between steps. Of several, the one made last."""
    return next((o for o in reversed(_owners.values()) if o.step is not None), None)
