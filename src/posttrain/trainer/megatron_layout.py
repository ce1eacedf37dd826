"""Where the weights of Hugging Face layout lie in a model that Megatron-core has divided, and among whom.

Ranks are numbered so that neighbours hold parts of the same layers (tensor parallel). Experts are spread over
neighbours, too, which may belong to several such teams (expert parallel); an expert is never cut. All that is left over
is data parallel: other ranks with the very same part, which sum their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.trainer.ranks import Ranks, TrainerConfig


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
    return dist.new_subgroups_by_enumeration([list(range(first, first + size)) for first in range(0, ranks, size)])[0]


def _every(ranks: int, step: int) -> Any:
    return dist.new_subgroups_by_enumeration([list(range(first, ranks, step)) for first in range(step)])[0]


@dataclass(frozen=True, slots=True)
class Shared:
    """Which ranks hold a parameter of Megatron's as this one does, and so have to agree on its update."""

    group: Any  # their gradients are summands of one
    copies: int = 1  # of the group, with the very same gradients: ranks that compute alike what was not divided


View = Callable[[Tensor], Tensor]


def as_it_is(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight in Hugging Face layout: on this rank, views of Megatron's parameters, one after another."""

    shape: torch.Size  # of the whole
    views: tuple[tuple[nn.Parameter, View], ...]
    group: Any = None  # ranks with the other parts, in order; None: it is whole here
    dim: int = 0  # along which it is cut

    def read(self, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """The whole of what `of` has for each parameter (its weight, a moment); every rank of the group has to ask."""
        parts = [view(of(parameter)) for parameter, view in self.views]
        local = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self._own_shape).contiguous()
        if self._size == 1:
            return local
        gathered = [torch.empty_like(local) for _ in range(self._size)]
        dist.all_gather(gathered, local, group=self.group)
        return torch.cat(gathered, self.dim)

    def write(self, whole: Tensor, into: Callable[[nn.Parameter], Tensor]) -> None:
        """The inverse: this rank's part of `whole`, to where `into` says for each parameter."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        own = whole.chunk(self._size, self.dim)[rank]
        for (parameter, view), part in zip(self.views, own.chunk(len(self.views)), strict=True):
            place = view(into(parameter))
            place.copy_(part.reshape(place.shape))

    @property
    def _size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def _own_shape(self) -> list[int]:
        return [size // self._size if d == self.dim else size for d, size in enumerate(self.shape)]


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
