"""The actor that is one ZeRO rank. Only the controller calls it, all ranks at once."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rlkit import actors, memory, oom, transfer
from rlkit.config import TrainSpec
from rlkit.errors import CheckpointError, OutOfMemoryError, SyncError
from rlkit.weights import WeightManifest, publish
from rlkit.zero.work import Job


class Rank:
    """One process of the learner, with one DeepSpeed engine."""

    def __init__(self, rank: int, model: str, spec: TrainSpec) -> None:
        import torch

        self.rank, self.model, self.spec = rank, model, spec
        self._stopped: str | None = None
        self._call: str | None = None
        self._manifest: WeightManifest | None = None  # keeps the published buckets alive
        self._exporter: transfer.Exporter | None = None  # and those on the GPU
        self._link: transfer.Link | None = None
        self._memory: dict[str, float] = {}
        if spec.gpus_per_rank == 0:
            torch.set_num_threads(threads(spec))

    @ray.method(concurrency_group="control")
    def stop(self, call: str) -> None:
        """Ask the call with this id to stop before its first optimizer step."""
        self._stopped = call

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        """(micro-batches begun, micro-batches in all) of the update or log-probs in progress."""
        return self.trainer.done, self.trainer.total

    def where(self) -> tuple[str, str, int]:
        """(node id, this node's IP address, a port that is free on it)."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def connect(self, address: tuple[str, int] | str) -> dict[str, Any]:
        """Join the process group and load the model. Returns facts about the trained parameters."""
        import torch

        from rlkit.models import resolve
        from rlkit.zero import engine, offload, peers, train

        spec, found = self.spec, resolve(self.model)  # on this rank's node
        self.path = str(found.path)
        engine.join(self.rank, spec.world, address, spec.gpus_per_rank > 0, max(60.0, spec.update_timeout_s))
        with oom.explained("start", f"rank-{self.rank}", learner=spec):
            self.engine = engine.Engine(self.path, spec)
            offload.share_gradients(self.engine)
        self.meter = memory.Meter("cuda" if spec.gpus_per_rank > 0 else "cpu")
        self.offload = offload.Offload(self.engine)
        if spec.offload_between_turns:
            memory.check_host(
                self.offload.needed(),
                f"rank-{self.rank}'s states between turns (offload_between_turns)",
                "Set TrainSpec.offload_between_turns to False, or give this rank a part of the states only (zero_stage 3, more ranks).",
            )
        self.peers = peers.Peers()
        self.trainer = train.Trainer(self.engine, self.peers)
        numel = [getattr(p, "ds_numel", p.numel()) for p in self.engine.model.parameters()]
        trained = [getattr(p, "ds_numel", p.numel()) for _, p in self.engine.trainable()]
        gpu = transfer.gpu_uuid(torch.cuda.current_device()) if spec.gpus_per_rank > 0 else None
        return {
            "parameters": int(sum(numel)),
            "trained": int(sum(trained)),
            "gpu": gpu,
            "name": found.name,
            "fingerprint": found.fingerprint,
            **self.engine.facts,
        }

    # ---- the card

    def place(self, where: str) -> dict[str, float]:
        """Move this rank's states: "on" the device, only the "parameters" there, or all "off" it; see `rlkit.zero.offload`. Without
        ``offload_between_turns`` they stay, and only memory that the allocator keeps for later is given back."""
        if not self.spec.offload_between_turns:
            self.offload.shelf.release()
            return {}
        with oom.explained("turn", f"rank-{self.rank}", learner=self.spec, after="What did not fit is still in host memory."):
            return self.offload.move(where)

    @ray.method(concurrency_group="control")
    def memory(self) -> dict[str, float]:
        """This process's memory in the last call; see `rlkit.memory.Meter`."""
        return self._memory

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        """Around a call: its peak of memory. When memory runs out in it, gradients are dropped and the engine is fit for the next call."""
        from rlkit.zero import recover

        self.meter.begin()
        steps = self.trainer.steps
        vocab = int(self.engine.model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
        try:
            with oom.explained(phase, f"rank-{self.rank}", learner=self.spec, vocab=vocab):
                yield
        except OutOfMemoryError as error:
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)  # they hold activations
            recover.after_error(self.engine)
            applied = self.trainer.steps - steps
            state = f"{applied} optimizer steps of it were applied." if applied else "Nothing was applied; the learner can go on."
            if self.engine.stage == 3 and "in the optimizer phase" in str(error):  # it steps on one group of parameters after the other
                state = "Some parameters may have been updated: go back to a checkpoint with learner.load."
            raise type(error)(f"{error} {state}") from error.__cause__
        finally:
            self._memory = self.meter.end()

    # ---- training

    def update(self, call: str, job: Job) -> dict[str, Any]:
        with self._measured("forward"):
            return self.trainer.update(job, lambda: self._stopped == call)

    def forward_backward(self, call: str, job: Job) -> dict[str, Any]:
        with self._measured("forward"):
            return self.trainer.forward_backward(job, lambda: self._stopped == call)

    def optim_step(self) -> dict[str, Any]:
        with self._measured("optimizer"):
            return self.trainer.step()

    def discard(self) -> None:
        self.engine.discard()

    def steps(self) -> int:
        """Optimizer steps applied since the run began."""
        return self.trainer.steps

    def logprobs(self, job: Job, owned: list[int]) -> dict[int, Any]:
        """shard -> reference to its (N,) float32 log-probs, in this rank's care."""
        with self._measured("forward"):
            return {s: ray.put(values) for s, values in self.trainer.logprobs(job, owned).items()}

    # ---- weights

    def publish(self, version: int, dtype: str, transport: str = transfer.OBJECT_STORE) -> WeightManifest | None:
        """Rank 0 puts the weights where engines can take them and returns the manifest; the others take part in the gathering.

        With ``ipc`` every rank keeps the buckets on its own GPU and returns a manifest with its own handles.
        """
        from rlkit.zero.export import hf_items
        from rlkit.zero.peers import Guard

        self.meter.begin()
        items = hf_items(self.engine)
        guard = Guard("Publishing the weights")
        manifest = None
        self.release()
        self._exporter = None if transport == transfer.OBJECT_STORE else transfer.Exporter(transport)
        if self.rank == 0 or transport == transfer.IPC:
            with oom.explained("sync", f"rank-{self.rank}", learner=self.spec), guard:
                manifest = publish(items, version=version, dtype=dtype, exporter=self._exporter, sums=self.rank == 0)
        for _ in items:  # what is left after an error, and all of it on the other ranks
            pass
        self.peers.agree(guard, undo=self.release)
        self._manifest, self._memory = manifest, self.meter.end()
        return manifest

    def link(self, host: str, port: int, members: int) -> None:
        """Form the NCCL group with the engines, as its member 0."""
        import torch

        self._link = transfer.Link(host, port, members, torch.device("cuda", torch.cuda.current_device()))

    def broadcast(self) -> None:
        """Send the published buckets to the engines of the group, in order."""
        if self._link is None or self._exporter is None:
            raise SyncError("There is no NCCL group with the engines, or nothing was published for it.")
        for flat in self._exporter.flats:
            self._link.broadcast(flat)

    def release(self) -> None:
        """Free published buckets that lie on the GPU."""
        if self._exporter is not None:
            self._exporter.clear()
        self._exporter = None

    def save_hf(self, target: str) -> None:
        """Write a directory that transformers loads; it appears whole or not at all."""
        from rlkit.zero import checkpoint, export
        from rlkit.zero.peers import Guard

        guard = Guard(f"Writing {target}", CheckpointError)
        items = export.hf_items(self.engine)
        if self.rank == 0:
            with guard, checkpoint.replacing(Path(target)) as folder:
                tensors = {name: t.cpu().clone() for name, t in items}
                export.write_hf(self.engine, Path(self.path), folder, tensors)
        for _ in items:
            pass
        self.peers.agree(guard)

    # ---- checkpoints

    def save(self, target: str, facts: dict[str, Any]) -> None:
        from rlkit.zero import checkpoint

        checkpoint.save(self.engine, self.peers, Path(target), facts | {"steps": self.trainer.steps})

    def load(self, source: str) -> dict[str, Any]:
        """Returns the facts that were saved."""
        from rlkit.zero import checkpoint

        facts = checkpoint.load(self.engine, self.peers, Path(source))
        self.trainer.steps = int(facts["steps"])
        return facts

    def parameters(self) -> dict[str, Any] | None:
        """Name -> whole fp32 trained parameter as numpy, from rank 0. For tests and small models: it holds all of them."""
        out = {name: self.engine.read(p).numpy() for name, p in self.engine.trainable()}
        return out if self.rank == 0 else None


def threads(spec: TrainSpec) -> int:
    """Compute threads of one rank on CPU."""
    return spec.threads or max(1, -int(-spec.cpus_per_rank // 1))


def environment(spec: TrainSpec) -> dict[str, str]:
    """Environment variables of a rank's process."""
    return actors.cpu_environment(threads(spec)) | {
        "DS_ACCELERATOR": "cuda" if spec.gpus_per_rank > 0 else "cpu",
        "LOCAL_RANK": "0",  # Ray shows each rank its own GPU only
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
