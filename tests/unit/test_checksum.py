"""The checksum of weight sync, against the same sum in Python's unbounded integers; the GPU's kernel runs in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit import checksum as module
from rlkit.checksum import checksum, checksum_all, checksum_each, checksums

STEP = 0x9E3779B97F4A7C15


def signed(value: int, bits: int = 64) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def by_hand(bit_patterns: list[int], bits: int) -> int:
    """Sum over elements i of (bits_i + 1) * w_i + 1 a element, w_i the odd hash of i, all modulo 2**64; -0.0 has the bits of 0.0."""
    total = 0
    for i, pattern in enumerate(bit_patterns):
        weight = signed(i * STEP + 1)
        weight = signed(weight ^ (weight >> 29)) | 1
        total += (signed(0 if pattern == 1 << (bits - 1) else pattern, bits) + 1) * weight
    return (total + len(bit_patterns)) % 2**64


def patterns(x: torch.Tensor) -> list[int]:
    """The bits of every element of a float32 or bfloat16 tensor, as unsigned integers."""
    kind, bits = (torch.int16, 16) if x.element_size() == 2 else (torch.int32, 32)
    return [v % 2**bits for v in x.contiguous().view(kind).reshape(-1).tolist()]


def test_float32_equals_the_sum_by_hand():
    values = np.array([0.0, 1.0, -2.5, 3e38, -0.0, 1e-40], dtype=np.float32)
    expected = by_hand([int(b) for b in values.view(np.uint32)], 32)
    assert checksum(torch.from_numpy(values)) == expected
    assert 0 <= expected < 2**64


def test_bfloat16_equals_the_sum_by_hand():
    values = torch.tensor([1.0, -1.0, 0.5, 3.0, -0.0], dtype=torch.bfloat16)
    # bfloat16 is the upper half of float32: 1 = 0x3f80, -1 = 0xbf80, 0.5 = 0x3f00, 3 = 0x4040, -0.0 = 0x8000
    assert checksum(values) == by_hand([0x3F80, 0xBF80, 0x3F00, 0x4040, 0x8000], 16)


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


def test_zeros_show_their_number_but_not_their_sign():
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))
    assert checksum(torch.zeros(4)) == checksum(-torch.zeros(4))
    assert checksum(torch.tensor([1.0, -0.0]).bfloat16()) == checksum(torch.tensor([1.0, 0.0]).bfloat16())
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.tensor(1.0)) == checksum(torch.tensor([1.0]))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_do_not_change_it(monkeypatch, chunk):
    x = torch.randn(20, generator=torch.Generator().manual_seed(1))
    whole = checksum(x)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert checksum(x) == whole


def test_several_at_once_are_each_alone():
    x = {"a": torch.ones(2), "b": torch.zeros(2)}
    alone = [checksum(x["a"]), checksum(x["b"])]
    assert checksums(x) == checksums(x.items()) == dict(zip(x, alone, strict=True))
    assert checksum_all(list(x.values())) == alone
    assert list(checksum_each((n, f"in {n}", t) for n, t in x.items())) == [("a", "in a", alone[0]), ("b", "in b", alone[1])]


def test_gradients_do_not_get_in_the_way():
    assert checksum(torch.nn.Parameter(torch.ones(3))) == checksum(torch.ones(3))


def test_the_tensor_itself_is_left_alone():
    x = torch.tensor([-0.0, 1.0, 2.0], dtype=torch.float64)
    checksum(x)
    assert torch.equal(x.view(torch.int64), torch.tensor([-0.0, 1.0, 2.0], dtype=torch.float64).view(torch.int64))


KERNEL = """
import torch
from rlkit import checksum_kernel as kernel
from rlkit.checksum import checksum_all
from tests_checksum import by_hand, patterns

kernel.PIECE, kernel.BLOCK = 64, 16  # so small that tensors are cut
for dtype in (torch.bfloat16, torch.float32):
    base = torch.randn(400, generator=torch.Generator().manual_seed(2)).to(dtype)
    base[7] = -0.0
    tensors = [base, base[1:66], base[:0], base[3:4], base[-129:], torch.zeros(64, dtype=dtype), base.view(20, 20)[5:9]]
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    found = [s % 2**64 for s in kernel.sums([t.view(kind).reshape(-1) for t in tensors])]
    assert found == [by_hand(patterns(t), 8 * t.element_size()) for t in tensors] == checksum_all(tensors)
    assert kernel.sums([base[:0].view(kind)]) == [0]
"""


def test_the_gpu_s_kernel_gives_the_same_sums():
    """In a process of its own: Triton interprets kernels on the CPU only where it was told so before it was imported."""
    here = Path(__file__)
    code = f"import importlib.util, sys; spec = importlib.util.spec_from_file_location('tests_checksum', {str(here)!r})\n"
    code += "sys.modules['tests_checksum'] = made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made)\n" + KERNEL
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
