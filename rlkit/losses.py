"""Policy losses and KL estimators: pure functions of tokens.

A loss takes `TokenInputs` and returns ``(per_token_loss (M,), {metric: (M,)})``. How the tokens are weighted against each other is apart
from that (`token_weights`), and so is the KL term to the reference (`kl_estimate`), so that each combines with each. Any function of a
notebook cell with the signature of a loss may be given to ``learner.update(batch, loss=fn)``.

M: response tokens of one micro-batch; whole samples, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

Loss = Callable[..., "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]

AGGREGATES = ("token_mean", "sequence_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class TokenInputs:
    """What a loss sees of one micro-batch. Only ``logprobs`` and ``entropy`` carry gradients."""

    logprobs: torch.Tensor  # (M,) float32, nats, of the policy that is being trained, at the sampling temperature
    old_logprobs: torch.Tensor  # (M,) float32, nats, of the learner before this update
    sampler_logprobs: torch.Tensor  # (M,) float32, nats, as the rollout engine reported them
    ref_logprobs: torch.Tensor | None  # (M,) float32, nats, of the frozen reference; None when the batch has none
    advantages: torch.Tensor  # (M,) float32
    entropy: torch.Tensor  # (M,) float32, nats, of the distribution that each token was drawn from
    sample: torch.Tensor  # (M,) int64, which of the micro-batch's samples the token belongs to: 0 ... n_samples - 1
    lengths: torch.Tensor  # (n_samples,) int64, response tokens


def ppo_clip(
    t: TokenInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, tis_cap: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprob - old_logprob)``, token by token.

    PPO (Schulman et al. 2017) eq. 7. With ``clip_high > clip_low`` it is the "clip-higher" of DAPO (Yu et al. 2025) eq. 8.

    With ``tis_cap`` above 0 the whole is multiplied by ``min(exp(old_logprob - sampler_logprob), tis_cap)``, for samples of an older
    policy version than the learner's: the decoupled objective of Hilton et al. 2022 (eq. 4), its weight cut off as in IMPALA
    (Espeholt et al. 2018, eq. 1). The sampler's log-probs must have been recorded.
    """
    import torch

    ratio = (t.logprobs - t.old_logprobs).exp()
    plain = ratio * t.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * t.advantages
    loss, metrics = -torch.minimum(plain, clipped), {"clip_fraction": (clipped < plain).float(), "ratio_max": ratio.detach()}
    if tis_cap > 0:
        weight = (t.old_logprobs - t.sampler_logprobs).exp().clamp(max=tis_cap).detach()
        loss, metrics = loss * weight, metrics | {"tis_weight": weight}
    return loss, metrics


