import pytest

from rlkit.config import TrainSpec
from rlkit.zero.schedule import lr_at


def test_warmup_then_constant():
    spec = TrainSpec(lr=8.0, warmup_steps=4)
    assert [lr_at(s, spec) for s in (0, 1, 3, 4, 99)] == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_linear_decay_ends_at_the_floor():
    spec = TrainSpec(lr=1.0, warmup_steps=2, schedule="linear", total_steps=12, min_lr_ratio=0.1)
    assert [lr_at(s, spec) for s in (0, 1)] == [0.5, 1.0]
    assert lr_at(2, spec) == pytest.approx(1.0)
    assert lr_at(7, spec) == pytest.approx(0.55)
    assert lr_at(12, spec) == lr_at(500, spec) == pytest.approx(0.1)


def test_cosine_decay_is_half_way_in_the_middle():
    spec = TrainSpec(lr=2.0, schedule="cosine", total_steps=10)
    assert lr_at(0, spec) == pytest.approx(2.0)
    assert lr_at(5, spec) == pytest.approx(1.0)
    assert lr_at(10, spec) == pytest.approx(0.0, abs=1e-12)
