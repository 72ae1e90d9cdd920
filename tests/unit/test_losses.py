"""Losses, KL estimators and weights against numbers worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlkit import losses
from rlkit.errors import ConfigError


def inputs(logprobs, old, advantages, ref=None, entropy=None, lengths=None):
    n = len(logprobs)
    lengths = lengths or [n]
    return losses.TokenInputs(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.tensor(old),
        sampler_logprobs=torch.tensor(old),
        ref_logprobs=None if ref is None else torch.tensor(ref),
        advantages=torch.tensor(advantages),
        entropy=torch.zeros(n) if entropy is None else torch.tensor(entropy),
        sample=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
    )


def test_ppo_clip_takes_the_smaller_of_both_sides():
    # ratios 1, 1.5, 1.5, 0.5, 0.5 with advantages +1, +1, -1, +1, -1 and clip 0.2 / 0.2
    r = [1.0, 1.5, 1.5, 0.5, 0.5]
    t = inputs([math.log(x) for x in r], [0.0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0])
    loss, metrics = losses.ppo_clip(t)
    assert loss.tolist() == pytest.approx([-1.0, -1.2, 1.5, -0.5, 0.8])
    assert metrics["clip_fraction"].tolist() == [0, 1, 0, 0, 1]
    assert metrics["ratio_max"].max().item() == pytest.approx(1.5)


def test_ppo_clip_passes_no_gradient_where_it_clips():
    t = inputs([math.log(1.5), math.log(1.1)], [0.0, 0.0], [1.0, 2.0])
    losses.ppo_clip(t)[0].sum().backward()
    assert t.logprobs.grad.tolist() == pytest.approx([0.0, -2.2])  # -r A where not clipped


def test_clip_higher_leaves_more_room_above():
    t = inputs([math.log(1.25)], [0.0], [1.0])
    assert losses.ppo_clip(t)[0].item() == pytest.approx(-1.2)
    assert losses.ppo_clip(t, clip_high=0.28)[0].item() == pytest.approx(-1.25)


def test_older_samples_are_weighted_by_a_truncated_ratio():
    t = inputs([math.log(1.5), 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, -1.0])
    t = dataclasses.replace(t, sampler_logprobs=torch.tensor([math.log(0.5), math.log(4.0), math.log(0.2)]))
    loss, metrics = losses.ppo_clip(t, tis_cap=3.0)
    # exp(old - sampler) is 2, 0.25 and 5, which is cut off at 3; the clipped losses are -1.2, -1 and 1
    assert loss.tolist() == pytest.approx([-2.4, -0.25, 3.0])
    assert metrics["tis_weight"].tolist() == pytest.approx([2.0, 0.25, 3.0])
    loss.sum().backward()
    assert t.logprobs.grad.tolist() == pytest.approx([0.0, -0.25, 3.0])  # none where it clips


def test_reinforce():
    t = inputs([-1.0, -2.0], [0.0, 0.0], [3.0, -1.0])
    assert losses.reinforce(t)[0].tolist() == [3.0, -2.0]


def test_kl_estimators_by_hand():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.5])  # d = -0.5
    assert losses.kl_estimate(logp, ref, "k1").item() == pytest.approx(0.5)
    assert losses.kl_estimate(logp, ref, "k2").item() == pytest.approx(0.125)
    assert losses.kl_estimate(logp, ref, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_kl_estimators_against_the_exact_kl_of_two_distributions():
    torch.manual_seed(0)
    p, q = torch.log_softmax(torch.randn(2, 6, dtype=torch.float64), dim=1)
    exact = (p.exp() * (p - q)).sum()
    for name in ("k1", "k3"):  # unbiased: the expectation under p is the KL
        assert (p.exp() * losses.kl_estimate(p, q, name)).sum().item() == pytest.approx(exact.item())


def test_the_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero():
    torch.manual_seed(0)
    z, q = torch.randn(6, dtype=torch.float64), torch.log_softmax(torch.randn(6, dtype=torch.float64), dim=0)

    def gradient(fn):
        leaf = z.clone().requires_grad_()
        fn(torch.log_softmax(leaf, dim=0)).backward()
        return leaf.grad

    def expected(name):  # the sample distribution is held fixed, as in a loss
        return gradient(lambda p: (p.detach().exp() * losses.kl_estimate(p, q, name)).sum())

    exact = gradient(lambda p: (p.exp() * (p - q)).sum())
    reverse = gradient(lambda p: (q.exp() * (q - p)).sum())
    torch.testing.assert_close(expected("k2"), exact)
    torch.testing.assert_close(expected("k1"), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected("k3"), reverse)


def test_token_weights_by_hand():
    lengths = np.array([2, 6])
    assert losses.token_weights(lengths, "token_mean", 10).tolist() == [1 / 8, 1 / 8]
    assert losses.token_weights(lengths, "sequence_mean", 10).tolist() == [1 / 4, 1 / 12]
    assert losses.token_weights(lengths, "constant", 10).tolist() == [1 / 20, 1 / 20]


def test_objective_adds_kl_and_takes_entropy_off():
    t = inputs([-1.0, -1.0], [-1.0, -1.0], [1.0, 3.0], ref=[-1.5, -1.0], entropy=[0.5, 0.1])
    weights = torch.tensor([0.5, 0.5])
    total, metrics = losses.Objective(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)(t, weights)
    assert total.item() == pytest.approx(-2.0 + 0.1 * 0.0625 - 0.01 * 0.3)
    assert metrics["kl"].tolist() == pytest.approx([0.125, 0.0])
    assert metrics["approx_kl"].tolist() == [0.0, 0.0]
    assert metrics["entropy"].tolist() == pytest.approx([0.5, 0.1])


def test_old_to_new_kl_is_never_negative():
    t = inputs([-1.0, -2.0], [-1.5, -1.0], [1.0, 1.0])
    _, metrics = losses.Objective()(t, torch.ones(2))
    d = [0.5, -1.0]  # new - old
    assert metrics["approx_kl"].tolist() == pytest.approx([math.exp(x) - 1 - x for x in d])


def test_a_function_of_a_cell_is_a_loss():
    def mine(t, scale=1.0):
        return t.logprobs * scale, {"double": 2 * t.logprobs}

    t = inputs([-1.0, -2.0], [0.0, 0.0], [1.0, 1.0])
    total, metrics = losses.Objective(mine, options={"scale": 3.0})(t, torch.ones(2))
    assert total.item() == pytest.approx(-9.0)
    assert metrics["double"].tolist() == [-2.0, -4.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"loss": "ppo_clipp"}, "did you mean 'ppo_clip'"),
        ({"loss": 3}, "function of TokenInputs"),
        ({"aggregate": "token_maen"}, "did you mean 'token_mean'"),
        ({"kl_estimator": "k4"}, "Known: k1, k2, k3"),
        ({"kl_coef": math.nan}, "finite"),
        ({"options": {"clip_hihg": 0.3}}, "did you mean 'clip_high'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        losses.Objective(**kwargs)


def test_a_loss_of_the_wrong_shape_or_not_finite_is_refused():
    t = inputs([-1.0, -2.0], [0.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="one loss a token"):
        losses.Objective(lambda t: (t.logprobs.sum(), {}))(t, torch.ones(2))
    with pytest.raises(ValueError, match=r"dict of metrics.*returned Tensor"):
        losses.Objective(lambda t: t.logprobs)(t, torch.ones(2))
    with pytest.raises(ValueError, match="metric 'm'"):
        losses.Objective(lambda t: (t.logprobs, {"m": t.logprobs.sum()}))(t, torch.ones(2))
    with pytest.raises(ValueError, match=r"metric 'm' must have one value a token.*it is a float"):
        losses.Objective(lambda t: (t.logprobs, {"m": 1.0}))(t, torch.ones(2))
    with pytest.raises(ValueError, match="it is nan"):
        losses.Objective(lambda t: (t.logprobs * math.nan, {}))(t, torch.ones(2))


def test_a_negative_kl_coefficient_is_refused():
    with pytest.raises(ConfigError, match="it must be at least 0"):
        losses.Objective(kl_coef=-0.1)
