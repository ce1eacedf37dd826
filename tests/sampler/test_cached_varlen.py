"""Packed attention over the cache, with FlashAttention's product written out: what a GPU does, where there is none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.sampler import cached_varlen
from posttrain.sampler.cached_attention import CachedAttention, Chunk
from posttrain.sampler.cached_varlen import CachedVarlen
from posttrain.sampler.kv_cache import KVCache, LayerShape

HEADS, KEY_HEADS, DIM, ROWS, CAPACITY = 4, 2, 8, 5, 64


def written_out(qkv: tuple[Tensor, ...], ends: tuple[Tensor, Tensor], longest: tuple[int, int], **how: Any) -> Tensor:
    """As `packed_flash_attention` promises: queries aligned with the end of their keys."""
    q, k, v = qkv
    outs: list[Tensor] = []
    spans = [[(int(a), int(b)) for a, b in pairwise(e)] for e in ends]
    assert longest == tuple(max(b - a for a, b in span) for span in spans)
    for (qa, qb), (ka, kb) in zip(*spans, strict=True):
        keys, values = (x[ka:kb].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        distance = torch.arange(kb - qb + qa - ka, kb - ka)[:, None] - torch.arange(kb - ka)
        visible = (distance >= 0) & (distance < (how["window"] or kb))
        scores = torch.einsum("qhd,khd->hqk", q[qa:qb], keys) * how["scaling"]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs)


def caches() -> list[KVCache]:
    made = [KVCache({0: LayerShape(KEY_HEADS, DIM, DIM, torch.float32)}, torch.device("cpu")) for _ in range(2)]
    for cache in made:
        cache.reserve(ROWS, CAPACITY)
        filler = torch.Generator().manual_seed(1)
        for tensor in cache.layer(0):
            tensor.copy_(torch.randn(tensor.shape, generator=filler))
    return made


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(
    ("decode", "prompts"),
    [
        ([], [(3, 0, 9), (0, 0, 30)]),
        ([(0, 11), (2, 63)], []),
        ([(1, 5)], [(3, 20, 6), (4, 0, 17), (0, 33, 1), (2, 1, 40)]),
    ],
    ids=["fresh", "decoded", "mixed"],
)
def test_equals_the_buckets(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    decode: list[tuple[int, int]],
    prompts: list[tuple[int, int, int]],
) -> None:
    monkeypatch.setattr(cached_varlen, "packed_flash_attention", written_out)
    chunks: list[Chunk] = []
    for row, start, count in [*((row, start, 1) for row, start in decode), *prompts]:
        chunks.append(Chunk(row, start, count, sum(c.count for c in chunks)))
    new = torch.tensor([[c.row, c.start + i] for c in chunks for i in range(c.count)]).T
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, new.shape[1], DIM, generator=noise) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    first, second = caches()
    ends = [start + 1 for _, start in decode]
    buckets = CachedAttention(first, new[0], new[1], [row for row, _ in decode], ends, chunks[len(decode) :])
    expected = buckets.attend(0, q, k, v, scaling=0.3, sliding_window=window)
    got = CachedVarlen(second, new, chunks).attend(0, q, k, v, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first.layer(0), second.layer(0), strict=True))


def test_refuses_what_flash_attention_lacks() -> None:
    cache, _ = caches()
    chunk = Chunk(0, 0, 1, 0)
    one = torch.zeros(1, KEY_HEADS, 1, DIM)
    with pytest.raises(NotImplementedError, match="softcap"):
        CachedVarlen(cache, torch.zeros(2, 1, dtype=torch.long), [chunk]).attend(
            0, one, one, one, scaling=1.0, softcap=30.0
        )
