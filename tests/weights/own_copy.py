"""A sampler that has its own copy of the weights, as engines have: the native one on a second policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from posttrain.sampler import own_copy
from posttrain.trainer.policy import Policy


class OwnCopy(own_copy.OwnCopy):
    """Has weights from the beginning, and is never in the middle of a request when others come."""

    def __init__(self, model: Policy, tokenizer: Any | None = None) -> None:
        version = model.version
        super().__init__(model, tokenizer, truncation="allow")
        model.version = version

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load(tensors, version)
        self.reset()
