"""The same tensors through TRL and through ours: where TRL follows the paper, the numbers agree."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithms import AGGREGATES, LOSSES
from posttrain.algorithms.advantages import grpo
from posttrain.algorithms.kl import k3

trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed")

EPISODES, LENGTH = 6, 9


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Ragged completions with a tool's tokens in the middle of one; ratios far enough from 1 to be clipped."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(EPISODES, LENGTH, generator=generator) * 3
    mask = torch.arange(LENGTH)[None] < torch.tensor([9, 3, 7, 1, 9, 5])[:, None]
    mask[2, 2:5] = False
    return {
        "logprobs": old + torch.randn(EPISODES, LENGTH, generator=generator) / 3,
        "old": old,
        "ref": old + torch.randn(EPISODES, LENGTH, generator=generator) / 5,
        "mask": mask,
        "advantages": torch.randn(EPISODES, generator=generator),
    }


def by_trl(case: dict[str, torch.Tensor], **options) -> tuple[float, torch.Tensor]:
    """Loss and gradient in the log-probs of `GRPOTrainer._compute_loss`, for one process and without accumulation."""
    from trl import GRPOTrainer

    logprobs = case["logprobs"].clone().requires_grad_()
    arguments = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        sync_gradients=False,
    )
    trainer = SimpleNamespace(
        args=arguments,
        accelerator=accelerator,
        model=SimpleNamespace(training=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
    )
    vars(trainer).update(options)
    prompt = torch.zeros(EPISODES, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": torch.zeros_like(case["mask"], dtype=torch.long),
        "completion_mask": case["mask"].long(),
        "advantages": case["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["ref"],
        "num_items_in_batch": case["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss), logprobs.grad


def by_us(case: dict[str, torch.Tensor], loss: str, aggregate: str, *, kl_coef: float = 0.0, **options):
    logprobs = case["logprobs"].clone().requires_grad_()
    mask, episode = case["mask"].flatten(), torch.arange(EPISODES).repeat_interleave(LENGTH)
    advantages = case["advantages"].repeat_interleave(LENGTH)
    flat, old = logprobs.flatten(), case["old"].flatten()
    weights = AGGREGATES[aggregate](mask, episode, **({"length": LENGTH} if aggregate == "fixed_length" else {}))
    surrogate = LOSSES[loss](flat, old, advantages, mask, episode, **options)
    total = ((surrogate + kl_coef * k3(flat, case["ref"].flatten(), mask)) * weights).sum()
    total.backward()
    assert logprobs.grad is not None
    return float(total), logprobs.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, {"loss": "ppo_clip", "aggregate": "sequence_mean", "clip_high": 0.28}),
        ({"loss_type": "bnpo"}, {"loss": "ppo_clip", "aggregate": "token_mean", "clip_high": 0.28}),
        ({"loss_type": "dapo"}, {"loss": "ppo_clip", "aggregate": "token_mean", "clip_high": 0.28}),
        ({"loss_type": "dr_grpo"}, {"loss": "ppo_clip", "aggregate": "fixed_length", "clip_high": 0.28}),
        ({"loss_type": "cispo", "epsilon_high": 1.5}, {"loss": "cispo", "aggregate": "token_mean", "clip_high": 0.5}),
        ({"loss_type": "sapo"}, {"loss": "sapo", "aggregate": "sequence_mean"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
            {"loss": "gspo", "aggregate": "sequence_mean", "clip_low": 0.05, "clip_high": 0.1},
        ),
    ],
    ids=lambda row: "-".join(str(value) for value in row.values()),
)
def test_losses_and_gradients_agree(seed: int, kl_coef: float, theirs: dict, ours: dict):
    case = tensors(seed)
    value, gradient = by_trl(case, beta=kl_coef, **theirs)
    found, own = by_us(case, **ours, kl_coef=kl_coef)
    assert found == pytest.approx(value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(own, gradient, rtol=1e-5, atol=1e-6)


def test_group_advantages_agree():
    """TRL adds 1e-4 to the std, where the paper's code has 1e-8 and we 1e-6: the option makes them equal."""
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([1.0, 0.0, 0.25, 0.0, 3.0, 3.5, 3.0, 2.0])
    groups = rewards.view(2, 4)
    theirs = ((groups - groups.mean(1, keepdim=True)) / (nanstd(groups, dim=1)[:, None] + 1e-4)).flatten()
    index = torch.arange(8)
    ours = grpo(rewards, torch.ones(8, dtype=torch.bool), index, index // 4, eps=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
