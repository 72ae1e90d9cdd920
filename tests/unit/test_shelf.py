"""Tensors whose memory goes away and comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlkit.shelf import Shelf, distinct, tensors_in

CPU = torch.device("cpu")


def test_a_storage_goes_and_comes_back_under_all_its_views():
    flat = torch.arange(12, dtype=torch.float32)
    views = [flat[:5], flat[5:].view(7)]
    other = torch.full((3,), 2.5, dtype=torch.bfloat16)
    shelf = Shelf(CPU)
    assert shelf.put([*views, other]) == 12 * 4 + 3 * 2
    assert (flat.untyped_storage().nbytes(), other.untyped_storage().nbytes(), shelf.bytes) == (0, 0, 54)
    assert shelf.put([flat]) == 0  # it is away already
    assert shelf.back([views[0]]) == 48  # the whole flat buffer, since its views share it
    assert flat.tolist() == [float(i) for i in range(12)]
    assert shelf.bytes == 6
    assert shelf.back() == 6
    assert other.tolist() == [2.5, 2.5, 2.5]
    assert shelf.back() == 0
    views[1][0] = 100.0
    assert flat[5] == 100.0


def test_memory_that_cannot_shrink_shows_that_it_is_away():
    mapped = torch.frombuffer(bytearray(torch.ones(4).numpy().tobytes()), dtype=torch.float32)
    assert not mapped.untyped_storage().resizable()
    shelf = Shelf(CPU)
    shelf.put([mapped])
    assert mapped.isnan().all()
    shelf.back()
    assert mapped.tolist() == [1.0] * 4


def test_what_was_dropped_comes_back_as_memory_only():
    tensor = torch.ones(6)
    shelf = Shelf(CPU)
    assert shelf.drop([tensor]) == 24
    assert tensor.untyped_storage().nbytes() == 0
    assert shelf.put([tensor]) == 0
    assert shelf.back() == 24
    assert tensor.fill_(3).sum() == 18


def test_tensors_are_found_in_containers_dataclasses_and_gradients():
    @dataclass
    class Bucket:
        buffer: torch.Tensor
        params: list = field(default_factory=list)

    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    things = {"a": [Bucket(torch.zeros(3), [leaf])], "b": ({1: torch.zeros(4)}, "text", 5)}
    assert sorted(t.numel() for t in tensors_in(things)) == [2, 2, 3, 4]
    same = torch.zeros(8)
    assert sum(s.nbytes() for s in distinct([same, same[2:], torch.zeros(0)], CPU)) == 32
