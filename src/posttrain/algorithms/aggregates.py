"""How much each token counts: weights [T], made once for a whole mini-batch, before it is split.

`(loss * weights).sum()` is then the same number for any split into micro-batches or ranks. Only tokens in the mask
count, in the numerator and in every denominator; a batch without any gets zero weights. A sequence is an episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.credit import numbered


def token_mean(mask: Tensor, episode_index: Tensor) -> Tensor:
    """1 / N, N the policy tokens: every token alike

    Yu et al. 2025, DAPO (arXiv 2503.14476), equation 12.
    """
    return _float(mask / mask.sum().clamp(min=1))


def sequence_mean(mask: Tensor, episode_index: Tensor) -> Tensor:
    """1 / (S * n_s): the mean over S sequences of each one's token mean

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), equation 3: every sequence alike, tokens of long ones count less.
    Sequences without a policy token are not among the S.
    """
    counts, sequence = _counts(mask, episode_index)
    return _float(mask / (_nonempty(counts) * counts[sequence].clamp(min=1)))


def sequence_sum_mean(mask: Tensor, episode_index: Tensor) -> Tensor:
    """1 / S: the mean over S sequences of each one's token sum

    Williams 1992, Simple Statistical Gradient-Following Algorithms (Machine Learning 8): the gradient of log p of the
    whole sequence. Sequences without a policy token are not among the S.
    """
    counts, _ = _counts(mask, episode_index)
    return _float(mask / _nonempty(counts))


def fixed_length(mask: Tensor, episode_index: Tensor, *, length: int) -> Tensor:
    """1 / (S * length): a constant instead of the sequence's own length

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2 (Dr. GRPO). `length` is a
    fixed number of tokens, usually the largest that an episode may have.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    return sequence_sum_mean(mask, episode_index) / length


def group_mean(mask: Tensor, episode_index: Tensor, *, group_index: Tensor) -> Tensor:
    """1 / (G * n_g): the mean over G groups of each one's token mean

    Khatri et al. 2025, The Art of Scaling RL Compute for LLMs (arXiv 2510.13786), prompt average: every
    prompt alike, however long its answers. Groups without a policy token are not among the G.
    """
    return sequence_mean(mask, group_index)


def _counts(mask: Tensor, episode_index: Tensor) -> tuple[Tensor, Tensor]:
    """Policy tokens of each sequence [S] and the sequence of each token [T]."""
    sequence_of_token, count = numbered(episode_index)
    counts = torch.zeros(count, dtype=torch.float64, device=mask.device)
    return counts.index_add(0, sequence_of_token, mask.double()), sequence_of_token


def _nonempty(counts: Tensor) -> Tensor:
    return (counts > 0).sum().clamp(min=1)


def _float(weights: Tensor) -> Tensor:
    return weights.to(torch.float32)
