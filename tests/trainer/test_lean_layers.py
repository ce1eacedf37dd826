"""Layers and attention written out for a CPU against the modules: values and gradients."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.numba_code import numba_code
from posttrain.packing import Batch
from posttrain.trainer import compiled_attention, lean_layers
from posttrain.trainer.fused import fused_logprobs
from posttrain.trainer.policy import Policy

from .batches import ragged_batch
from .models import tiny_policy
from .test_prefix import RAGGED, grouped

pytest.importorskip("numba", reason="numba is not installed")

PLAIN = ["llama", "llama_bias_mha", "qwen2", "qwen2_window", "qwen3", "mistral"]
OTHERS = ["gemma3", "granite", "cohere"]  # whose attention is compiled


def few(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Makes so many rows enough to be compiled."""
    for module in (compiled_attention, lean_layers):
        monkeypatch.setattr(module, "FEWEST", rows)


def computed(policy: Policy, batch: Batch) -> tuple[Tensor, ...]:
    """Log-probs, entropies, and the gradient of every parameter."""
    logprobs, entropy = policy.logprobs_and_entropy(batch, 0.8)
    weights = torch.linspace(-1, 1, len(batch))
    loss = (weights * logprobs).sum() + 0.1 * (weights.flip(0) * entropy).sum()
    return logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, [p for _, p in policy.parameters()])


def shaken(policy: Policy) -> Policy:
    """With norms and biases that are not 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def is_lean(policy: Policy) -> bool:
    return all(hasattr(layer, "posttrain_how") for layer in policy.decoder.layers)  # type: ignore[union-attr]


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("name", PLAIN + OTHERS)
@pytest.mark.parametrize("layout", ["shared", "plain"])
def test_values_and_gradients(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = shaken(tiny_policy(name))
    batch = grouped(RAGGED) if layout == "shared" else ragged_batch()
    expected = computed(policy, batch)
    assert not is_lean(policy)
    few(monkeypatch, 1)
    close(computed(policy, batch), expected)
    assert is_lean(policy) == (name in PLAIN)
    with torch.no_grad():
        close((policy.logprobs(batch, 0.8),), expected[:1])
    with torch.inference_mode():
        close((policy.logprobs(batch, 0.8),), expected[:1])


@pytest.mark.parametrize("name", ["llama_bias_mha", "qwen3"])
def test_blocks_of_rows_are_no_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = shaken(tiny_policy(name)), grouped(RAGGED)
    expected = computed(policy, batch)
    few(monkeypatch, 1)
    monkeypatch.setattr("posttrain.trainer.layer_functions.BLOCK", 16)
    close(computed(policy, batch), expected)


def test_log_probs_of_many_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, requires_grad=True) for s in ((70, 8), (301, 8), (301,))
    )
    targets = torch.randint(301, (70,), generator=generator)
    seeds = torch.randn(2, 70, generator=generator)

    def run(bias: Tensor | None) -> tuple[Tensor, ...]:
        inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
        out = fused_logprobs(hidden, weight, bias, targets, temperature=0.7, with_entropy=True)
        alone = fused_logprobs(hidden, weight, bias, targets)
        found = [part for part in (*out, *alone) if part is not None]
        grads = torch.autograd.grad(found, inputs, [*seeds, seeds[0]])
        return tuple(part.detach() for part in (*found, *grads))

    expected = [run(None), run(bias)]
    few(monkeypatch, 1)
    monkeypatch.setattr("posttrain.trainer.kept.BLOCK", 1)
    for found, wanted in zip((run(None), run(bias)), expected, strict=True):
        close(found, wanted)


def test_what_is_not_finite_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 1)
    query = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    query[0, 1, 3] = torch.inf  # scores of one query
    sight = compiled_attention.Sight.of([(0, 0, 0, 6)], scaling=1.0, window=None)
    out = compiled_attention.compiled_attention(query, query[:, :1], query[:, :1], sight)
    assert out.isfinite().all(-1).all(-1).tolist() == [[True, True, True, False, True, True]]
    policy = tiny_policy("llama")
    with torch.no_grad():
        policy.module.get_input_embeddings().weight[:, 0] = torch.nan  # type: ignore[operator, union-attr]
    batch = grouped(RAGGED)
    assert policy.logprobs(batch)[batch.loss_mask].isnan().all()


def test_the_same_bits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = tiny_policy("qwen3"), grouped(RAGGED)
    few(monkeypatch, 1)
    for a, b in zip(computed(policy, batch), computed(policy, batch), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["trainer.attention", "trainer.layers", "trainer.logprobs", "sampler.decode"])
def test_a_process_that_compiles_runs_what_others_find_compiled(name: str) -> None:
    """See `blas_numba.compiled`: seen as other log-probs in the process that had compiled the decoder."""
    module = numba_code(f"posttrain.{name}_numba")
    kernels = {key: part for key, part in vars(module).items() if hasattr(part, "targetoptions") and key != "product"}
    assert len(kernels) >= 3
    for key, kernel in kernels.items():
        options = kernel.targetoptions
        assert options.get("forceinline") or options.get("inline") == "always", key


def test_what_does_not_train_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = shaken(tiny_policy("llama_bias_mha")), grouped(RAGGED)
    for name, parameter in policy.module.named_parameters():
        parameter.requires_grad_("down_proj" in name or "q_proj.bias" in name)
    expected = computed(policy, batch)
    few(monkeypatch, 1)
    close(computed(policy, batch), expected)
    assert is_lean(policy)


def test_activations_may_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = tiny_policy("qwen3"), grouped(RAGGED)
    expected = computed(policy, batch)
    few(monkeypatch, 1)
    policy.checkpoint_activations()
    close(computed(policy, batch), expected)
    assert is_lean(policy)


def test_few_rows_several_threads_and_other_dtypes_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(1, 2, compiled_attention.FEWEST, 4)
    assert compiled_attention.takes(rows)
    assert not compiled_attention.takes(rows[:, :, 1:])
    assert not compiled_attention.takes(rows.double())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not compiled_attention.takes(rows)


def test_layers_of_another_build_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OddMLP(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))

    policy, hooked = tiny_policy("llama"), tiny_policy("llama")
    layers: Any = policy.decoder.layers
    layers[1].mlp = OddMLP(layers[1].mlp)
    hooked.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]
    few(monkeypatch, 1)
    with caplog.at_level(logging.WARNING):
        computed(policy, grouped(RAGGED))
    assert not is_lean(policy)
    assert "LlamaDecoderLayer" in caplog.text
    computed(hooked, grouped(RAGGED))
    assert not is_lean(hooked)


def test_a_copy_has_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 1)
    policy, batch = tiny_policy("qwen3"), grouped(RAGGED)
    before = policy.logprobs(batch)
    other = copy.deepcopy(policy.module)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    assert torch.equal(Policy(other).logprobs(batch), before)


def test_weights_may_change_and_move(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 1)
    policy, batch = tiny_policy("qwen3"), grouped(RAGGED)
    computed(policy, batch)
    assert is_lean(policy)
    for parameter in policy.module.parameters():
        parameter.data = parameter.data * 1.1
    lean = computed(policy, batch)
    few(monkeypatch, 1 << 40)
    close(lean, computed(policy, batch))
