"""Log-probs under a frozen model, for the KL term: ``batch = reference.logprobs(batch)``.

The frozen copy lives in its own actors (``reference-0`` ...). They share the learner's GPUs when ``gpus_per_actor`` is a fraction that fits
beside it, or have their own; ``cpu_offload`` keeps the weights in host memory between calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit import actors, models
from rlkit.config import Spec
from rlkit.context import Owner
from rlkit.errors import RlkitError, SpecChangedError
from rlkit.reprs import Shown
from rlkit.types import Batch, require

NAME = "reference-"


@dataclass(frozen=True)
class ReferenceSpec(Spec):
    """The frozen model's actors."""

    actors: int = 1
    cpus_per_actor: float = 1.0
    gpus_per_actor: float = 0.0  # a fraction shares a GPU, with the learner for example
    threads: int | None = None  # compute threads of an actor on CPU; None: cpus_per_actor rounded up
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on GPU | "float32" | "bfloat16"
    cpu_offload: bool = False  # weights rest in host memory and are on the GPU during a call only
    micro_batch_tokens: int = 16384  # tokens of one forward pass; where rows are padded (on CPU) rows x longest row
    logits_chunk: int | None = None  # tokens whose full-vocabulary logits exist at once; None: 2048 on CPU, 1.25 GB of them on GPU
    trust_remote_code: bool = False
    start_timeout_s: float = 600.0
    reference_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("actors", "micro_batch_tokens", "logits_chunk"):
            value = getattr(self, name)
            if value is None and name == "logits_chunk":
                continue
            self._need(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, "a whole number of at least 1")
        self._need(self.cpus_per_actor >= 0, "cpus_per_actor", "0 or above")
        self._need(self.gpus_per_actor >= 0, "gpus_per_actor", "0 or above")
        self._need(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
        for name in ("start_timeout_s", "reference_timeout_s"):
            self._need(getattr(self, name) > 0, name, "above 0")

    @property
    def n_threads(self) -> int:
        return self.threads or max(1, -int(-self.cpus_per_actor // 1))


class Reference(Shown):
    """A frozen model. `start` makes it; `logprobs` and `close` are the verbs."""

    def __init__(self, handles: Sequence[Any], info: Sequence[dict[str, Any]], spec: ReferenceSpec, owner: Owner) -> None:
        self._handles, self._info, self._spec, self._owner = list(handles), list(info), spec, owner

    @classmethod
    def start(
        cls, model: str, spec: ReferenceSpec | None = None, owner: Owner | None = None, *, restart: bool = False, **settings: Any
    ) -> Reference:
        """Find this run's reference actors, or start them; running it again changes nothing. Keywords are `ReferenceSpec` fields.

        Raises:
            ConfigError: an unknown setting, or a value out of range.
            SpecChangedError: a living reference has another model or other settings; ``restart=True`` ends it first.
            ModelError: no such model.
            DeadlineError: not loaded within ``start_timeout_s``.
        """
        spec = (spec or ReferenceSpec()).but(**settings)
        owner = owner or Owner("reference")
        model = models.absolute(model)
        living = _living(owner.namespace)
        if living and not restart:
            known = [_info(h) for h in living]
            if all(k is not None for k in known) and len(living) == spec.actors:
                _refuse_other([k for k in known if k is not None], model, spec)
            elif all(k is not None for k in known):
                raise SpecChangedError(f"This run has {len(living)} reference actors, asked for {spec.actors}: pass restart=True.")
            else:
                restart = True  # one of them died: all are loaded again
        if restart:
            actors.end(living)
            living = []
        handles = living or [_spawn(model, spec, i, owner) for i in range(spec.actors)]
        try:
            info = actors.wait(
                [h.start.remote() for h in handles],
                what=f"the reference to load {model!r}",
                timeout_s=spec.start_timeout_s,
                setting="ReferenceSpec.start_timeout_s",
            )
        except BaseException:
            if not living:
                actors.end(handles)
            raise
        return cls(handles, info, spec, owner)

    @property
    def info(self) -> list[dict[str, Any]]:
        """What each actor said when it had loaded: model, fingerprint, dtype, device, parameters, process."""
        return [dict(i) for i in self._info]

    @property
    def version(self) -> str:
        """Which model this is: its name and the fingerprint of its files."""
        return f"{self._info[0]['resolved']}@{self._info[0]['fingerprint'][:12]}"

    def logprobs(self, batch: Batch) -> Batch:
        """A batch with ``ref_logprobs``: one (N,) float32 array a shard in nats, at the temperature of the rollouts, in the object store.

        Tokens of groups that the batch leaves out (``keep`` False) are NaN there.

        Raises:
            BatchError: not a `Batch`.
            ActorDiedError: a reference actor died; make the reference again.
            DeadlineError: not done within ``ReferenceSpec.reference_timeout_s``.
        """
        require(batch, Batch, "reference.logprobs", "rl.advantages(scored, ...)")
        from rlkit.zero.packing import partition

        rollouts = batch.scored.rollouts
        bounds = np.cumsum([0, *rollouts.shard_sizes])
        keeps = [batch.keep[a:b] for a, b in itertools.pairwise(bounds)]
        tokens = np.array([int(rollouts.lengths[a:b].sum()) for a, b in itertools.pairwise(bounds)])
        temperature, call = float(rollouts.sampling.temperature) or 1.0, uuid.uuid4().hex[:12]
        pairs: list[Any] = [None] * len(rollouts.shards)
        with self._owner.phase("reference") as facts:
            for handle, mine in zip(self._handles, partition(tokens, len(self._handles)), strict=True):
                for s in mine:
                    pairs[s] = handle.logprobs.options(num_returns=2).remote(rollouts.shards[s], keeps[s], temperature, call)
            shown = self._owner.progress("reference", len(pairs), "shard")
            try:
                replies = actors.wait(
                    [reply for _, reply in pairs],
                    what=f"the reference's log-probs of {int(tokens.sum())} tokens",
                    timeout_s=self._spec.reference_timeout_s,
                    setting="ReferenceSpec.reference_timeout_s",
                    on_tick=lambda done: shown(_raise_first(done)),
                )
                shown.close()
            except BaseException:
                for handle in self._handles:
                    handle.stop.remote(call)
                raise
            finally:
                if self._spec.cpu_offload:
                    for handle in self._handles:
                        handle.rest.remote()
            facts |= {"tokens": sum(r["tokens"] for r in replies), "micro_batches": sum(r["micro_batches"] for r in replies)}
        return dataclasses.replace(batch, ref_logprobs=tuple(values for values, _ in pairs), ref_version=self.version)

    def close(self) -> None:
        """End the actors and free their memory."""
        actors.end(self._handles)
        self._handles = []

    def __repr__(self) -> str:
        facts = self._info[0]
        return f"Reference({self.version}, {len(self._info)} actor(s), {facts['dtype']} on {facts['device']})"


def _raise_first(done: Sequence[Any]) -> int:
    """How many are done; raises the first error among them."""
    for ref in done:
        reply = actors.get(ref, "the reference's log-probs")
        if isinstance(reply, RlkitError):
            raise reply
    return len(done)


def _living(space: str) -> list[Any]:
    return actors.started_with(space, NAME)


def _info(handle: Any) -> dict[str, Any] | None:
    from rlkit.errors import ActorDiedError

    try:
        return actors.wait([handle.info.remote()], what="the reference to answer", timeout_s=30, setting="(fixed)")[0]
    except ActorDiedError:
        return None


def _spawn(model: str, spec: ReferenceSpec, index: int, owner: Owner) -> Any:
    from rlkit.zero.frozen import Frozen

    env = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | ({} if spec.gpus_per_actor > 0 else actors.cpu_environment(spec.n_threads))
    return actors.spawn(
        Frozen,
        f"{NAME}{index}",
        owner.namespace,
        model,
        spec,
        index,
        cpus=spec.cpus_per_actor,
        gpus=spec.gpus_per_actor,
        seat=owner.seat(f"{NAME}{index}") if 0 < spec.gpus_per_actor < 1 else None,
        env=env,
        spread=spec.actors > 1,
    )


def _refuse_other(known: Sequence[dict[str, Any]], model: str, spec: ReferenceSpec) -> None:
    on_driver = ("start_timeout_s", "reference_timeout_s")
    wanted = {k: v for k, v in spec.as_dict().items() if k not in on_driver}
    for info in known:
        changes = {k: (info["spec"].get(k), v) for k, v in wanted.items() if info["spec"].get(k) != v}
        if info["model"] != model:
            changes = {"model": (info["model"], model)} | changes
        if changes:
            listed = "; ".join(f"{k} is {a!r}, asked for {b!r}" for k, (a, b) in changes.items())
            raise SpecChangedError(
                f"This run's reference has other settings: {listed}. To start over with the new ones, pass restart=True."
            )
