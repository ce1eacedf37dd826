"""The critic's loss and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2; `clip=None` leaves (V - R)^2 / 2

    Schulman et al. 2017, Proximal Policy Optimization (arXiv 1707.06347): the clipped form is that of its code
    (openai/baselines), not of the paper.
    Returns [T], 0 off-mask.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"the value clip must be positive, got {clip}; None switches it off")
    values = torch.where(mask, values, 0.0)
    old_values = torch.where(mask, old_values.detach(), 0.0)
    returns = torch.where(mask, returns.detach(), 0.0)
    squared = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (clipped - returns).square())
    return squared / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) over policy tokens: 1 perfect, 0 no better than a constant; None when R does not vary."""
    target = returns.detach()[mask].double()
    if len(target) < 2:
        return None
    variance = float(target.var(correction=0))
    if variance <= 1e-12 * max(1.0, float(target.abs().max()) ** 2):
        return None
    residual = target - values.detach()[mask].double()
    return 1.0 - float(residual.var(correction=0)) / variance
