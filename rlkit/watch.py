"""What a view reads of a run: the same from a live run in any kernel, and from the folder of one that has ended.

    source = rlkit.watch.source(run)      # or source("quickstart"), source("runs/quickstart"), source(cluster)
    changes = source.poll()               # what is new; never raises for a cluster that went away

A source holds no actor, no thread and no lease. It remembers how far it has read the event log and the monitor's file; both are read in
whole lines, so that a line which is being written, or was cut off by a crash, is left for later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import ActorDiedError, DeadlineError, RunError
from rlkit.eventlog import EVENTS_FILE, SAMPLE_COLUMNS, History, samples_file
from rlkit.feeds import ClusterFeed, Feed, FileFeed, LiveFeed
from rlkit.progress import facts_of
from rlkit.reprs import Shown, duration
from rlkit.tokentexts import TOKENIZER_FILE, TokenTexts

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Changes", "History", "RunState", "Source", "source"]

WAITS_FOR = {  # what a phase waits for, in words
    "rollout": "the engines to sample",
    "reward": "the graders",
    "reference": "the reference's log-probs",
    "update": "the learner's ranks",
    "sync": "the engines to take the weights",
    "checkpoint": "the checkpoint to be written",
}


@dataclass(frozen=True)
class RunState(Shown):
    """Where a run is. Times are seconds since the epoch, by the clock of the node that has the run's recorder."""

    name: str = ""
    phase: str | None = None  # the innermost that is in progress: "rollout", "update", "eval/rollout" ...; None between phases
    phase_since: float | None = None
    phases: tuple[str, ...] = ()  # those that are in progress, outermost first
    step: int | None = None  # the step that is being worked on
    total: int | None = None  # steps that the loop was asked for
    committed: int = -1  # the last complete step
    waiting_for: str = ""  # in words; empty when nothing is waited for
    progress: Mapping[str, Any] | None = None  # of the phase: {"done", "total", "unit", "left_s" (seconds or None)}
    control: str = "run"  # "run" | "pausing" | "paused" | "stopping" | "stopped" | "unknown" (read from a folder alone)
    looping: bool = False  # a loop is running that controls act on
    checkpoint_asked: bool = False  # one will be written at the next step boundary
    driver: str | None = None  # the process that drives the run
    live: bool = False  # its recorder answers
    now: float = 0.0  # when this was so, by that clock


@dataclass(frozen=True)
class Changes(Shown):
    """What `Source.poll` found."""

    events: list[dict[str, Any]] = field(default_factory=list)  # as in `rlkit.eventlog`, in log order
    monitor: list[dict[str, Any]] = field(default_factory=list)  # as in `rlkit.monitor`
    stale: float | None = None  # None: read now, or ended and read to its end; else seconds since a live run could last be read
    state: RunState = field(default_factory=RunState)
    restarted: bool = False  # the run was started afresh under this name: everything from before belongs to another one

    def __repr__(self) -> str:
        age = "" if self.stale is None else f", stale for {duration(self.stale)}"
        return f"Changes({len(self.events)} events, {len(self.monitor)} monitor samples{age}, {self.state})"

    def __bool__(self) -> bool:
        return bool(self.events or self.monitor or self.restarted)


class Source(Shown):
    """A place in a run's log. Made by `source`; safe to use from several threads, each poll's news go to one of them."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lock = threading.Lock()
        self._state = RunState(feed.name)
        self._ended = False  # the last event says that the run was closed
        self._closed = False

    @property
    def name(self) -> str:
        return self._feed.name

    @property
    def folder(self) -> Path | None:
        """The run's folder, which may lie on another machine; None for a cluster."""
        return self._feed.folder

    def poll(self) -> Changes:
        """What is new since the last poll. Waits a fifth of a second at most, and not at all for a cluster that does not answer."""
        with self._lock:
            if self._closed:
                return Changes(state=self._state)
            read = self._feed.read()
            committed = self._state.committed
            for event in read.events:
                self._ended = event["kind"] == "close"
                if event["kind"] == "step":
                    committed = event["step"]
                elif event["kind"] == "rewind":
                    committed = min(committed, event["step"])
            stale = read.stale
            if read.live is not None:
                self._state = state_of(self.name, read.live)
            elif read.gone:
                ended = self._ended or stale is None
                stale = None if ended else stale
                self._state = replace(self._state, live=False, committed=committed)
                if ended:  # of a folder alone nobody knows whether a loop still writes to it
                    self._state = RunState(self.name, committed=committed, control="stopped" if self._ended else "unknown")
            return Changes(read.events, read.monitor, stale, self._state, read.restarted)

    def samples(self, step: int) -> pd.DataFrame:
        """The samples of a step, as `Run.samples`.

        Raises:
            RunError: there are none, or they cannot be read from here.
        """
        import io

        folder = self.folder
        if folder is None:
            raise RunError(f"{self.name} is a cluster and has no samples; watch one of its runs.")
        path = samples_file(folder, step)
        if os.path.isfile(path):
            return _frame(path, step)
        raw = self._feed.fetch("read_samples", step)
        if raw is None:
            raise RunError(f"No samples of step {step} at {path}: it was not logged with scored rollouts, or they are still being written.")
        return _frame(io.BytesIO(raw), step)

    def token_texts(self) -> TokenTexts:
        """What turns the tokens of the run's samples into texts.

        Raises:
            RunError: the run keeps no tokenizer, or it cannot be read from here.
        """
        path = None if self.folder is None else self.folder / TOKENIZER_FILE
        try:
            raw = path.read_bytes() if path is not None and os.path.isfile(path) else self._feed.fetch("read_tokenizer")
        except OSError as error:
            raise RunError(f"The run's {TOKENIZER_FILE} cannot be read: {error}") from error
        if raw is None:
            raise RunError(f"There is no {TOKENIZER_FILE} of run {self.name!r} at {self.folder}: its tokens are shown by their ids.")
        return TokenTexts(raw)

    def control(self, verb: str) -> str:
        """Ask the run's loop for "stop", "pause", "resume", "step" or "checkpoint"; returns its state in a word.

        Raises:
            RunError: the run is not alive, or no loop of it is running.
        """
        return self._feed.control(verb)

    def close(self) -> None:
        """Stop reading; `poll` finds nothing more."""
        with self._lock:
            self._closed = True
            self._feed.close()

    def __repr__(self) -> str:
        return f"Source({self._feed!r}{', closed' if self._closed else ''})"