def reinforce(t: TokenInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``-A logprob``: the plain policy gradient (Williams 1992), with no ratio and no clip."""
    return -t.advantages * t.logprobs, {}


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip, "reinforce": reinforce}


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate (M,) of KL(policy || reference) from samples of the policy. J. Schulman, "Approximating KL Divergence" (2020).

    With ``d = ref_logprob - logprob``:

    - ``k1 = -d``: unbiased, may be negative. As a loss term its gradient is the score alone, whose expectation is zero: it is a number
      to watch, or to put into the reward; added to the loss it only adds noise.
    - ``k2 = d**2 / 2``: biased low-variance value; its gradient, ``-d`` times the score, is in expectation that of
      KL(policy || reference).
    - ``k3 = exp(d) - 1 - d``: unbiased, never negative, the KL of GRPO (Shao et al. 2024, eq. 4); its gradient, ``1 - exp(d)`` times
      the score, is that of KL(reference || policy) in expectation, which agrees with the other to first order near d = 0.

    The sample itself is held fixed: gradients flow through ``logprobs`` only.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return d.exp() - 1 - d
    raise ConfigError(_unknown("kl_estimator", estimator, KL_ESTIMATORS))


def token_weights(lengths: np.ndarray, aggregate: str, max_tokens: int) -> np.ndarray:
    """(S,) float64: the weight of each token of sample s in the loss of the whole mini-batch, so that loss = sum of weight x token loss.

    ``lengths`` (S,) are the response tokens of *all* samples of the mini-batch, on all ranks: with weights made before the split,
    neither ranks nor micro-batches can change the result.

    - ``token_mean``: one over all tokens, so long samples count more (DAPO, Yu et al. 2025, eq. 8).
    - ``sequence_mean``: mean over each sample's tokens, then over samples (GRPO, Shao et al. 2024, eq. 3).
    - ``constant``: sum over tokens divided by ``max_tokens``, then mean over samples; no length bias (Dr. GRPO, Liu et al. 2025).
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    samples = len(lengths)
    if aggregate == "token_mean":
        return np.full(samples, 1.0 / max(1.0, lengths.sum()))
    if aggregate == "sequence_mean":
        return 1.0 / (samples * np.maximum(lengths, 1.0))
    if aggregate == "constant":
        return np.full(samples, 1.0 / (samples * float(max_tokens)))
    raise ConfigError(_unknown("aggregate", aggregate, AGGREGATES))


@dataclass(frozen=True)
class Objective:
    """A loss with everything that is added to it: checked where it is made, then sent to the ranks."""

    loss: str | Loss = "ppo_clip"
    aggregate: str = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0  # a bonus: entropy_coef x entropy is subtracted from the loss
    options: Mapping[str, Any] | None = None  # keywords of the loss

    def __post_init__(self) -> None:
        if isinstance(self.loss, str):
            if self.loss not in LOSSES:
                raise ConfigError(_unknown("loss", self.loss, LOSSES))
        elif not callable(self.loss):
            raise ConfigError(f"loss must be a name ({', '.join(LOSSES)}) or a function of TokenInputs; it is {self.loss!r}.")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(_unknown("aggregate", self.aggregate, AGGREGATES))
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ConfigError(_unknown("kl_estimator", self.kl_estimator, KL_ESTIMATORS))
        for name in ("kl_coef", "entropy_coef"):
            if not np.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a finite number.")
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef is {self.kl_coef!r}; it must be at least 0: a negative one pays for leaving the reference.")
        self._check_options()

    def _check_options(self) -> None:
        import inspect

        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters]
        for key in self.options or {}:
            if key not in known:
                have = f"it takes {', '.join(known)}" if known else "it takes none"
                raise ConfigError(f"Loss {self.name!r} has no option {key!r}{nearest(key, known) or ';'} {have}.")

    @property
    def function(self) -> Loss:
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss

    @property
    def name(self) -> str:
        return self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", type(self.loss).__name__)

    def __call__(self, t: TokenInputs, weights: torch.Tensor, check: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss (scalar) and its metrics (M,). ``weights`` (M,) are each token's `token_weights`.

        ``check`` False leaves it to the caller to see that the loss is finite, for which the host waits for the device.

        Raises:
            ValueError: the loss returned another shape than (M,), or a value that is not finite.
        """
        returned = self.function(t, **(self.options or {}))
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise ValueError(
                f"it must return (one loss a token, dict of metrics); it returned {type(returned).__name__} and not such a pair"
            )
        per_token, extra = returned
        if per_token.shape != t.logprobs.shape:
            raise ValueError(f"it must return one loss a token, shape {tuple(t.logprobs.shape)}; it returned {tuple(per_token.shape)}")
        for name, value in extra.items():
            shape = getattr(value, "shape", None)
            if shape != t.logprobs.shape:
                has = f"it is a {type(value).__name__}" if shape is None else f"it has {tuple(shape)}"
                raise ValueError(f"metric {name!r} must have one value a token, a tensor of shape {tuple(t.logprobs.shape)}; {has}")
        metrics = {name: value.detach().float() for name, value in extra.items()}
        total = (weights * per_token).sum()
        if t.ref_logprobs is not None:
            kl = kl_estimate(t.logprobs, t.ref_logprobs, self.kl_estimator)
            metrics["kl"] = kl.detach()
            if self.kl_coef:
                total = total + self.kl_coef * (weights * kl).sum()
        if self.entropy_coef:
            total = total - self.entropy_coef * (weights * t.entropy).sum()
        metrics["entropy"] = t.entropy.detach()
        metrics["approx_kl"] = kl_estimate(t.old_logprobs, t.logprobs, "k3").detach()
        if check and not bool(total.isfinite()):
            raise ValueError(f"it is {float(total.detach())} on a micro-batch of {len(t.lengths)} samples")
        return total, metrics


def _unknown(what: str, value: Any, known: Any) -> str:
    return f"{what} {value!r} is not known{nearest(str(value), known) or '.'} Known: {', '.join(known)}."
