"""Numbers that say whether an update was healthy. Nothing here has a gradient or changes a loss.

Each takes the tokens of a whole mini-batch; None means that the batch had no policy token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algorithms.kl import k1, k3


def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> float | None:
    """The share of policy tokens whose gradient the PPO clip cuts to 0.

    Cut are: A > 0 with rho > 1 + clip_high, and A < 0 with rho < 1 - clip_low.
    """
    if not bool(mask.any()):
        return None
    ratio = (logprobs.detach() - old_logprobs.detach())[mask].double().exp()
    advantages = advantages.detach()[mask]
    cut = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return float(cut.double().mean())


def approx_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> float | None:
    """KL(old || new) per policy token, estimated by k3 on tokens that the old policy sampled."""
    return _mean(k3(old_logprobs.detach().double(), logprobs.detach().double(), mask), mask)


def effective_sample_size(logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> float | None:
    """(sum w)^2 / (N * sum w^2), w = pi / mu per token: 1 when both distributions agree, 1 / N at worst."""
    if not bool(mask.any()):
        return None
    log_weight = (logprobs.detach() - sampling_logprobs.detach())[mask].double()
    weight = (log_weight - log_weight.max()).exp()  # the ratio does not change with a common factor
    return float(weight.sum().square() / (len(weight) * weight.square().sum()))


def mismatch(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, far: float = 2.0) -> dict[str, float]:
    """How far the trainer's log-probs lie from the sampler's, for the same weights, over policy tokens.

    Keys: mean_gap and max_gap of |trainer - sampler| (nats); k1 and k3 of KL(sampler || trainer); ess; share_far, the
    share of tokens whose ratio leaves [1 / far, far], which a correction would clip. Empty without policy tokens.
    Raises ValueError when the sampler's log-prob is missing for a policy token.
    """
    if not bool(mask.any()):
        return {}
    trainer, sampler = logprobs.detach()[mask].double(), rollout_logprobs.detach()[mask].double()
    missing = int(sampler.isnan().sum())
    if missing:
        raise ValueError(f"the sampler's log-prob is missing for {missing} of {len(sampler)} policy tokens")
    everywhere = torch.ones_like(sampler, dtype=torch.bool)
    gap = (trainer - sampler).abs()
    return {
        "mean_gap": float(gap.mean()),
        "max_gap": float(gap.max()),
        "k1": float(k1(sampler, trainer, everywhere).mean()),
        "k3": float(k3(sampler, trainer, everywhere).mean()),
        "share_far": float((gap > math.log(far)).double().mean()),
        "ess": effective_sample_size(trainer, sampler, everywhere) or 0.0,
    }


def _mean(values: Tensor, mask: Tensor) -> float | None:
    return float(values[mask].mean()) if bool(mask.any()) else None