def _frame(file: Any, step: int) -> pd.DataFrame:
    """Raises:
    RunError: it is no Parquet file of samples.
    """
    import pandas as pd

    try:
        frame = pd.read_parquet(file)
    except (OSError, ValueError) as error:  # pyarrow's are of these
        raise RunError(f"The samples of step {step} cannot be read: {error}") from error
    missing = sorted(name for name in SAMPLE_COLUMNS if name not in frame)
    if missing:
        raise RunError(f"The file of step {step} holds no samples as a run writes them: it has no {', '.join(missing)}.")
    numbers = all(pd.api.types.is_numeric_dtype(frame[name]) for name in ("reward", "n_tokens"))
    texts = all(isinstance(text, str) for name in ("question", "response") for text in frame[name])
    tokens = all(getattr(row, "ndim", 0) == 1 for name in ("tokens", "logprobs") for row in frame[name])
    if not (numbers and texts and tokens and frame["n_tokens"].notna().all()):
        raise RunError(f"The file of step {step} holds no samples as a run writes them: a column is of another kind.")
    return frame


def source(what: Any) -> Source:
    """A source of a `Run`, of a run's folder, of a live run by its name, or of a `Cluster` (its monitors only).

    A name is looked for on the cluster that this kernel is connected to and on local ones, then as a folder.

    Raises:
        RunError: there is no such run; says where it was looked for.
    """
    from rlkit.cluster import Cluster
    from rlkit.run import Run

    if isinstance(what, Source):
        return what
    if isinstance(what, Run):
        return Source(LiveFeed(what.name, what.cluster, what.folder))
    if isinstance(what, Cluster):
        return Source(ClusterFeed(what))
    if not isinstance(what, str | Path):
        raise RunError(f"rlkit.watch.source({what!r}): it takes a Run, a Cluster, a run's folder or the name of a live run.")
    try:
        path = Path(what).expanduser()
    except RuntimeError as error:  # no such user
        raise RunError(f"There is no run at {what}: {error}") from error
    if isinstance(what, str) and len(path.parts) == 1:
        return _named(what)
    if not os.path.isfile(path / EVENTS_FILE):  # False for a name that no file can have, too
        raise RunError(f"There is no run at {path.absolute()}: that folder has no {EVENTS_FILE}, or cannot be read.")
    if not os.access(path / EVENTS_FILE, os.R_OK):
        raise RunError(f"The run at {path.absolute()} cannot be read: {EVENTS_FILE} belongs to another user.")
    return Source(FileFeed(path))


def _named(name: str) -> Source:
    from rlkit.attaching import attach

    try:
        run = attach(name)
    except (RunError, ActorDiedError, DeadlineError, ConnectionError) as error:  # not alive, or its cluster is gone
        found = [folder for folder in (Path(name), Path("runs") / name) if os.path.isfile(folder / EVENTS_FILE)]
        if not found:
            raise RunError(f"{error} Nor is there one on disk at {Path('runs').absolute() / name}.") from error
        return Source(FileFeed(found[0]))
    return Source(LiveFeed(name, run.cluster, run.folder))


def state_of(name: str, reply: Mapping[str, Any]) -> RunState:
    """The state behind what a recorder's ``watch`` answered."""
    live = reply["live"]
    phases = tuple(p["phase"] for p in live["phases"])
    control = live["control"]
    phase, since = (live["phases"][-1]["phase"], live["phases"][-1]["since"]) if phases else (None, live["waiting_since"])
    waiting = WAITS_FOR.get(phase.rpartition("/")[2], phase) if phase is not None else ""
    counted = facts_of(live["progress"])
    waiting += f" ({counted})" if waiting and counted else ""
    if control == "paused":
        waiting = "resume, single step or stop"
    return RunState(
        name=name,
        phase=phase,
        phase_since=since,
        phases=phases,
        step=live["step"],
        total=live["total"],
        committed=reply["committed"],
        waiting_for=waiting,
        progress=live["progress"],
        control=control,
        looping=live["looping"],
        checkpoint_asked=live["checkpoint"],
        driver=reply["driver"],
        live=True,
        now=reply["now"],
    )
