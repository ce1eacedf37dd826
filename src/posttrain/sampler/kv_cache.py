"""Keys and values of every layer in slots: one row of a contiguous tensor per sequence.

Knows tensors and row numbers only; which sequence owns which row is `slots.py`'s. Rows can be moved and copied, so that
the sequences being decoded stand together in the first rows and attention reads them as one view, without a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token."""

    heads: int  # key-value heads
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """`rows` slots of `capacity` tokens, for layers of any shapes. Memory is allocated and grown by `reserve`."""

    def __init__(self, shapes: dict[int, LayerShape], device: torch.device) -> None:
        self.shapes = shapes
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes.values())
        self.device = device
        self.rows = 0
        self.capacity = 0
        self.generation = 0  # counts allocations: whoever remembers an address asks whether it still holds
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> K [rows, heads, capacity, key_dim], V

    def reserve(self, rows: int, capacity: int) -> None:
        """Makes room for that much, keeping what the common part holds. New memory is zero, for a masked key of
        uninitialised memory may be NaN, and 0 * NaN is NaN."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        for layer, shape in self.shapes.items():
            olds = self._layers.pop(layer, (None, None))
            keys, values = (
                self._grown(old, (rows, shape.heads, capacity, dim), shape.dtype)
                for old, dim in zip(olds, (shape.key_dim, shape.value_dim), strict=True)
            )
            self._layers[layer] = (keys, values)
        self.rows, self.capacity = rows, capacity
        self.generation += 1

    def _grown(self, old: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        new = torch.zeros(shape, dtype=dtype, device=self.device)
        if old is not None:
            rows, tokens = min(shape[0], self.rows), min(shape[2], self.capacity)
            new[:rows, :, :tokens] = old[:rows, :, :tokens]
        return new

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(K [rows, heads, capacity, key_dim], V [rows, heads, capacity, value_dim])."""
        return self._layers[layer]

    def write(self, layer: int, place: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value [T, heads, dim] at `place` [T * heads], see `places`."""
        keys, values = self._layers[layer]
        keys.view(-1, keys.shape[-1]).index_copy_(0, place, key.reshape(-1, keys.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, place, value.reshape(-1, values.shape[-1]))

    def places(self, rows: Tensor, positions: Tensor, heads: int) -> Tensor:
        """[T * heads] index into a layer seen as [rows * heads * capacity, dim], for [T] rows and positions."""
        head = torch.arange(heads, device=rows.device)
        return ((rows[:, None] * heads + head) * self.capacity + positions[:, None]).view(-1)

    def copy_rows(self, target: Sequence[int], source: Sequence[int], tokens: int) -> None:
        """target[i] gets the first `tokens` positions of source[i]; all are read before any is written, so a
        permutation of rows is safe."""
        to = torch.tensor(target, device=self.device)
        of = torch.tensor(source, device=self.device)
        for pair in self._layers.values():
            for tensor in pair:
                part = tensor[:, :, :tokens]
                part.index_copy_(0, to, part.index_select(0, of))

    def drop(self) -> None:
        """Gives the memory back."""
        self._layers.clear()
        self.rows = self.capacity = 0
        self.generation += 1
