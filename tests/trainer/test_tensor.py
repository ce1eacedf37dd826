"""Layers divided among ranks: log-probs, entropies, gradients and steps are those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cluster.fleet import on_ranks
from posttrain.packing import Batch
from posttrain.trainer.critic import Critic
from posttrain.trainer.loading import ModelError
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.policy import Policy
from posttrain.trainer.ranks import TrainerConfig, join_ranks, leave_ranks
from posttrain.trainer.sharding import like, whole
from posttrain.trainer.tensor import check_layers
from posttrain.weights.gather import gathered, manifest_of

from .batches import ragged_batch
from .models import tiny_config, tiny_policy

SHAPES = ("llama", "llama_bias_mha", "mistral", "qwen2", "qwen3", "gemma3")
STEPS = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def made(name: str, vocabulary: int, device: str) -> Policy | Critic:
    config = tiny_config(name.removesuffix(" critic"), vocab_size=vocabulary)
    policy = Policy.random(config, seed=0, device=device)
    if not name.endswith("critic"):
        return policy
    head = torch.nn.Linear(32, 1, device=device)
    torch.nn.init.constant_(head.weight, 0.1)
    torch.nn.init.zeros_(head.bias)
    return Critic(policy.decoder, head)


def outputs(model: Policy | Critic, batch: Batch) -> tuple[Tensor, ...]:
    return model.logprobs_and_entropy(batch) if isinstance(model, Policy) else (model.values(batch),)


def steps_agree(names: tuple[str, ...], vocabulary: int, device: str = "cpu", tensor: int = 2) -> None:
    """On every rank, for each model: two clipped steps of the whole model and of the divided one."""
    batch = ragged_batch()
    batch.token_ids[::7], batch.token_ids[::11] = 0, vocabulary // 2  # whose part begins with these; 0 is padding
    ranks = join_ranks(torch.device(device))
    torch.set_num_threads(1)
    divided, config = ranks.divided(tensor), TrainerConfig(ranks=ranks.size, tensor_parallel=tensor)
    for name in names:
        alone, apart = made(name, vocabulary, device), made(name, vocabulary, device)
        apart.shard(divided, config)
        optimizers = [Optimizer(model.parameters(), STEPS) for model in (alone, apart)]
        for _ in range(2):
            found = []
            for model, optimizer, share in zip((alone, apart), optimizers, (1, tensor / ranks.size), strict=True):
                out = outputs(model, batch)
                losses = [factor * values.sum() for values, factor in zip(out, (0.1, -0.03), strict=False)]
                (share * torch.stack(losses).sum()).backward()
                report = optimizer.step()
                assert report.grad_norm > 0.5, "it is clipped"
                found.append((*(values.detach() for values in out), torch.tensor(report.grad_norm)))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5, msg=f"{name}: {other - one}")
        assert_equal_weights(name, alone, apart)
        states = [optimizer.state_tensors() for optimizer in optimizers]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert (states[1][key] - value).abs().max() < 1e-5, f"{name}: {key}"
    leave_ranks()


def assert_equal_weights(name: str, alone: Policy | Critic, apart: Policy | Critic) -> None:
    """And what is divided among ranks comes together again, to the bit."""
    held = [p.to_local().numel() for _, p in apart.parameters() if isinstance(p, DTensor)]
    assert sum(held) < 0.8 * sum(p.numel() for _, p in alone.parameters())
    for (key, one), (_, other) in zip(alone.parameters(), apart.parameters(), strict=True):
        assert (whole(other.detach()) - one.detach()).abs().max() < 1e-5, f"{name}: {key}"
        assert torch.equal(whole(like(one.detach(), other).detach()), one.detach()), f"{name}: {key}"
    if isinstance(alone, Policy) and isinstance(apart, Policy):  # as a sampler elsewhere gets it
        sent = dict(gathered(apart))
        assert sent.keys() == manifest_of(alone).tensors.keys() == manifest_of(apart).tensors.keys()
        for key, value in gathered(alone):
            assert (sent[key] - value).abs().max() < 1e-5, f"{name}: {key}"


@pytest.mark.parametrize(
    ("count", "vocabulary", "names"),
    [(2, 62, (*SHAPES, "qwen3 critic")), (4, 61, ("qwen3", "llama_bias_mha")), (6, 62, ("gemma3", "gemma3 critic"))],
    ids=["two ranks", "two by two, the vocabulary whole", "shards of unequal size"],
)
def test_divided_layers_take_the_steps_of_whole_ones(
    tmp_path: Path, count: int, vocabulary: int, names: tuple[str, ...]
) -> None:
    on_ranks(count, tmp_path / "log", steps_agree, names, vocabulary)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus(tmp_path: Path) -> None:
    on_ranks(2, tmp_path / "log", steps_agree, ("qwen3", "gemma3", "qwen3 critic"), 62, "cuda")


def half_precision() -> None:
    """Masters are float32 before layers are divided; products are in bfloat16."""
    ranks = join_ranks(torch.device("cpu"))
    torch.set_num_threads(1)
    alone = tiny_policy("qwen3", vocab_size=62)
    apart = Policy.random(tiny_config("qwen3", vocab_size=62), seed=0, dtype=torch.bfloat16)
    apart.module.load_state_dict(alone.module.state_dict())  # not every build of torch draws the same in both dtypes
    apart.checkpoint_activations()
    apart.shard(ranks.divided(2), TrainerConfig(ranks=2, tensor_parallel=2))
    assert {parameter.dtype for _, parameter in apart.parameters()} == {torch.float32}
    for policy in (alone, apart):
        (0.1 * policy.logprobs(ragged_batch())).sum().backward()
    for (key, one), (_, other) in zip(alone.parameters(), apart.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype is torch.float32
        gap = (whole(other.grad) - one.grad).norm() / one.grad.norm()
        assert gap < 0.1, f"{key}: {gap}"
    leave_ranks()


def test_half_precision_and_activations_computed_again(tmp_path: Path) -> None:
    on_ranks(2, tmp_path / "log", half_precision)


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ModelError, match="tensor_parallel = 4 does not divide num_key_value_heads = 2 of Qwen3"):
        check_layers(tiny_policy("qwen3").module, 4)
    with pytest.raises(ModelError, match="num_attention_heads = 4 and num_key_value_heads = 2 and intermediate_size"):
        check_layers(tiny_policy("qwen3", intermediate_size=50).module, 3)
    with pytest.raises(ModelError, match=r"no plan for CohereForCausalLM .*, only for llama, mistral, qwen2, qwen3"):
        check_layers(tiny_policy("cohere").module, 2)
