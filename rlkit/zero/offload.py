"""The learner's states in host memory while the rollout engines have the card.

Three places: ``"on"`` (all on the device), ``"parameters"`` (only what the forward pass and a weight sync read: the policy's parameters and
buffers) and ``"off"`` (nothing). Master weights, Adam's moments, accumulated gradients and buckets are found by walking DeepSpeed's
optimizer, whatever its stage, so what the optimizer keeps is what moves; see `rlkit.shelf` for how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlkit.shelf import Shelf, distinct, tensors_in
from rlkit.zero.engine import MOMENTS, Engine

PLACES = ("on", "parameters", "off")


class Offload:
    """Moves one rank's states between its device and host memory. On the CPU they move within host memory, for tests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shelf = Shelf(engine.device)
        self.place = "on"

    def move(self, place: str) -> dict[str, float]:
        """Go to ``place``; being there already costs nothing. Returns ``moved`` and ``away`` in bytes.

        Raises:
            torch.OutOfMemoryError: no room on the device; the next call goes on where this one stopped.
        """
        if place not in PLACES:
            raise ValueError(f"{place!r} is not one of {PLACES}")
        if place == self.place:
            return {"moved": 0, "away": self.shelf.bytes}
        moved, before = 0, self.place
        self.place = ""  # neither: an error half-way leaves it there, and the next call goes on
        if place == "on":
            moved += self.shelf.back()
        else:
            if before == "on" and hasattr(self.engine.ds.optimizer, "empty_partition_cache"):
                self.engine.ds.optimizer.empty_partition_cache()  # ZeRO-3: parameters that are still gathered
            parameters = list(self._parameters())
            if place == "off":
                moved += self.shelf.put([*parameters, *self._states()])
            else:
                kept = {s._cdata for s in distinct(parameters, self.engine.device)}
                moved += self.shelf.put(t for t in self._states() if t.untyped_storage()._cdata not in kept)
                moved += self.shelf.back(parameters)
        self.place = place
        return {"moved": moved, "away": self.shelf.bytes}

    def needed(self) -> int:
        """Bytes of host memory that ``"off"`` takes at its most: what is on the device now, and moments and gradients still to come."""
        device = self.engine.device
        now = sum(s.nbytes() for s in distinct([*self._parameters(), *self._states()], device))
        master = sum(m.numel() * m.element_size() for m in self.engine.master() if m.device.type == device.type)
        moments = 0 if self.engine.has_moments() else len(MOMENTS)
        gradients = 0 if self.engine.stage == 3 else 2  # ZeRO-3 keeps a buffer; the others make one a step, in parts and then flat
        return now + self.shelf.bytes + (moments + gradients) * master

    def _parameters(self) -> Iterator[torch.Tensor]:
        """What the forward pass reads. Views of one flat buffer come as many tensors of one storage."""
        for parameter in self.engine.policy.parameters():
            yield parameter.data
            partition = getattr(parameter, "ds_tensor", None)
            if partition is not None:
                yield partition
        yield from self.engine.policy.buffers()

    def _states(self) -> Iterator[torch.Tensor]:
        """All else that DeepSpeed's optimizer holds, and gradients."""
        optimizer: Any = self.engine.ds.optimizer
        yield from tensors_in([p.grad for p in self.engine.policy.parameters() if p.grad is not None])
        yield from tensors_in(dict(self.engine.ds.basic_optimizer.state))
        yield from tensors_in([p.get("params") for p in self.engine.ds.basic_optimizer.param_groups])
        yield from tensors_in(list(vars(optimizer).values()))


def share_gradients(engine: Engine) -> int:
    """ZeRO-3 with its optimizer in host memory: one fp32 buffer for gradients there in place of two. Returns bytes saved.

    DeepSpeed 0.19 adds gradients up in one flat buffer and copies it, at each step, into the optimizer's gradients: 4 bytes a parameter
    each. Both are laid out group by group, so the optimizer's can be views of the first; the copy then writes what is there already.
    """
    optimizer: Any = engine.ds.optimizer
    if engine.stage != 3 or not engine.spec.offload_optimizer:
        return 0
    flat, start, saved = optimizer.grad_partitions_flat_buffer, 0, 0
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        size = sum(p.partition_numel() for p in group)
        gradient = master.grad
        if gradient is not None and (gradient.dtype, gradient.device, gradient.numel()) == (flat.dtype, flat.device, size):
            master.grad = flat.narrow(0, start, size)
            saved += gradient.numel() * gradient.element_size()
        start += size
    return saved
