"""FlashAttention on packed rows against attention written out; skipped where there is no GPU, or not this version.

Version 4 leaves windows and heads of other sizes to version 2.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from posttrain.trainer.flash_attention import packed_flash_attention, version_on

from .test_prefix_varlen import plain_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of what compiles version 4
]
VERSIONS = [2, 4]
SHAPES = {  # heads, key heads, head size, window, (queries, keys) of every sequence
    "groups of seven behind a prefix": (14, 2, 64, None, [(600, 600), *[(256, 768)] * 3, (1, 513)]),
    "groups of seven, other lengths": (14, 2, 64, None, [(33, 33), (500, 800)]),
    "ragged": (4, 4, 128, None, [(1, 1), (130, 130), (64, 65), (7, 300)]),
    "window": (8, 2, 64, 100, [(300, 300), (20, 500), (128, 128)]),
    "wide heads": (4, 1, 256, None, [(70, 90), (200, 200)]),
    "one sequence": (2, 1, 64, None, [(40, 40)]),
}


def needed(version: int) -> None:
    if version == 4 and version_on(torch.device("cuda")) != 4:
        pytest.skip("no FlashAttention 4, or not a GPU of its kind")


def rows(heads: int, count: int, size: int, seed: int) -> Tensor:
    made = torch.randn(heads, count, size, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()
    return made.transpose(0, 1).requires_grad_()  # as projections leave them: not contiguous


def scene(name: str) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, int], int | None]:
    heads, key_heads, size, window, lengths = SHAPES[name]
    queries, keys = zip(*lengths, strict=True)
    qkv = rows(heads, sum(queries), size, 0), rows(key_heads, sum(keys), size, 1), rows(key_heads, sum(keys), size, 2)
    ends = tuple(torch.tensor([0, *accumulate(of)], dtype=torch.int32, device="cuda") for of in (queries, keys))
    return qkv, ends, (max(queries), max(keys)), window  # type: ignore[return-value]


def gradients(out: Tensor, qkv: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), qkv)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", list(SHAPES))
def test_values_and_gradients(name: str, version: int) -> None:
    needed(version)
    qkv, ends, longest, window = scene(name)
    scaling = qkv[0].shape[2] ** -0.5
    ours = gradients(packed_flash_attention(qkv, ends, longest, scaling=scaling, window=window, version=version), qkv)
    wide = tuple(x.detach().float().requires_grad_() for x in qkv)
    plain = gradients(plain_attention(wide, ends, longest, scaling=scaling, window=window, version=0), wide)  # type: ignore[arg-type]
    for mine, reference in zip(ours, plain, strict=True):
        assert (mine.float() - reference).abs().max() < 2e-2 * reference.abs().max()


@pytest.mark.parametrize("version", VERSIONS)
def test_compilers_see_one_operator_whatever_the_lengths(version: int) -> None:
    needed(version)

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int]) -> Tensor:
        return packed_flash_attention((q * 2, k, v), ends, longest, scaling=0.125, window=None, version=version) + 1

    graphs = 0

    def counted(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counted)
    for name in ("groups of seven behind a prefix", "groups of seven, other lengths"):
        qkv, ends, longest, _ = scene(name)
        for mine, reference in zip(
            gradients(compiled(*qkv, ends, longest), qkv), gradients(attend(*qkv, ends, longest), qkv), strict=True
        ):
            torch.testing.assert_close(mine, reference, atol=2e-2, rtol=2e-2)
    assert graphs == 1
