"""RMSNorm in few passes against transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from posttrain.trainer.norms import RmsNorm, quicken_norms

from .models import tiny_policy


def own_and_ours(norm: nn.Module, x: Tensor, seed: Tensor) -> list[tuple[Tensor, ...]]:
    found: list[tuple[Tensor, ...]] = []
    for forward in (lambda x: type(norm).forward(norm, x), norm.forward):
        y = forward(x)
        found.append((y, *torch.autograd.grad(y, (x, norm.weight), seed)))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "mistral", "granite"])
def test_every_norm_of_a_model(name: str) -> None:
    module = tiny_policy(name).module
    norms = [part for part in module.modules() if type(part).__name__.endswith("RMSNorm")]
    assert quicken_norms(module) == len(norms) > 0
    for norm in norms:
        with torch.no_grad():
            norm.weight += 0.3 * torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(1))
        x = torch.randn(1, 7, 3, len(norm.weight), generator=torch.Generator().manual_seed(2)).requires_grad_()
        own, ours = own_and_ours(norm, x, torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
        for a, b in zip(own, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradcheck_in_float64() -> None:
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-6), (x, weight))


def test_a_frozen_weight_gets_none() -> None:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.ones(3)
    RmsNorm.apply(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    y = RmsNorm.apply(x.detach(), weight.requires_grad_(), 1e-6)
    assert torch.autograd.grad(y.sum(), weight)[0].shape == (3,)


def test_what_is_not_the_equation_is_left_alone() -> None:
    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01

    odd, half = OddRMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6, dtype=torch.bfloat16)
    assert quicken_norms(nn.ModuleList([odd, half])) == 0
    assert quicken_norms(tiny_policy("cohere").module) == 0  # LayerNorm


def test_a_copy_has_its_own_weights() -> None:
    norm = nn.RMSNorm(4, eps=1e-6)
    assert quicken_norms(norm) == 1
    other = copy.deepcopy(norm)
    with torch.no_grad():
        norm.weight.zero_()
    assert other(torch.ones(1, 4)).sum() > 3.9
