"""Memory of tensors, given back to its device for a while and brought back unchanged.

What moves is the *storage* behind the tensors: it is copied to host memory and shrunk to nothing, later grown and filled again. All views
of it (a flat buffer and the parameters cut out of it, hooks, keys of an optimizer's state) stay valid objects and see their values again,
so nothing has to know that it was away. FSDP frees its flat parameters the same way (Zhao et al. 2023, section 4).

Between the two nothing may compute with the tensors: they have a shape and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

PAGE = 4096  # bytes


@dataclass
class _Away:
    """A storage of ``size`` bytes that is empty now; ``host`` holds its bytes, or None when they were dropped."""

    storage: torch.UntypedStorage
    size: int
    host: torch.Tensor | None


class Shelf:
    """Storages of one device that are in host memory now. Each call may be repeated, also after an error half-way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._away: dict[int, _Away] = {}  # by the storage's identity
        self._spare: dict[int, list[torch.Tensor]] = {}  # size -> host buffers to use again: locking a GiB takes a third of a second

    @property
    def bytes(self) -> int:
        """Bytes that are away."""
        return sum(a.size for a in self._away.values())

    @property
    def spare_bytes(self) -> int:
        """Bytes of host memory that are kept for the next time."""
        return sum(size * len(buffers) for size, buffers in self._spare.items())

    def put(self, tensors: Iterable[torch.Tensor]) -> int:
        """Move the storages of ``tensors`` on this device to host memory; those that are there already stay. Returns bytes moved."""
        found = [s for s in distinct(tensors, self.device) if s._cdata not in self._away]
        self._wait()  # for kernels of every stream that still use them
        moved = []
        for storage in found:
            host = self._buffer(storage.nbytes())
            host.copy_(_flat(storage, self.device), non_blocking=True)
            moved.append(_Away(storage, storage.nbytes(), host))
        self._leave(moved)
        return sum(one.size for one in moved)

    def drop(self, tensors: Iterable[torch.Tensor]) -> int:
        """Give the memory back without a copy: `back` then brings undefined values. Returns bytes freed."""
        found = [s for s in distinct(tensors, self.device) if s._cdata not in self._away]
        gone = [_Away(s, s.nbytes(), None) for s in found]
        self._leave(gone)
        return sum(one.size for one in gone)

    def back(self, tensors: Iterable[torch.Tensor] | None = None) -> int:
        """Bring back the storages of ``tensors`` (default: all). Returns bytes moved.

        Raises:
            torch.OutOfMemoryError: no room on the device; what is not back yet stays in host memory, and the next call goes on.
        """
        wanted = list(self._away) if tensors is None else list(dict.fromkeys(t.untyped_storage()._cdata for t in tensors))
        done = []
        try:
            for key in wanted:
                one = self._away.get(key)
                if one is None:
                    continue
                if one.storage.nbytes() == 0:
                    one.storage.resize_(one.size)
                if one.host is not None:
                    _flat(one.storage, self.device).copy_(one.host, non_blocking=True)
                done.append(self._away.pop(key))
        finally:
            self._wait()  # the copies still read the host buffers
            for one in done:
                if one.host is not None and self.device.type == "cuda":
                    self._spare.setdefault(one.size, []).append(one.host)
        return sum(one.size for one in done)

    def _leave(self, ones: list[_Away]) -> None:
        """Free what was copied: all of it or, when an error came before, none."""
        self._wait()
        for one in ones:
            self._away[one.storage._cdata] = one
            _empty(one.storage)
        if ones:
            self.release()

    def release(self) -> None:
        """Give memory that torch keeps for later allocations back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _buffer(self, size: int) -> torch.Tensor:
        """(size,) uint8 in host memory, page-locked on GPUs."""
        spare = self._spare.get(size)
        if spare:
            return spare.pop()
        return page_locked(size) if self.device.type == "cuda" else torch.empty(size, dtype=torch.uint8)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def page_locked(size: int) -> torch.Tensor:
    """(size,) uint8 in host memory, locked for fast copies where the driver allows it. It stays locked until the process ends.

    torch's own page-locked memory is rounded up to a power of two: 27 GB would take 34.
    """
    whole = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    made = whole[start : start + size]
    # The status is not looked at: memory that could not be locked is copied more slowly and is otherwise the same.
    torch.cuda.cudart().cudaHostRegister(made.data_ptr(), size, 0)
    return made


def distinct(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages behind ``tensors`` on ``device`` that hold anything, each once."""
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def tensors_in(thing: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, sets, dicts and dataclasses, with its gradient."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    if isinstance(thing, torch.Tensor):
        seen.add(id(thing))
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, dict):
        seen.add(id(thing))
        for key, value in thing.items():
            yield from tensors_in(key, seen)
            yield from tensors_in(value, seen)
    elif isinstance(thing, list | tuple | set):
        seen.add(id(thing))
        for value in thing:
            yield from tensors_in(value, seen)
    elif hasattr(type(thing), "__dataclass_fields__") and hasattr(thing, "__dict__"):
        seen.add(id(thing))
        for value in vars(thing).values():
            yield from tensors_in(value, seen)


def _flat(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """(nbytes,) uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload, no-any-return]


def _empty(storage: torch.UntypedStorage) -> None:
    """Free the storage's memory. One on the CPU that cannot shrink (a mapped file) is filled with NaN instead, so that a use shows."""
    if storage.resizable():
        storage.resize_(0)
    else:
        _flat(storage, torch.device("cpu")).fill_(0xFF)
