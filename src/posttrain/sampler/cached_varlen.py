"""The sampler's attention on a GPU outside CUDA graphs: prompts and observations, their past in the KV cache.

What `cached_attention.py` does in buckets, without padding or masks: one FlashAttention call on packed rows per layer.
The whole past of every sequence is gathered first, unless none has one; beside the products that is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.sampler.cached_attention import Chunk
from posttrain.sampler.kv_cache import KVCache
from posttrain.trainer.flash_attention import packed_flash_attention, version_on


class CachedVarlen:
    """Writes keys and values where they belong and attends; made anew for every forward. See `use_varlen`."""

    def __init__(self, cache: KVCache, new: Tensor, chunks: Sequence[Chunk]) -> None:
        """new: [2, T] cache row and position of every new token; chunks: all of them, in order, decoded tokens too."""
        self._cache = cache
        self._new = new
        self._version = version_on(new.device)
        counts = [chunk.count for chunk in chunks]
        lengths = [chunk.start + chunk.count for chunk in chunks]
        self._longest = (max(counts), max(lengths))
        self._total = sum(lengths)
        self._fresh = self._total == sum(counts)
        bounds = torch.tensor([[0, *counts], [0, *lengths], [0, *(chunk.row for chunk in chunks)]])
        bounds[:2] = bounds[:2].cumsum(1)
        bounds = bounds.to(new.device, non_blocking=True)
        self._ends = (bounds[0].int(), bounds[1].int())
        self._places: dict[int, tuple[Tensor, Tensor | None]] = {}  # key heads -> of the new tokens, of the whole past
        self._starts, self._rows = bounds[1], bounds[2, 1:]

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        **extras: Any,
    ) -> Tensor:  # [1, T, H, D]
        if extras:
            raise NotImplementedError(f"varlen attention lacks {', '.join(extras)}; use_varlen tells when to use it")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, h, D]
        heads = k.shape[1]
        new, past = self._places_of(heads)
        self._cache.write(layer_idx, new, k, v)
        if past is not None:
            k, v = (
                layer.view(-1, layer.shape[-1]).index_select(0, past).view(self._total, heads, -1)
                for layer in self._cache.layer(layer_idx)
            )
        out = packed_flash_attention(
            (q, k, v), self._ends, self._longest, scaling=scaling, window=sliding_window, version=self._version
        )
        return out[None]

    def _places_of(self, heads: int) -> tuple[Tensor, Tensor | None]:
        if heads not in self._places:
            past = None if self._fresh else self._cache.places(*self._whole_past(), heads=heads)
            self._places[heads] = (self._cache.places(*self._new, heads=heads), past)
        return self._places[heads]

    def _whole_past(self) -> tuple[Tensor, Tensor]:
        """([sum of lengths] cache rows, positions); nothing here waits for the device."""
        lengths = self._starts.diff()
        rows, starts = (
            torch.repeat_interleave(x, lengths, output_size=self._total) for x in (self._rows, self._starts[:-1])
        )
        return rows, torch.arange(self._total, device=rows.device) - starts
