"""The fused log-prob and entropy against autograd through full logits, and against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.trainer import kept
from posttrain.trainer.fused import VOCABULARY_BLOCK, LogitsRule, fused_logprobs, head_product


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rule: LogitsRule
) -> tuple[Tensor, Tensor]:
    """The reference: all logits at once."""
    logp = (rule.apply(torch.nn.functional.linear(hidden, weight, bias)) / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(count: int = 7, vocabulary: int = 11, size: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((count, size), (vocabulary, size), (vocabulary,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(t.requires_grad_() for t in tensors), torch.randint(vocabulary, (count,), generator=generator)]


RULES = [LogitsRule(), LogitsRule(scale=0.3), LogitsRule(softcap=1.5), LogitsRule(scale=2.0, softcap=3.0)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("logits_per_chunk", [1, 33, 10_000])
def test_values_and_gradients(rule: LogitsRule, temperature: float, with_bias: bool, logits_per_chunk: int) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    given = (hidden, weight, bias if with_bias else None, targets)
    scales = torch.randn(2, 7, dtype=torch.float64)
    expected = plain(*given, temperature, rule)
    ours = fused_logprobs(
        *given, temperature=temperature, rule=rule, with_entropy=True, logits_per_chunk=logits_per_chunk
    )
    for a, b in zip(ours, expected, strict=True):
        assert a is not None
        assert torch.allclose(a, b, atol=1e-12)
    expected_grads = torch.autograd.grad((expected[0] * scales[0] + expected[1] * scales[1]).sum(), leaves)
    assert ours[1] is not None
    grads = torch.autograd.grad((ours[0] * scales[0] + ours[1] * scales[1]).sum(), leaves)
    for a, b in zip(grads, expected_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("block", [1, 1 << 19])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_kept_probabilities_give_the_same(block, temperature, with_bias, scale, monkeypatch) -> None:
    """What small vocabularies take on a CPU, each output alone and both together, against all logits at once."""
    monkeypatch.setattr(kept, "BLOCK", block)
    hidden, weight, bias, targets = inputs(count=150)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    given = (hidden, weight, bias if with_bias else None, targets)
    expected = plain(*given, temperature, LogitsRule(scale=scale))
    assert kept.worth_keeping(hidden, weight)
    ours = fused_logprobs(*given, temperature=temperature, rule=LogitsRule(scale=scale), with_entropy=True)
    noise = torch.randn(2, 150, dtype=torch.float64)
    for which in ([1.0, 0.0], [0.0, 1.0], [1.0, 0.7]):
        losses = [
            sum(w * (out * n).sum() for w, out, n in zip(which, outs, noise, strict=True) if w)
            for outs in (ours, expected)
        ]
        assert torch.allclose(losses[0], losses[1], atol=1e-12)
        grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_a_large_vocabulary_is_not_kept() -> None:
    hidden = torch.zeros(1, 2, requires_grad=True).expand(1 << 12, 2)
    assert not kept.worth_keeping(hidden, torch.zeros(1 << 13, 2))
    assert kept.worth_keeping(hidden, torch.zeros(1 << 12, 2))
    with torch.no_grad():
        assert not kept.worth_keeping(hidden, torch.zeros(1 << 12, 2))


def test_gradcheck_in_float64() -> None:
    hidden, weight, bias, targets = inputs(4, 6, 3)
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused_logprobs(
            h, w, b, targets, temperature=0.8, rule=LogitsRule(1.5, 2.0), with_entropy=True, logits_per_chunk=12
        ),
        (hidden, weight, bias),
    )


def test_each_output_alone_has_its_own_gradient() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropy = fused_logprobs(hidden, weight, None, targets, with_entropy=True)
    expected = plain(hidden, weight, None, targets, 1.0, LogitsRule())
    assert entropy is not None
    for ours, theirs in ((logprobs, expected[0]), (entropy, expected[1])):
        a = torch.autograd.grad(ours.sum(), hidden, retain_graph=True)[0]
        assert torch.allclose(a, torch.autograd.grad(theirs.sum(), hidden, retain_graph=True)[0], atol=1e-12)


def test_without_entropy_none_is_returned() -> None:
    hidden, weight, _, targets = inputs()
    assert fused_logprobs(hidden, weight, None, targets)[1] is None


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, _, targets = inputs()
    frozen = weight.detach()
    fused_logprobs(hidden, frozen, None, targets)[0].sum().backward()
    assert frozen.grad is None
    assert hidden.grad is not None


def test_bfloat16_sums_in_float32() -> None:
    hidden, weight, _, targets = inputs(64, 500, 16, dtype=torch.bfloat16)
    logprobs, entropy = fused_logprobs(hidden, weight, None, targets, with_entropy=True)
    logits = torch.nn.functional.linear(hidden, weight).float()
    assert entropy is not None
    assert logprobs.dtype is entropy.dtype is torch.float32
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], atol=1e-5)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0, -300.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    logprobs, entropy = fused_logprobs(hidden, weight, None, torch.tensor([2]), with_entropy=True)
    assert entropy is not None
    assert logprobs.item() == pytest.approx(-900.0)
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()


def test_no_positions_at_all() -> None:
    hidden, weight, _, _ = inputs()
    logprobs, _ = fused_logprobs(hidden[:0], weight, None, torch.empty(0, dtype=torch.long))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("shape", [(5,), (1, 3)])
def test_a_large_head_in_blocks_is_the_same_product(shape):
    generator = torch.Generator().manual_seed(0)
    size = 16 * VOCABULARY_BLOCK + 7
    weight, bias = torch.randn(size, 8, generator=generator), torch.randn(size, generator=generator)
    hidden = torch.randn(*shape, 8, generator=generator)
    with torch.no_grad():
        blocks = head_product(hidden, weight, bias)
    torch.testing.assert_close(blocks, torch.nn.functional.linear(hidden, weight, bias))
    weight.requires_grad_()
    assert head_product(hidden, weight).requires_grad
