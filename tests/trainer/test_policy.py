"""Packed, fused log-probs against the plain module, one sequence at a time, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posttrain.packing import Batch, micro_batches, select
from posttrain.trainer import policy as policy_module
from posttrain.trainer.checks import check_policy, probe_batch
from posttrain.trainer.loading import ModelError
from posttrain.trainer.policy import Policy

from .batches import RAGGED, ragged_batch
from .models import tiny_config, tiny_policy

ARCHITECTURES = [
    "llama",
    "llama_bias_mha",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "gemma3",
    "mistral",
    "gemma2",
    "granite",
    "cohere",
    "gpt_oss",
]


def reference(module: nn.Module, batch: Batch, temperature: float, attention: str = "eager") -> tuple[Tensor, Tensor]:
    """Five plain lines: every segment through the model alone; ([T] log-probs, [T] entropies), 0 off the mask."""
    module.set_attn_implementation(attention)
    logits = [module(input_ids=ids[None], use_cache=False).logits[0] for ids in batch.token_ids.split(batch.lengths)]
    logp = torch.cat([torch.cat([z.new_zeros(1, z.shape[1]), z[:-1]]) for z in logits]).float() / temperature
    logp = logp.log_softmax(-1)
    module.set_attn_implementation("posttrain")
    chosen = logp.gather(-1, batch.token_ids[:, None])[:, 0]
    return chosen * batch.loss_mask, -(logp.exp() * logp).sum(-1) * batch.loss_mask


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in module.named_parameters()]
    grads = torch.autograd.grad(loss, [p for _, p in module.named_parameters()], allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_plain_forward_and_backward(name: str, temperature: float) -> None:
    policy = tiny_policy(name)
    batch = ragged_batch()
    weights = torch.randn(2, len(batch), generator=torch.Generator().manual_seed(1))

    logprobs, entropy = policy.logprobs_and_entropy(batch, temperature)
    plain, plain_entropy = reference(policy.module, batch, temperature)
    assert torch.allclose(logprobs, plain, atol=1e-5)
    assert torch.allclose(entropy, plain_entropy, atol=1e-5)

    ours = gradients(policy.module, (logprobs * weights[0] + entropy * weights[1]).sum())
    theirs = gradients(policy.module, (plain * weights[0] + plain_entropy * weights[1]).sum())
    assert ours.keys() == theirs.keys()
    for key, grad in theirs.items():
        assert torch.allclose(ours[key], grad, atol=1e-5 * max(1.0, grad.abs().max().item())), key


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
def test_packed_equals_transformers_sdpa(name: str) -> None:
    policy = tiny_policy(name)
    batch = ragged_batch()
    with torch.no_grad():
        assert torch.allclose(policy.logprobs(batch), reference(policy.module, batch, 1.0, "sdpa")[0], atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_segment_never_sees_another(name: str) -> None:
    """Changing every token of the other segments leaves a segment's log-probs as they were, to the bit."""
    policy = tiny_policy(name)
    batch = ragged_batch()
    before = policy.logprobs(batch).split(batch.lengths)
    third = batch.segment_ids == 2
    batch.token_ids = torch.where(third, batch.token_ids, (batch.token_ids + 7) % 61)
    after = policy.logprobs(batch).split(batch.lengths)
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[7], after[7])


def test_order_and_micro_batches_do_not_matter() -> None:
    policy = tiny_policy()
    batch = ragged_batch()
    whole = policy.logprobs(batch).split(batch.lengths)
    order = [5, 0, 7, 2, 6, 1, 4, 3]
    shuffled = policy.logprobs(select(batch, order)).split([batch.lengths[s] for s in order])
    for position, segment in enumerate(order):
        assert torch.allclose(shuffled[position], whole[segment], atol=1e-6)
    parts = micro_batches(batch, 40)
    assert len(parts) > 1
    total = sum(policy.logprobs(part).sum() for part in parts)
    assert torch.allclose(torch.as_tensor(total), torch.cat(whole).sum(), atol=1e-4)


