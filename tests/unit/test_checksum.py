"""The checksum of weight sync, against the same sum in Python's unbounded integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkit import checksum as module
from rlkit.checksum import checksum, checksums

STEP = 0x9E3779B97F4A7C15


def signed(value: int, bits: int = 64) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def by_hand(bit_patterns: list[int], bits: int) -> int:
    """Sum over elements i of (bits_i + 1) * w_i + 1 a element, w_i the odd hash of i, all modulo 2**64."""
    total = 0
    for i, pattern in enumerate(bit_patterns):
        weight = signed(i * STEP + 1)
        weight = signed(weight ^ (weight >> 29)) | 1
        total += (signed(pattern, bits) + 1) * weight
    return (total + len(bit_patterns)) % 2**64


def test_float32_equals_the_sum_by_hand():
    values = np.array([0.0, 1.0, -2.5, 3e38, -0.0, 1e-40], dtype=np.float32)
    expected = by_hand([int(b) for b in values.view(np.uint32)], 32)
    assert checksum(torch.from_numpy(values)) == expected
    assert 0 <= expected < 2**64


def test_bfloat16_equals_the_sum_by_hand():
    values = torch.tensor([1.0, -1.0, 0.5, 3.0], dtype=torch.bfloat16)
    # bfloat16 is the upper half of float32: 1 = 0x3f80, -1 = 0xbf80, 0.5 = 0x3f00, 3 = 0x4040
    assert checksum(values) == by_hand([0x3F80, 0xBF80, 0x3F00, 0x4040], 16)


def test_the_shape_does_not_matter_but_the_order_does():
    x = torch.arange(12, dtype=torch.float32)
    assert checksum(x) == checksum(x.reshape(3, 4))
    assert checksum(x.reshape(3, 4).T) == checksum(x.reshape(3, 4).T.contiguous()) != checksum(x)
    assert checksum(x.flip(0)) != checksum(x)


def test_one_flipped_bit_shows():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = checksum(x)
    for at, bit in [(0, 0), (500, 13), (999, 31)]:
        y = x.clone()
        bits = y.view(torch.int32)
        bits[at] ^= -(2**31) if bit == 31 else 1 << bit
        assert checksum(y) != before


def test_zeros_show_their_number_and_sign():
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))
    assert checksum(torch.zeros(4)) != checksum(-torch.zeros(4))
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.tensor(1.0)) == checksum(torch.tensor([1.0]))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_do_not_change_it(monkeypatch, chunk):
    x = torch.randn(20, generator=torch.Generator().manual_seed(1))
    whole = checksum(x)
    monkeypatch.setattr(module, "_CHUNK", {"cpu": chunk})
    assert checksum(x) == whole


def test_checksums_takes_mappings_and_pairs():
    x = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert checksums(x) == checksums(x.items()) == {"a": checksum(x["a"]), "b": checksum(x["b"])}


def test_gradients_do_not_get_in_the_way():
    assert checksum(torch.nn.Parameter(torch.ones(3))) == checksum(torch.ones(3))


def test_the_tensor_itself_is_left_alone():
    x = torch.arange(5, dtype=torch.float64)
    checksum(x)
    assert torch.equal(x, torch.arange(5, dtype=torch.float64))
