"""The learner as a notebook sees it: a handle on the controller of the ZeRO ranks.

    learner = run.learner(model, zero_stage=2, lr=1e-4)
    stats = learner.update(batch, loss="ppo_clip")
    sampler.sync(learner)

The ranks and their controller are actors that outlive the kernel. The policy version counts updates: 0 at the start, one more after each.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import actors, models
from rlkit.config import TrainSpec
from rlkit.context import Owner
from rlkit.errors import RlkitError, RunError, SpecChangedError
from rlkit.losses import Loss, Objective
from rlkit.progress import Asker
from rlkit.reprs import Shown
from rlkit.types import Batch, Rollouts, UpdateStats
from rlkit.zero.work import work_of, work_of_rollouts

if TYPE_CHECKING:
    from rlkit.weights import WeightManifest

NAME = "learner"
SETTING = "TrainSpec.update_timeout_s"
_CONTROL_S = 30.0


class Learner(Shown):
    """ZeRO ranks that train one model. Make it with `Learner.start`; any number of handles may exist."""

    def __init__(self, controller: Any, owner: Owner, info: Mapping[str, Any], version: int) -> None:
        self._controller, self._owner = controller, owner
        self.spec: TrainSpec = info["spec"]
        self.info = dict(info)
        self._version = version
        owner.turns.learner = self

    @classmethod
    def start(cls, model: str, spec: TrainSpec, owner: Owner) -> Learner:
        """The learner of ``owner``: the living one when it has the same model and settings, else a new one.

        Raises:
            ModelError: the model cannot be found.
            SpecChangedError: a learner with other settings is alive; the message names them.
            DeadlineError: the ranks did not start within ``spec.start_timeout_s``.
        """
        from rlkit.zero import ds_config

        spec = spec.but(ranks=spec.world)
        ds_config.make(spec, 1, 1)  # refuse bad DeepSpeed settings before anything starts
        model = models.absolute(model)
        living = actors.find(NAME, owner.namespace)
        if living is not None:
            learner = cls.attach(owner)
            learner._same(model, spec)
            return learner
        from rlkit.zero.controller import Controller

        owner.turns.training()
        seats = [owner.seat(f"rank-{i}") for i in range(spec.world)]
        controller = actors.spawn(Controller, NAME, owner.namespace, model, spec, owner.name, seats)
        try:
            info = _wait(controller.start.remote(), "the learner to start", spec.start_timeout_s + _CONTROL_S, "TrainSpec.start_timeout_s")
        except BaseException:
            actors.end([controller, *actors.started_with(owner.namespace, "rank-")])
            raise
        return cls(controller, owner, info, 0)

    @classmethod
    def attach(cls, owner: Owner) -> Learner:
        """The living learner of ``owner``.

        Raises:
            RunError: there is none.
        """
        controller = actors.find(NAME, owner.namespace)
        if controller is None:
            raise RunError(f"Run {owner.name!r} has no living learner; make one with run.learner(model, ...).")
        info = _wait(controller.info.remote(), "the learner's settings", _CONTROL_S, "nothing: it should answer at once")
        state = _wait(controller.state.remote(), "the learner's state", _CONTROL_S, "nothing: it should answer at once")
        return cls(controller, owner, info, int(state["version"]))

    # ---- training

    def update(
        self,
        batch: Batch,
        loss: str | Loss = "ppo_clip",
        *,
        aggregate: str = "token_mean",
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        **options: Any,
    ) -> UpdateStats:
        """Train on a batch: ``epochs`` passes of ``minibatches`` optimizer steps each. The policy version becomes one more.

        ``loss`` is a name of `rlkit.losses.LOSSES` or a function with that signature; ``options`` are its keywords (``clip_low``,
        ``clip_high``). See `rlkit.losses` for ``aggregate`` and ``kl_estimator``.

        Before anything is applied, the sampler's log-probs of the batch's tokens are compared with the learner's.

        When the cell is interrupted before the first optimizer step the update is undone; after that it is finished. The KeyboardInterrupt
        says which.

        Raises:
            BatchError: not a `Batch`, or one that cannot be trained on. StaleBatchError: older than ``max_lag`` allows.
            LogprobGapError: sampler and learner disagree; nothing was applied.
            ConfigError: an unknown loss, option, aggregate or estimator.
            LearnerError: the loss failed or the gradient is not finite.
        """
        objective = _objective(loss, aggregate, kl_coef, kl_estimator, entropy_coef, options)
        work = work_of(batch, objective)
        with self._owner.phase("update") as facts:
            self._owner.turns.training()
            stats: UpdateStats = self._interruptible(lambda call: self._controller.update.remote(call, work, objective, self._owner.step))
            self._version = stats.policy_version
            facts |= {"policy_version": stats.policy_version} | self.memory()
        return stats

    def forward_backward(
        self,
        batch: Batch,
        loss: str | Loss = "ppo_clip",
        *,
        aggregate: str = "token_mean",
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        **options: Any,
    ) -> dict[str, float]:
        """Add the gradient of one batch to what is accumulated, without applying it. Returns the metrics.

        Gradients of several calls add up: each is normalised over its own batch. An error drops everything accumulated. Arguments and
        errors as `update`.
        """
        objective = _objective(loss, aggregate, kl_coef, kl_estimator, entropy_coef, options)
        work = work_of(batch, objective)
        with self._owner.phase("update") as facts:
            self._owner.turns.training()
            out: dict[str, float] = self._interruptible(lambda call: self._controller.forward_backward.remote(call, work, objective))
            facts |= self.memory()
        return out

    def optim_step(self) -> UpdateStats:
        """Clip and apply the accumulated gradient; the policy version becomes one more.

        Raises:
            LearnerError: nothing is accumulated, or the gradient is not finite.
        """
        with self._owner.phase("update") as facts:
            stats: UpdateStats = self._do("optim_step", self._owner.step)
            self._version = stats.policy_version
            facts |= {"policy_version": stats.policy_version} | self.memory()
        return stats

    def discard(self) -> None:
        """Drop the accumulated gradients."""
        self._do("discard")

    def logprobs(self, rollouts: Rollouts) -> tuple[Any, ...]:
        """Log-probs of every response token under the policy as it is now, at the sampling temperature (greedy rollouts at 1).

        One reference to (N,) float32, nats, a rollout shard.

        Raises:
            BatchError: not `Rollouts`.
        """
        work = work_of_rollouts(rollouts)
        with self._owner.phase("reference"):
            return tuple(self._do("logprobs", work))

    # ---- weights and checkpoints

    def publish_weights(self, dtype: str = "float32", transport: str = "object_store") -> WeightManifest:
        """Put the weights, LoRA merged, where `Sampler.sync` finds them: the object store, or the ranks' GPUs (see `rlkit.transfer`).

        They stay until the next call, those on GPUs until `release_weights`.
        """
        manifest: WeightManifest = self._do("publish", dtype, transport)
        return manifest

    def release_weights(self) -> None:
        """Free published weights that lie on the ranks' GPUs."""
        self._do("release")

    @property
    def controller(self) -> Any:
        """The actor behind this handle, for calls that must run beside others."""
        return self._controller

    def save(self, directory: str | Path) -> Path:
        """Write parameters, optimizer, schedule and policy version to a new directory, or replace the one there. All or nothing.

        The path is one on rank 0's node. Any number of ranks and any ZeRO stage can load it.

        Raises:
            CheckpointError: the disk is full or cannot be written; what was there before is unchanged.
        """
        path = Path(directory).absolute()
        with self._owner.phase("checkpoint"):
            self._do("save", str(path))
        return path

    def load(self, directory: str | Path) -> int:
        """Go back to a checkpoint; returns its policy version. Sync the sampler afterwards.

        Raises:
            CheckpointError: there is none, it was cut short or changed, or is of another model; the learner is as it was.
        """
        with self._owner.phase("checkpoint"):
            self._version = int(self._do("load", str(Path(directory).absolute())))
        return self._version

    def save_hf(self, directory: str | Path) -> Path:
        """Write weights (LoRA merged), config and tokenizer as a directory that transformers and vLLM load. All or nothing.

        Raises:
            CheckpointError: it could not be written.
        """
        path = Path(directory).absolute()
        with self._owner.phase("checkpoint"):
            self._do("save_hf", str(path))
        return path

    def parameters(self) -> dict[str, Any]:
        """Name -> trained parameter as a float32 numpy array. Moves all of them here: for tests and small models."""
        out: dict[str, Any] = self._do("parameters")
        return out

    # ---- state

    @property
    def version(self) -> int:
        """The policy version after the last call made here. `state` asks the learner."""
        return self._version

    def state(self) -> dict[str, Any]:
        """Where the learner stands; answered while it works.

        ``version``; ``busy`` (what it is doing, or None) and ``busy_since`` (Unix time); ``last_update``
        (``{"tag", "version", "stats"}`` of the last finished update, or None), ``tag`` and ``updates_in_tag`` (how many updates were
        applied in the step that the tag names, also after a load); ``torn`` (the step in which an update failed after some of its optimizer
        steps, or None); ``broken`` (why it stopped, or None).
        """
        state: dict[str, Any] = _wait(
            self._controller.state.remote(), "the learner's state", _CONTROL_S, "nothing: it should answer at once"
        )
        if state["busy"] is None:
            self._version = int(state["version"])
        return state

    def memory(self) -> dict[str, float]:
        """``memory/rank-0/allocated_gib`` and so on: peaks of the last update, log-probs or publishing; see `rlkit.memory.Meter`."""
        found: dict[str, float] = _wait(
            self._controller.memory.remote(), "the learner's memory", _CONTROL_S, "nothing: it should answer at once"
        )
        return found

    def close(self) -> None:
        """End the ranks and their controller. Their memory and GPUs are free afterwards; what was not saved is lost."""
        if self._owner.turns.learner is self:
            self._owner.turns.learner = None
        actors.end(actors.started_with(self._owner.namespace, NAME, "rank-"))

    def __repr__(self) -> str:
        s, model = self.spec, self.info["model"]["name"]
        lora = f", LoRA rank {s.lora_rank}" if s.lora_rank else ""
        return (
            f"Learner({model}, {self.info['parameters'] / 1e6:.3g}M parameters{lora}, ZeRO-{s.zero_stage} on {s.world} "
            f"rank{'s' * (s.world > 1)}, policy version {self._version})"
        )

    # ---- inside

    def _do(self, method: str, *args: Any) -> Any:
        what = {"publish": "learner.publish_weights"}.get(method, f"learner.{method}")
        if method not in ("publish", "release"):  # these belong to a sync, which has made room for them
            self._owner.turns.training()
        return _wait(getattr(self._controller, method).remote(*args), what, self.spec.update_timeout_s + _CONTROL_S, SETTING)

    def _interruptible(self, make: Callable[[str], Any]) -> Any:
        """Call, and on an interrupt learn what became of the call before the interrupt goes on."""
        call = uuid.uuid4().hex
        ref = make(call)
        shown, whole = self._owner.progress("update", unit="micro-batch"), False
        limit = self.spec.update_timeout_s + _CONTROL_S
        started = time.monotonic()
        try:
            found = actors.wait(
                [ref],
                what="learner.update",
                timeout_s=limit,
                setting=SETTING,
                on_tick=Asker(self._controller.progress.remote, shown.count),
                on_interrupt=lambda: self._controller.stop.remote(call),
            )[0]
            whole = True
            return found
        except RlkitError:
            with suppress(RlkitError):
                self.state()  # some optimizer steps may have been applied: the version here is then another
            raise
        except KeyboardInterrupt as interrupt:
            left = max(1.0, limit - (time.monotonic() - started))
            try:
                done = _wait(ref, "the interrupted update to be undone or finished", left, SETTING)
            except RlkitError as error:
                interrupt.add_note(str(error))
            else:
                if isinstance(done, UpdateStats):
                    self._version = done.policy_version
                    interrupt.add_note(f"The update was past its first optimizer step and was finished: policy version {self._version}.")
            raise
        finally:
            shown.close(whole)

    def _same(self, model: str, spec: TrainSpec) -> None:
        changed = self.spec.diff(spec)
        if self.info["model"]["asked"] != model:
            changed["model"] = (self.info["model"]["asked"], model)
        if changed:
            listed = "; ".join(f"{k} is {a!r}, asked for {b!r}" for k, (a, b) in sorted(changed.items()))
            raise SpecChangedError(
                f"Run {self._owner.name!r} has a learner with other settings: {listed}. run.learner() without arguments takes it as it is; "
                "else ask for the same, or learner.close() it first (save a checkpoint if its training matters)."
            )


def _objective(
    loss: str | Loss, aggregate: str, kl_coef: float, kl_estimator: str, entropy_coef: float, options: Mapping[str, Any]
) -> Objective:
    return Objective(loss, aggregate, kl_coef, kl_estimator, entropy_coef, dict(options))


def _wait(ref: Any, what: str, timeout_s: float, setting: str) -> Any:
    return actors.wait([ref], what=what, timeout_s=timeout_s, setting=setting)[0]
