"""Comparing the entries of a group: what the group estimators share.

An entry is an episode, or a turn of one. Three rules hold for every estimator built on this:
* A group is the entries with one group index; each entry counts once, whatever number of tokens it has.
* When the returns of a group are equal up to 1e-6 * max(1, largest |return|) the group has no signal: exactly 0.
* A group of one has no baseline: exactly 0. `singleton="raw"` takes 0 as its baseline and 1 as its std instead, as verl
  does for most of its estimators.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import EpisodeReturns

EQUAL_TOLERANCE = 1e-6
Std = Literal["sample", "population", "none"]
Singleton = Literal["zero", "raw"]


def differs(entries: EpisodeReturns) -> Tensor:
    """[G] bool: max - min > EQUAL_TOLERANCE * max(1, max |r|)."""
    highest, lowest = by_group(entries, "amax"), by_group(entries, "amin")
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return highest - lowest > EQUAL_TOLERANCE * scale


def by_group(entries: EpisodeReturns, reduce: Literal["amax", "amin"]) -> Tensor:
    """[G] the largest or smallest return of each group."""
    empty = torch.full((entries.group_count,), torch.nan, dtype=torch.float64, device=entries.returns.device)
    return empty.scatter_reduce(0, entries.group, entries.returns, reduce, include_self=False)


def sum_by_group(values: Tensor, entries: EpisodeReturns) -> Tensor:
    """[E] -> [G]"""
    total = torch.zeros(entries.group_count, dtype=torch.float64, device=values.device)
    return total.index_add(0, entries.group, values)


def sizes(entries: EpisodeReturns) -> Tensor:
    """[G] how many entries each group has."""
    return sum_by_group(torch.ones_like(entries.returns), entries)


def centred(entries: EpisodeReturns, singleton: Singleton = "zero") -> Tensor:
    """[E] returns minus their group's mean, exactly 0 without signal."""
    return minus_baseline(entries, sum_by_group(entries.returns, entries) / sizes(entries), singleton)


def minus_baseline(entries: EpisodeReturns, baseline: Tensor, singleton: Singleton = "zero") -> Tensor:
    """[E] returns minus the baseline [G] of their group, exactly 0 without signal."""
    if singleton not in ("zero", "raw"):
        raise ValueError(f'singleton is {singleton!r}; expected "zero" or "raw"')
    above = entries.returns - baseline[entries.group]
    above = torch.where(differs(entries)[entries.group], above, 0.0)
    if singleton == "raw":
        above = torch.where((sizes(entries) == 1)[entries.group], entries.returns, above)
    return above


def spread_of(entries: EpisodeReturns, std: Std) -> Tensor:
    """[G] standard deviation of the returns of each group, "none" and groups of one give 1."""
    if std not in ("sample", "population", "none"):
        raise ValueError(f'std is {std!r}; expected "sample", "population" or "none"')
    size = sizes(entries)
    if std == "none":
        return torch.ones_like(size)
    mean = sum_by_group(entries.returns, entries) / size
    squares = sum_by_group((entries.returns - mean[entries.group]).square(), entries)
    degrees = size - 1 if std == "sample" else size
    return torch.where(size == 1, 1.0, (squares / degrees.clamp(min=1)).sqrt())


def normalised(entries: EpisodeReturns, *, std: Std, eps: float, singleton: Singleton = "zero") -> Tensor:
    """[E] (r - mean_G) / (std_G + eps), exactly 0 without signal; without std no eps either."""
    above = centred(entries, singleton)
    scale = spread_of(entries, std) + (0.0 if std == "none" else eps)
    return torch.where(above == 0, 0.0, above / scale[entries.group])
