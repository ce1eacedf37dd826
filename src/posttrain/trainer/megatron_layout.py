"""Where the weights of Hugging Face layout lie in a model that Megatron-core has divided, and among whom.

Ranks are numbered so that neighbours hold parts of the same layers (tensor parallel). Experts are spread over
neighbours, too, which may belong to several such teams (expert parallel); an expert is never cut. All that is left over
is data parallel: other ranks with the very same part, which sum their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from posttrain.trainer.distributed_optimizer import View
from posttrain.trainer.ranks import PATIENCE, Ranks, TrainerConfig


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of one rank."""

    tensor: Any  # has other parts of the same layers
    data: Any  # has the same part of all layers, but for the experts
    expert: Any  # has other experts
    expert_data: Any  # has the same experts
    alone: Any  # this rank
    everyone: Any

    @classmethod
    def of(cls, ranks: Ranks, config: TrainerConfig) -> Groups:
        """Every rank has to call it."""
        tensor, expert = config.tensor_parallel, config.expert_parallel
        return cls(
            _neighbours(ranks.size, tensor),
            _every(ranks.size, tensor),
            _neighbours(ranks.size, expert),
            _every(ranks.size, expert),
            _neighbours(ranks.size, 1),
            _neighbours(ranks.size, ranks.size),
        )


def _neighbours(ranks: int, size: int) -> Any:
    return _group([list(range(first, first + size)) for first in range(0, ranks, size)])


def _every(ranks: int, step: int) -> Any:
    return _group([list(range(first, ranks, step)) for first in range(step)])


def _group(members: list[list[int]]) -> Any:
    """Of these the one that this rank is in."""
    return dist.new_subgroups_by_enumeration(members, timeout=PATIENCE)[0]


def heads_view(groups: int, first: int, last: int, size: int) -> View:
    """Of Megatron's rows of queries, keys and values, which alternate by key head: `first` to `last` of each group.

    groups: key heads of this rank; size: of a head.
    """

    def view(value: Tensor) -> Tensor:
        return value.view(groups, -1, size, *value.shape[1:])[:, first:last]

    return view


def half_view(number: int) -> View:
    """Gate (0) or up (1) projection of the two that Megatron has as one."""

    def view(value: Tensor) -> Tensor:
        return value.view(2, -1, value.shape[-1])[number]

    return view


def stacked_view(value: Tensor) -> Tensor:
    """One of the experts that Hugging Face layout has in one tensor."""
    return value[None]
