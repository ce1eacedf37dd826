"""How well one judge's labels agree with another's, or with the truth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of labels that both sides gave. kappa: Cohen's; NaN when both always say the same thing."""

    count: int
    accuracy: float
    kappa: float
    confusion: dict[tuple[Hashable, Hashable], int]  # (given, judged) -> pairs


def agreement(given: Sequence[Hashable | None], judged: Sequence[Hashable | None]) -> Agreement:
    """given: the labels held for true; judged: those measured. None on either side leaves the pair out.

    kappa = (p_o - p_e) / (1 - p_e) with p_e the agreement by chance of the two sides' own frequencies (Cohen 1960).
    """
    pairs = [(g, j) for g, j in zip(given, judged, strict=True) if g is not None and j is not None]
    if not pairs:
        return Agreement(0, math.nan, math.nan, {})
    total = len(pairs)
    confusion = Counter(pairs)
    observed = sum(g == j for g, j in pairs) / total
    left, right = Counter(g for g, _ in pairs), Counter(j for _, j in pairs)
    chance = sum(left[label] * right[label] for label in left) / total**2
    kappa = math.nan if chance == 1 else (observed - chance) / (1 - chance)
    return Agreement(total, observed, kappa, dict(confusion))


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of two series; NaN when one of them is constant or shorter than 2."""
    n = len(x)
    if n != len(y):
        raise ValueError(f"{n} and {len(y)} values cannot be compared")
    if n < 2:
        return math.nan
    mean_x, mean_y = math.fsum(x) / n, math.fsum(y) / n
    dx, dy = [v - mean_x for v in x], [v - mean_y for v in y]
    spread = math.sqrt(math.fsum(d * d for d in dx) * math.fsum(d * d for d in dy))
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / spread if spread else math.nan
