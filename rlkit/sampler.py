"""The driver's side of the rollout engines: start them, spread prompts over them, give them the learner's weights."""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit import actors, memory, transfer
from rlkit.config import EngineSpec, SampleSpec
from rlkit.context import Owner
from rlkit.engines import pool
from rlkit.engines.progress import Progress
from rlkit.errors import ActorDiedError, ConfigError, RolloutError, SyncError, TooLongError
from rlkit.types import Prompt, Rollouts
from rlkit.weights import SyncStats, WeightManifest

AGAIN = "Running the run.sampler(...) cell again starts what is missing; then sampler.sync(learner) gives it the current weights."


class Sampler:
    """A pool of rollout engines. `start` makes it; `generate`, `sync` and `close` are the verbs."""

    def __init__(self, handles: Sequence[Any], info: Sequence[dict[str, Any]], spec: EngineSpec, owner: Owner) -> None:
        self._handles, self._info, self._spec, self._owner = list(handles), [dict(i) for i in info], spec, owner
        self._linked: tuple[Any, ...] | None = None  # the processes that formed the NCCL group
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
        handles, info = pool.start(model, spec, owner.namespace, restart=restart, version=version)
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
        parts, which then draws the same as in one call. Results stay in the object store, one shard an engine.

        Raises:
            ConfigError: an unknown or impossible sampling setting.
            RolloutError: no prompts. TooLongError: none that leaves room for a response in the engines' context.
            SyncError: the engines hold different or half-written weights.
            ActorDiedError: an engine died; names it.
            DeadlineError: not done within ``EngineSpec.rollout_timeout_s``.
        """
        spec = (sampling or SampleSpec()).but(n=n, **settings)
        asked = as_prompts(prompts)
        with self._owner.phase("rollout") as facts:
            self._owner.turns.rollout(self)
            begun = time.monotonic()
            seeds = prompt_seeds(self._owner.call_seed() if spec.seed is None else spec.seed, first + len(asked))[first:]
            call, start = uuid.uuid4().hex[:12], 0
            shards, replies, sizes = [], [], split(len(asked), len(self._handles))
            for handle, size in zip(self._handles, sizes, strict=False):
                part = slice(start, start + size)
                ref, reply = handle.generate.options(num_returns=2).remote(call, asked[part], spec, seeds[part])
                shards.append(ref)
                replies.append(reply)
                start += size
            ticker = Progress(self._handles, call, len(asked) * spec.n) if progress else None
            try:
                summaries = self._wait(
                    replies,
                    shards,
                    what=f"{len(asked)} x {spec.n} responses from {len(replies)} engine(s)",
                    timeout_s=self._spec.rollout_timeout_s,
                    setting="EngineSpec.rollout_timeout_s",
                    on_tick=ticker,
                    call=call,
                )
            finally:
                if ticker is not None:
                    ticker.close()
            rollouts = self._gather(asked, shards, summaries, spec, time.monotonic() - begun)
            facts |= {
                "prompts": rollouts.shape[0],
                "samples": rollouts.lengths.size,
                "tokens": int(rollouts.lengths.sum()),
                "tokens_per_second": rollouts.tokens_per_second,
                "truncated": float(rollouts.truncated.mean()),
                "policy_version": rollouts.policy_version,
            }
            facts |= _memory(summaries)
        return rollouts

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
        states: list[dict[str, Any]] = self._wait(
            [getattr(h, method).remote(*args) for h in self._handles],
            what=f"{len(self._handles)} engine(s) to answer {method!r}",
            timeout_s=self._spec.sync_timeout_s,
            setting="EngineSpec.sync_timeout_s",
        )
        self.note(states)
        return states

    def note(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Remember what the engines said of themselves; None is one that is dead."""
        for info, state in zip(self._info, states, strict=False):
            info |= {} if state is None else {key: state[key] for key in ("mode", "version")}

    def _gather(self, asked: list[Prompt], shards: list[Any], replies: list[dict[str, Any]], spec: SampleSpec, seconds: float) -> Rollouts:
        for info, reply in zip(self._info, replies, strict=False):
            info["version"] = reply["version"]
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

    def _transport(self, learner: Any) -> str:
        """How weights travel: see `rlkit.transfer.choose`."""
        gpus = [gpu for info in self._info for gpu in info.get("gpus", [])]
        return transfer.choose(gpus, learner.info.get("gpus", [])) if gpus else transfer.OBJECT_STORE

    def _join(self, learner: Any) -> None:
        """Form the NCCL group of the learner's rank 0 and all engines' workers, once for these processes."""
        key = (learner.info["start_id"], *(i["pid"] for i in self._info))
        if self._linked == key:
            return
        workers = [len(i["gpus"]) for i in self._info]
        members = 1 + sum(workers)
        host, port = actors.get(learner.controller.endpoint.remote(), "finding an address for the NCCL group")
        calls = [learner.controller.link.remote(host, port, members)]
        for i, handle in enumerate(self._handles):
            calls.append(handle.link.remote(host, port, 1 + sum(workers[:i]), members))
        self._wait(
            calls,
            what=f"the learner and {len(workers)} engine(s) to form an NCCL group at {host}:{port}",
            timeout_s=self._spec.sync_timeout_s,
            setting="EngineSpec.sync_timeout_s",
        )
        self._linked = key

    # --- sync ------------------------------------------------------------------------------------------------------------------

    def sync(self, learner: Any) -> SyncStats:
        """Give the learner's weights to every engine and prove that they arrived.

        Engines drop their cached prompts, then read back what they compute with and compare it with the learner's checksums. Until that is
        done an engine has no version and `generate` refuses. Running it again sends the weights again.

        Raises:
            SyncError: not given a learner; an engine does not hold its weights (names the engine and the tensors).
            DeadlineError: not done within ``EngineSpec.sync_timeout_s``; names what it waited for.
            ActorDiedError: an engine or the learner died.
        """
        if not hasattr(learner, "publish_weights"):
            raise SyncError(f"sampler.sync takes the learner, as run.learner(...) returned it; it was given {learner!r}.")
        with self._owner.phase("sync") as facts, self._owner.turns.syncing(self, learner):
            begun = time.monotonic()
            transport = self._transport(learner)
            if transport == transfer.NCCL:
                self._join(learner)
            on_gpus = {} if transport == transfer.OBJECT_STORE else {"transport": transport}
            manifest: WeightManifest = learner.publish_weights(dtype=self._info[0]["dtype"], **on_gpus)
            published = time.monotonic()
            for info in self._info:
                info["version"] = None
            loads = [h.load_weights.remote(manifest) for h in self._handles]
            sends = [learner.controller.broadcast.remote()] if transport == transfer.NCCL else []
            replies = self._wait(
                loads + sends,
                what=f"{len(self._handles)} engine(s) to take policy version {manifest.version} "
                f"({manifest.bytes / 2**20:.0f} MiB) by {transport}",
                timeout_s=self._spec.sync_timeout_s,
                setting="EngineSpec.sync_timeout_s",
            )[: len(loads)]
            if transport != transfer.OBJECT_STORE:
                learner.release_weights()
            for info, reply in zip(self._info, replies, strict=True):
                info["version"] = reply["version"]
            parts = {"publish": published - begun} | {k: max(r[k] for r in replies) for k in ("load", "verify")}
            stats = SyncStats(
                version=manifest.version,
                seconds=time.monotonic() - begun,
                bytes=manifest.bytes,
                engines=len(replies),
                transport=transport,
                checksum_ok=True,
                checked=min(r["checked"] for r in replies),
                parts=parts,
            )
            facts |= {"policy_version": stats.version, "bytes": stats.bytes, "engines": stats.engines}
            facts |= {f"{k}_seconds": v for k, v in parts.items()} | _memory(replies)
            facts |= learner.memory() if hasattr(learner, "memory") else {}
        return stats

    def close(self) -> None:
        """End the engines. Rollouts that they made are lost with them; running it again changes nothing."""
        actors.end(self._handles)
        self._handles, self._info = [], []
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

    def _wait(
        self, refs: list[Any], shards: Sequence[Any] = (), *, call: str | None = None, on_tick: Any = None, **named: Any
    ) -> list[Any]:
        """`rlkit.actors.wait`; on any error, stop ``call`` everywhere and take note of the failed ``shards``."""

        def abort() -> None:
            if call is not None:
                for handle in self._handles:
                    handle.abort.remote(call)
            _note_failed(refs, shards)

        if not refs:
            raise RolloutError(f"This sampler was closed. {AGAIN}")
        try:
            return actors.wait(refs, on_tick=on_tick, **named)
        except ActorDiedError as error:
            abort()
            dead = [f"engine-{i['index']}" for i, h in zip(self._info, self._handles, strict=True) if pool.info_of(h, "an engine") is None]
            raise ActorDiedError(f"{', '.join(dead) or 'An engine'} died while waiting for {named['what']}. {AGAIN} ({error})") from error
        except BaseException:  # an interrupt, a deadline, an error of one engine: none of them leaves the others working
            abort()
            raise


def _memory(replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The engines' memory as a phase event holds it."""
    return {k: v for i, reply in enumerate(replies) for k, v in memory.named(f"engine-{i}", reply["memory"]).items()}


def _note_failed(replies: Sequence[Any], shards: Sequence[Any]) -> None:
    """Look at the errors in ``shards`` whose replies failed too: Ray prints in the notebook what nobody looked at."""
    import ray
    from ray.exceptions import RayError

    for reply, shard in zip(replies, shards, strict=False):
        if not ray.wait([reply], timeout=0, fetch_local=False)[0]:
            continue
        try:
            ray.get(reply)
        except RayError:
            with contextlib.suppress(RayError):
                ray.get(shard)


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


def split(count: int, parts: int) -> list[int]:
    """Sizes of at most ``parts`` contiguous, balanced, non-empty shares of ``count``."""
    parts = min(count, parts)
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []


def prompt_seeds(call_seed: int, count: int) -> list[int]:
    """A 31-bit seed a prompt, from the call's seed and the prompt's place in the call only."""
    words = np.random.SeedSequence(call_seed % 2**64).generate_state(count, np.uint32)
    return [int(w >> 1) for w in words]