def test_zero_off_the_mask_and_a_gradient_even_without_policy_tokens() -> None:
    policy = tiny_policy()
    batch = ragged_batch((1, 6))
    assert (policy.logprobs(batch)[~batch.loss_mask] == 0).all()
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    loss = policy.logprobs(batch).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or (p.grad == 0).all() for _, p in policy.parameters())


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        tiny_policy().logprobs(ragged_batch((4,)), temperature=0.0)


def test_next_token_logits_are_the_models_own() -> None:
    policy = tiny_policy("gemma2")
    ids = torch.tensor([5, 9, 11, 30, 4])
    batch = probe_batch([ids])
    rows, hidden = policy_module.packed_hidden_states(policy, batch)
    policy.module.set_attn_implementation("eager")
    assert torch.allclose(
        policy.next_token_logits(hidden[rows]), policy.module(input_ids=ids[None]).logits[0], atol=1e-5
    )


def test_bfloat16_stays_near_float32() -> None:
    exact = tiny_policy("llama")
    half = Policy(tiny_policy("llama").module.to(torch.bfloat16))
    batch = ragged_batch()
    with torch.no_grad():
        gap = (half.logprobs(batch) - exact.logprobs(batch)).abs()
    assert half.logprobs(batch).dtype is torch.float32
    assert 0 < gap.max() < 0.3


def test_gradient_checkpointing_changes_nothing() -> None:
    policy = tiny_policy("gemma3")
    batch = ragged_batch()
    plain = gradients(policy.module, policy.logprobs(batch).sum())
    policy.checkpoint_activations()
    assert policy.module.training
    for key, grad in gradients(policy.module, policy.logprobs(batch).sum()).items():
        assert torch.allclose(grad, plain[key], atol=1e-6), key


def test_dropout_is_off_even_in_train_mode() -> None:
    policy = tiny_policy("llama", attention_dropout=0.5)
    policy.module.train()
    batch = ragged_batch()
    assert torch.equal(policy.logprobs(batch), policy.logprobs(batch))


def test_random_is_seeded_and_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = tiny_policy(seed=3), tiny_policy(seed=3), tiny_policy(seed=4)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), (_, b), (_, c) in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() < 2 or not torch.equal(a, c), name


def test_the_start_up_check_refuses_an_architecture_that_changes_its_logits() -> None:
    policy = tiny_policy("granite")
    policy.rule = policy_module.LogitsRule()
    with pytest.raises(
        ModelError, match=r"GraniteForCausalLM: packed log-probs differ .* does something to its logits"
    ):
        check_policy(policy)


def test_the_start_up_check_refuses_state_that_runs_across_segments() -> None:
    class Leaky(nn.Module):
        """A token mixer besides attention, as in hybrid architectures."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + x.cumsum(1)

    module = tiny_policy("llama").module
    module.model.layers[0].mlp = Leaky(module.model.layers[0].mlp)
    with pytest.raises(ModelError, match="between tokens"):
        Policy(module)


def test_a_window_that_only_a_mask_would_carry_is_refused() -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer 1 \(chunked_attention\) would limit who sees whom by a mask only"):
        Policy.random(config, seed=0)
    config.layer_types, config.sliding_window = None, 4
    with pytest.raises(ModelError, match=r"all layers \(sliding_window 4\)"):
        Policy.random(config, seed=0)


def test_the_module_refuses_to_run_without_a_context() -> None:
    with pytest.raises(RuntimeError, match=r"without an attention context; call it through Policy\.logprobs"):
        tiny_policy().module(input_ids=torch.tensor([[1, 2, 3]]))


def test_tied_weights_are_listed_once_and_get_both_gradients() -> None:
    policy = tiny_policy("gemma3")
    names = [name for name, _ in policy.parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    policy.logprobs(ragged_batch(RAGGED)).sum().backward()
    grad = policy.module.get_input_embeddings().weight.grad
    assert (grad.abs().sum(-1) > 0).all()  # through the head every row of the vocabulary gets one
