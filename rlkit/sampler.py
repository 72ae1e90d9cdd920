"""The driver's side of the rollout engines: start them, spread prompts over them, give them the learner's weights."""

from __future__ import annotations

import uuid
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit import actors, memory
from rlkit.config import EngineSpec, SampleSpec
from rlkit.context import Owner
from rlkit.engines import pool
from rlkit.engines.crew import AGAIN, Crew
from rlkit.engines.delivery import Delivery
from rlkit.engines.flight import Flight
from rlkit.errors import ActorDiedError, ConfigError, RlkitError, RolloutError, SyncError, TooLongError
from rlkit.pending import PendingRollouts
from rlkit.reprs import Shown
from rlkit.types import Prompt, Rollouts
from rlkit.weights import SyncStats


class Sampler(Shown):
    """A pool of rollout engines. `start` makes it; `generate`, `sync` and `close` are the verbs."""

    def __init__(self, handles: Sequence[Any], info: Sequence[dict[str, Any]], spec: EngineSpec, owner: Owner) -> None:
        self._handles, self._info, self._spec, self._owner = list(handles), [dict(i) for i in info], spec, owner
        self._crew = Crew(self._handles, self._info, spec, owner)
        self._delivery = Delivery(self._crew)
        self._learner: Any = None  # of the last sync
        self._under_way: weakref.WeakSet[PendingRollouts] = weakref.WeakSet()
        owner.turns.sampler = self

    @classmethod
    def start(cls, model: str, spec: EngineSpec, owner: Owner, *, restart: bool = False, version: int | None = 0) -> Sampler:
        """Find this run's engines, or start those that are missing; running it again changes nothing.

        A rollout that an earlier kernel left running on a living engine is stopped. ``version`` is what freshly loaded weights count as:
        0, or None when the learner is already further, so that `generate` refuses before a `sync`. ``restart`` ends living engines first.

        Raises:
            SpecChangedError: living engines have another model or other settings; the message lists them.
            ModelError, ConfigError: from the engine: no such model, or a setting that vLLM does not know.
            DeadlineError: not started within ``spec.start_timeout_s``.
        """
        owner.turns.clear_learner()
        handles, info = pool.start(model, spec, owner, restart=restart, version=version)
        return cls(handles, info, spec, owner)

    @property
    def info(self) -> list[dict[str, Any]]:
        """What each engine said of itself when last heard of: model, node, process, dtype, context, version, seconds to start."""
        return [dict(i) for i in self._info]

    @property
    def version(self) -> int | None:
        """The policy version that all engines hold; None when they differ or a sync was not finished."""
        found = {i["version"] for i in self._info}
        return found.pop() if len(found) == 1 else None

    @property
    def spec(self) -> EngineSpec:
        """The engines' settings."""
        return self._spec

    @property
    def owner(self) -> Owner:
        """The run that it belongs to."""
        return self._owner

    @property
    def engines(self) -> list[Any]:
        """The engine actors, for looking inside them."""
        return list(self._handles)

    # --- generate --------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        n: int | None = None,
        sampling: SampleSpec | None = None,
        *,
        progress: bool = True,
        first: int = 0,
        **settings: Any,
    ) -> Rollouts:
        """Sample ``n`` responses to each prompt; keywords are `SampleSpec` fields and win over ``sampling``.

        ``prompts`` are `Prompt` values, strings, or a task set; ``first`` is the place of the first of them in a list that is sampled in
        parts, which then draws the same as in one call. Results stay in the object store, one shard an engine. When an engine dies the
        others sample its prompts, with the same seeds; its replacement joins at the next `generate` or `sync`.

        Raises:
            ConfigError: an unknown or impossible sampling setting.
            RolloutError: no prompts, or an empty one. TooLongError: none that leaves room for a response in the engines' context.
            SyncError: the engines hold different or half-written weights.
            ActorDiedError: engines died twice with the same prompts, or the last one did and the learner has other weights by now.
            DeadlineError: not done within ``EngineSpec.rollout_timeout_s``.
        """
        asked, spec = as_prompts(prompts), (sampling or SampleSpec()).but(n=n, **settings)
        with self._owner.phase("rollout") as facts:
            self._owner.turns.rollout(self)
            pending = self._send(asked, spec, first, submitted=False)
            return pending.land(facts, progress=progress)

    def submit(
        self, prompts: Any, n: int | None = None, sampling: SampleSpec | None = None, *, first: int = 0, **settings: Any
    ) -> PendingRollouts:
        """As `generate`, but returns at once: engines sample while the learner trains. See `rlkit.pending` for a loop with it.

        A `sync` first waits for what is under way, so a rollout has one policy version. A learner needs ``max_lag`` of at least 1 for it.

        Raises:
            ConfigError: engines and learner take turns on their cards (``sleep_level``, ``offload_between_turns``).
        """
        asked, spec = as_prompts(prompts), (sampling or SampleSpec()).but(n=n, **settings)
        learner: Any = self._owner.part("learner") or self._learner
        moves = bool(learner is not None and learner.spec.offload_between_turns)
        if self._spec.sleep_level or moves:
            taken = "TrainSpec.offload_between_turns" if moves else "EngineSpec.sleep_level"
            raise ConfigError(
                f"sampler.submit lets engines sample while the learner works, but {taken} makes them take turns. Give them cards of their "
                "own (learner.gpus_per_rank 1, sampler.gpus_per_engine 1), or call generate."
            )
        self._owner.check()
        pending = self._send(asked, spec, first, submitted=True)
        self._under_way.add(pending)
        return pending

    def _send(self, asked: list[Prompt], spec: SampleSpec, first: int, submitted: bool) -> PendingRollouts:
        seeds = prompt_seeds(self._owner.call_seed() if spec.seed is None else spec.seed, first + len(asked))[first:]
        version = self.version
        self._welcome(version)
        if not self._handles:
            self._relieve(version)
        return PendingRollouts(self, Flight(self._crew, asked, spec, seeds), asked, spec, version, submitted)

    def sleep(self, level: int | None = None) -> None:
        """Give the GPUs' memory back: level 1 keeps the weights in host memory, 2 drops them; default is the setting, else 1.

        `generate` wakes the engines where ``EngineSpec.sleep_level`` is set; else call `wake` first. Dropped weights come with a `sync`.

        Raises:
            ConfigError: another level, or vLLM engines on GPUs that were not started with a ``sleep_level``.
            ResourceError: level 1, and the host has no room.
        """
        level = self._spec.sleep_level or 1 if level is None else level
        if level not in (1, 2):
            raise ConfigError(f"sampler.sleep({level!r}): the level is 1 (weights to host memory) or 2 (weights dropped).")
        if not self._spec.sleep_level and self._spec.engine == "vllm" and any(i["device"] == "cuda" for i in self._info):
            raise ConfigError(
                f"These engines cannot sleep: EngineSpec.sleep_level is {self._spec.sleep_level!r}. Start them with "
                "run.sampler(model, sleep_level=1, restart=True)."
            )
        self.ask("sleep", level)

    def wake(self) -> None:
        """Take the GPUs' memory again, weights and cache. Weights that were dropped are undefined until a `sync`."""
        self.ask("wake")

    def ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call ``mode``, ``sleep`` or ``wake`` of every engine, and remember what state they say they are in."""
        while True:
            try:
                states: list[dict[str, Any]] = actors.wait(
                    [getattr(h, method).remote(*args) for h in self._handles],
                    what=f"{len(self._handles)} engine(s) to answer {method!r}",
                    timeout_s=self._spec.sync_timeout_s,
                    setting="EngineSpec.sync_timeout_s",
                )
                break
            except ActorDiedError as error:
                dead = [h for h in self._handles if pool.info_of(h, self._crew.name(h)) is None]
                if not dead:
                    raise
                for handle in dead:
                    self._crew.lose(handle, str(error), "it had nothing to do")
        self.note(states)
        return states

    def note(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Remember what the engines said of themselves; None is one that is dead."""
        for info, state in zip(self._info, states, strict=False):
            info |= {} if state is None else {key: state[key] for key in ("mode", "version")}

    def _gather(self, asked: list[Prompt], shards: list[Any], replies: list[dict[str, Any]], spec: SampleSpec, seconds: float) -> Rollouts:
        versions = {r["version"] for r in replies}
        if len(versions) > 1:
            raise SyncError(f"The engines hold different policy versions {sorted(versions)}: run sampler.sync(learner).")
        dropped = tuple(d for r in replies for d in r["dropped"])
        room = min(i["max_model_len"] for i in self._info)
        if len(dropped) == len(asked):
            raise TooLongError(
                f"None of the {len(asked)} prompts leaves room for a response: the shortest has {min(n for _, n in dropped)} tokens, "
                f"and prompt and response together may have {room}. Raise EngineSpec.max_model_len or shorten the prompts."
            )
        if dropped:
            shown = ", ".join(f"{name} ({n} tokens)" for name, n in dropped[:3])
            warnings.warn(
                f"{len(dropped)} of {len(asked)} prompts were dropped: they leave no room for a response in {room} tokens: {shown}"
                f"{' ...' if len(dropped) > 3 else ''}.",
                stacklevel=3,
            )
        full = [(s, r) for s, r in zip(shards, replies, strict=True) if len(r["prompt_lengths"])]
        out = {name for name, _ in dropped}
        return Rollouts(
            id=uuid.uuid4().hex[:12],
            shards=tuple(s for s, _ in full),
            prompt_ids=tuple(p.id for p in asked if p.id not in out),
            shard_sizes=tuple(len(r["prompt_lengths"]) for _, r in full),
            prompt_lengths=np.concatenate([r["prompt_lengths"] for _, r in full]),
            lengths=np.concatenate([r["lengths"] for _, r in full]),
            truncated=np.concatenate([r["truncated"] for _, r in full]),
            policy_version=versions.pop(),
            sampling=spec,
            engine=self._spec.engine,
            seconds=seconds,
            dropped=dropped,
            run=self._owner.name,
            step=self._owner.step,
        )

    # --- engines that died ------------------------------------------------------------------------------------------------------

    def _welcome(self, version: int | None, wait: bool = False) -> str:
        """Take in replacements that have started, once they hold policy version ``version``; returns what keeps others out.

        ``version`` None is the learner's, when no engine is left to say one.
        """
        if version is None and self._handles:
            return "a sync was not finished"
        why = ""
        for one in self._crew.started(wait):
            assert one.info is not None
            learner = self._owner.part("learner") or self._learner
            wanted = version if version is not None else getattr(learner, "version", None)
            if one.info["version"] is None or (wanted is not None and one.info["version"] != wanted):
                at = getattr(learner, "version", wanted)
                if learner is None or at != wanted:
                    why = "no learner is known" if learner is None else f"the learner is already at policy version {at}"
                    continue
                try:
                    sent = self._delivery.send(learner, [one.handle], [one.info], only=wanted)
                except RlkitError as error:  # of the learner, for example: the other engines need nothing of it
                    why = f"it could not be given the learner's weights ({error})"
                    if self._handles:
                        self._owner.event("engine", f"The replacement of engine-{one.index} does not join yet: {why}")
                    continue
                finally:
                    self._owner.turns.clear_learner()  # publishing took its parameters back to the card
                if sent is None:
                    why = f"the learner is no longer at policy version {wanted}, or it died as well"
                    continue
            self._crew.join(one)
        return why

    def _relieve(self, version: int | None) -> None:
        """Wait for a replacement when no engine is left, and bring it to the version of the rollout that it is to go on with."""
        if not self._crew.coming:
            raise RolloutError(f"This sampler was closed. {AGAIN}")
        why = self._welcome(version, wait=True)
        if not self._handles:
            raise ActorDiedError(
                f"No engine is left, and its replacement cannot go on with a rollout of policy version {version}: "
                f"{why or 'it died as well'}. Run sampler.sync(learner) and roll out again."
            )

    # --- sync ------------------------------------------------------------------------------------------------------------------

    def sync(self, learner: Any) -> SyncStats:
        """Give the learner's weights to every engine and prove that they arrived.

        Engines drop their cached prompts, then read back what they compute with and compare it with the learner's checksums. Until that is
        done an engine has no version and `generate` refuses. Running it again sends the weights again.

        Raises:
            SyncError: not given a learner; an engine does not hold its weights (names the engine and the tensors).
            DeadlineError: not done within ``EngineSpec.sync_timeout_s``; names what it waited for.
            ActorDiedError: the learner died, or every engine and what replaced it, or one in an NCCL group.

        A rollout that was submitted and is under way is waited for first.
        """
        if not hasattr(learner, "publish_weights"):
            raise SyncError(f"sampler.sync takes the learner, as run.learner(...) returned it; it was given {learner!r}.")
        for pending in list(self._under_way):  # of the engines' weights as they are
            pending.settle()
        self._under_way.clear()
        with self._owner.phase("sync") as facts, self._owner.turns.syncing(self, learner):
            self._learner = learner
            for one in self._crew.started(wait=not self._handles and bool(self._crew.coming)):
                self._crew.join(one)
            if not self._handles:
                raise RolloutError(f"This sampler was closed. {AGAIN}")
            stats = self._delivery.send(learner, self._handles, self._info)
            if stats is None:  # every engine died on the way: once more, to the one that takes their place
                for one in self._crew.started(wait=True):
                    self._crew.join(one)
                stats = self._delivery.send(learner, self._handles, self._info)
            if stats is None:
                raise ActorDiedError(f"All engines died while they took the learner's weights, and so did what replaced them. {AGAIN}")
            facts |= {"policy_version": stats.version, "bytes": stats.bytes, "engines": stats.engines}
            facts |= {f"{k}_seconds": v for k, v in stats.parts.items()}
            facts |= memory.of_engines(self._delivery.replies)
            facts |= learner.memory() if hasattr(learner, "memory") else {}
        return stats

    def close(self) -> None:
        """End the engines. Rollouts that they made are lost with them, those under way are cancelled; running it again changes nothing."""
        for pending in list(self._under_way):
            pending.cancel()
        self._under_way.clear()
        self._crew.close()
        if self._owner.turns.sampler is self:
            self._owner.turns.sampler = None

    def __repr__(self) -> str:
        if not self._info:
            return "Sampler(closed)"
        first = self._info[0]
        version = "no complete weights" if self.version is None else f"policy version {self.version}"
        return (
            f"Sampler({len(self._info)} x {first['engine']} on {first['device']}, {first['name']}, {first['dtype']}, "
            f"context {first['max_model_len']}, {version})"
        )


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of `Prompt` from prompts, strings or a task set.

    Raises:
        RolloutError: nothing in it.
        ConfigError: something that is neither a prompt nor a string.
    """
    if isinstance(prompts, str | Prompt):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not (isinstance(prompts, Iterable) or hasattr(prompts, "__getitem__")):
        raise ConfigError(f"Prompts are a list of rlkit Prompt values or strings, or a task set; given {type(prompts).__name__}.")
    if not hasattr(prompts, "__getitem__"):
        prompts = list(prompts)
    out: list[Prompt] = []
    for i in range(len(prompts)):
        item = prompts[i]
        if isinstance(item, str):
            item = Prompt(id=f"text-{i}", messages=({"role": "user", "content": item},), template="auto")
        if not isinstance(item, Prompt):
            raise ConfigError(f"Prompts are rlkit Prompt values, strings or a task set; number {i} is {type(item).__name__}.")
        out.append(item)
    if not out:
        raise RolloutError("There are no prompts to generate from.")
    return out


def prompt_seeds(call_seed: int, count: int) -> list[int]:
    """A 31-bit seed a prompt, from the call's seed and the prompt's place in the call only."""
    words = np.random.SeedSequence(call_seed % 2**64).generate_state(count, np.uint32)
    return [int(w >> 1) for w in words]
