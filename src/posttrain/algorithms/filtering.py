"""Which groups are worth an update: dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence


def accepted(scores: Sequence[float], *, low: float = 0.0, high: float = 1.0) -> bool:
    """low < mean score of the group < high

    Yu et al. 2025, DAPO (arXiv 2503.14476), equation 11: groups that are all right or all wrong have no gradient. The
    strict bounds are those of OpenRLHF. A group without scores is not accepted.
    """
    return bool(scores) and low < sum(scores) / len(scores) < high
