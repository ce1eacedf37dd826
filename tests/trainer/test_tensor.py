"""Layers divided among ranks: log-probs, entropies, gradients and steps are those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from cluster.fleet import on_ranks
from posttrain.trainer.loading import ModelError
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.ranks import TrainerConfig, join_ranks, leave_ranks
from posttrain.trainer.sharding import like, whole
from posttrain.trainer.tensor import check_layers

from .batches import ragged_batch
from .models import tiny_policy

SHAPES = ("llama", "llama_bias_mha", "mistral", "qwen2", "qwen3", "gemma3")
STEPS = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def steps_agree(names: tuple[str, ...], tensor: int) -> None:
    """On every rank, for each model: two clipped steps of the whole model and of the divided one."""
    ranks = join_ranks(torch.device("cpu"))
    torch.set_num_threads(1)
    config = TrainerConfig(ranks=ranks.size, tensor_parallel=tensor)
    divided = ranks.divided(tensor)
    for name in names:
        alone, apart = tiny_policy(name), tiny_policy(name)
        apart.shard(divided, config)
        optimizers = [Optimizer(policy.parameters(), STEPS) for policy in (alone, apart)]
        for _ in range(2):
            found = []
            for policy, optimizer, share in zip((alone, apart), optimizers, (1, tensor / ranks.size), strict=True):
                logprobs, entropy = policy.logprobs_and_entropy(ragged_batch())
                (share * (0.1 * logprobs - 0.03 * entropy)).sum().backward()
                report = optimizer.step()
                assert report.grad_norm > 0.5, "it is clipped"
                found.append((logprobs.detach(), entropy.detach(), torch.tensor(report.grad_norm)))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        whole_states = [optimizer.state_tensors() for optimizer in optimizers]
        assert whole_states[0].keys() == whole_states[1].keys()
        for key, value in whole_states[0].items():
            assert (whole_states[1][key] - value).abs().max() < 1e-5, f"{name}: {key}"
        held = [p.to_local().numel() for _, p in apart.parameters() if isinstance(p, DTensor)]
        assert sum(held) < 0.8 * sum(p.numel() for _, p in alone.parameters())
        for (key, one), (_, other) in zip(alone.parameters(), apart.parameters(), strict=True):
            assert (whole(other.detach()) - one.detach()).abs().max() < 1e-5, f"{name}: {key}"
            assert torch.equal(whole(like(one.detach(), other).detach()), one.detach()), f"{name}: {key}"
    leave_ranks()


@pytest.mark.parametrize(
    ("count", "tensor", "names"),
    [(2, 2, SHAPES), (4, 2, ("qwen3", "llama_bias_mha")), (6, 2, ("gemma3",))],
    ids=["two ranks", "two by two", "shards of unequal size"],
)
def test_divided_layers_take_the_steps_of_whole_ones(
    tmp_path: Path, count: int, tensor: int, names: tuple[str, ...]
) -> None:
    on_ranks(count, tmp_path / "log", steps_agree, names, tensor)


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ModelError, match="tensor_parallel = 4 does not divide num_key_value_heads = 2 of Qwen3"):
        check_layers(tiny_policy("qwen3").module, 4)
    with pytest.raises(ModelError, match="num_attention_heads = 4 and num_key_value_heads = 2 and intermediate_size"):
        check_layers(tiny_policy("qwen3", intermediate_size=50).module, 3)
    with pytest.raises(ModelError, match=r"no plan for CohereForCausalLM .*, only for llama, mistral, qwen2, qwen3"):
        check_layers(tiny_policy("cohere").module, 2)
