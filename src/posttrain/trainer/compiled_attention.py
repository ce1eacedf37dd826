"""Causal attention behind shared prefixes by the kernels of `attention_numba.py`, for float32 on a CPU.

They need numba and rows enough to pay for loading it. One thread does all of a forward, as torch does for small models
(`parallel.py`); with several threads torch's own operations are faster. A comparison with `causal.py` before the first
use has the last word.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.numba_code import may_compile, numba_code
from posttrain.trainer.causal import causal_attention

log = logging.getLogger(__name__)

FEWEST = 1024  # rows of a forward
FAR = 1 << 62  # a window that sees everything
ALL = np.empty(0, np.bool_)  # rows are read
TOLERANCE = 1e-5
TRIED = ((0, 0, 0, 9), (0, 9, 9, 70), (0, 9, 79, 2), (0, 0, 81, 5))  # segments on which values must agree

Segment = tuple[int, int, int, int]  # first row and length of the prefix that it stands behind, of the segment itself


@dataclass(frozen=True, slots=True)
class Sight:
    """Who sees whom: a segment its prefix and itself, causally; a query at most `window` keys, its own included."""

    segments: NDArray[np.int64]  # [n, 4]
    scaling: float
    window: int | None
    read: NDArray[np.bool_]  # [R] rows whose result is read, others may be 0; empty: all

    @classmethod
    def of(
        cls, segments: Sequence[Segment], *, scaling: float, window: int | None, read: Tensor | None = None
    ) -> Sight:
        return cls(np.array(segments, np.int64), scaling, window, ALL if read is None else read.numpy())


def takes(rows: Tensor) -> bool:
    """Whether attention of so many rows, [1, .., R, D], is done here."""
    return rows.shape[-2] >= FEWEST and rows.is_cpu and rows.dtype is torch.float32 and compiles()


def compiles() -> bool:
    """Whether kernels of numba do what one thread of torch would."""
    return could_compile() and _agrees()


def could_compile() -> bool:
    """Whether they are asked for, before any is."""
    return torch.get_num_threads() == 1 and may_compile() and sgemm_address() is not None


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
    """[1, R, H, Dv] of [1, H, R, D], [1, G, R, D], [1, G, R, Dv]; differentiable in all three."""
    rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # x[0] would be copied on the way back
    return CompiledAttention.apply(*rows, sight).unsqueeze(0)  # type: ignore[union-attr]


@cache
def sgemm_address() -> int | None:
    """Of `sgemm_`, the matrix product of the BLAS in torch's library; None where torch was built otherwise."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(library)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


class CompiledAttention(torch.autograd.Function):
    """query [R, H, D], key [R, G, D], value [R, G, Dv] -> [R, H, Dv]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        rows, heads, _ = query.shape
        new = query.new_empty if len(sight.read) == 0 else query.new_zeros
        out, log_sums = new(rows, heads, value.shape[2]), query.new_empty(rows, heads)
        _kernels().attend(*_given(query, key, value, sight), (_rows(out), log_sums.numpy()))
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.sight = sight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, log_sums = ctx.saved_tensors
        grads = [x.new_zeros(x.shape) for x in (query, key, value)]
        given = _given(query, key, value, ctx.sight)
        outs = (_rows(out), log_sums.numpy())
        _kernels().attend_backward(*given, outs, _rows(grad), tuple(_rows(x) for x in grads))
        return (*grads, None)


def _kernels() -> ModuleType:
    found = numba_code("posttrain.trainer.attention_numba")
    assert found is not None  # `takes` has said so
    return found


def _given(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> tuple[Any, ...]:
    """sgemm, qkv, segments, how, scratch of `attention_numba.attend`."""
    heads, key_heads = query.shape[1], key.shape[1]
    how = (heads, key_heads, np.float32(sight.scaling), sight.window or FAR, sight.read)
    block = heads // key_heads * _kernels().QUERY_BLOCK
    width = max(key.shape[2], value.shape[2])
    keys = int((sight.segments[:, 1] + sight.segments[:, 3]).max())
    sizes = (block * width, block * width, block * keys, block * keys, block)
    scratch = tuple(torch.empty(size).numpy() for size in sizes)  # aligned alike in every call, so that bits repeat
    return sgemm_address(), tuple(_rows(x) for x in (query, key, value)), sight.segments, how, scratch


def _rows(x: Tensor) -> NDArray[np.float32]:
    return x.detach().contiguous().view(len(x), -1).numpy()


@cache
def _agrees() -> bool:
    """Values and gradients, on segments of all kinds, in grouped heads, with a window and without."""
    if numba_code("posttrain.trainer.attention_numba") is None:
        return False
    try:
        gap = max(_gap(window) for window in (None, 7))
    except Exception as error:  # a numba that cannot compile this, or a BLAS that counts otherwise
        log.warning("compiled attention does not work here (%s): install another version of numba", error)
        return False
    if gap > TOLERANCE:
        log.warning("compiled attention is %.1e off torch's, so that it is not used; please report it", gap)
    return gap <= TOLERANCE


def _gap(window: int | None) -> float:
    """The largest difference from `causal_attention`, relative to the largest number."""
    rows = TRIED[-1][2] + TRIED[-1][3]
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 4, 8), (rows, 2, 8), (rows, 2, 8))
    given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    seed = torch.randn(shapes[0], generator=generator)

    def segment_by_segment(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: list[Tensor] = []
        for start, prefix, first, count in TRIED:
            parts = (query[first : first + count], *(_behind(x, start, prefix, first, count) for x in (key, value)))
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            out.append(causal_attention(q, k, v, scaling=0.3, window=window)[0].transpose(0, 1))
        return torch.cat(out)

    found: list[list[Tensor]] = []
    with torch.enable_grad():
        sight = Sight.of(TRIED, scaling=0.3, window=window)
        for out in (segment_by_segment(*given), CompiledAttention.apply(*given, sight)):
            assert isinstance(out, Tensor)
            found.append([out.detach(), *torch.autograd.grad(out, given, seed)])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


def _behind(x: Tensor, start: int, prefix: int, first: int, count: int) -> Tensor:
    return torch.cat([x[start : start + prefix], x[first : first + count]])
