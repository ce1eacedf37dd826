"""Schedules worked by hand, the guard, and state that restores to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.trainer.optimizer import Optimizer, OptimizerConfig, clip_grad_norm, lr_at, non_finite_segments


def config(**options: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"lr": 0.1, **options})


def test_schedules_by_hand() -> None:
    warm = config(warmup_optimizer_steps=4)
    assert [lr_at(warm, s) for s in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    linear = config(warmup_optimizer_steps=2, schedule="linear", min_lr_ratio=0.2)
    assert [lr_at(linear, s, 7) for s in range(9)] == pytest.approx(
        [0.05, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02]
    )
    cosine = config(schedule="cosine")
    assert [lr_at(cosine, s, 5) for s in range(5)] == pytest.approx(
        [0.1, 0.1 * (1 + math.sqrt(0.5)) / 2, 0.05, 0.1 * (1 - math.sqrt(0.5)) / 2, 0.0]
    )


def test_a_run_of_one_step_uses_the_full_rate() -> None:
    assert lr_at(config(schedule="linear"), 0, 1) == 0.1


def test_a_decaying_schedule_needs_its_end_at_construction() -> None:
    with pytest.raises(ValueError, match="needs the number of optimizer steps"):
        Optimizer(nn.Linear(2, 2).named_parameters(), config(schedule="cosine"))


def test_p128_the_rate_moves_once_per_optimizer_step() -> None:
    layer = nn.Linear(3, 2)
    optimizer = Optimizer(layer.named_parameters(), config(schedule="linear"), total_steps=5)
    rates = []
    for _ in range(5):
        layer(torch.ones(1, 3)).sum().backward()
        layer(torch.ones(1, 3)).sum().backward()  # two micro-batches are one step
        rates.append(optimizer.step().lr)
    assert rates == [lr_at(optimizer.config, s, 5) for s in range(5)]
    assert optimizer.steps_done == 5


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        config(learning_rate=1.0)


def test_one_step_is_adamw_by_hand() -> None:
    """First step of AdamW: w (1 - lr wd) - lr g / (|g| + eps); vectors do not decay."""
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, 2.0)
    nn.init.constant_(layer.bias, 3.0)
    optimizer = Optimizer(layer.named_parameters(), config(weight_decay=0.5, max_grad_norm=None))
    layer.weight.grad, layer.bias.grad = torch.tensor([[0.4]]), torch.tensor([-0.3])
    report = optimizer.step()
    assert report.grad_norm == pytest.approx(0.5)
    assert layer.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1)
    assert layer.bias.item() == pytest.approx(3.0 + 0.1)
    assert layer.weight.grad is None


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert clip_grad_norm(grads, 1.0) == pytest.approx(5.0)
    assert torch.allclose(grads[0], torch.tensor([0.6]), atol=1e-6)
    assert torch.allclose(grads[1], torch.tensor([0.0, 0.8]), atol=1e-6)
    assert clip_grad_norm(grads, None) == pytest.approx(1.0)
    assert clip_grad_norm([], 1.0) == 0.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_no_weight_and_no_moment(poison: float) -> None:
    layer = nn.Linear(3, 2)
    optimizer = Optimizer(layer.named_parameters(), config(warmup_optimizer_steps=3))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in (layer.state_dict() | optimizer.state_tensors()).items()}
    layer(torch.full((1, 3), poison)).sum().backward()
    report = optimizer.step()
    assert report.skipped
    assert not math.isfinite(report.grad_norm)
    assert report.lr == pytest.approx(0.1 * 2 / 3)
    assert optimizer.steps_done == 2  # the schedule goes by what was planned
    del before["steps_done"]
    after = layer.state_dict() | optimizer.state_tensors()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert layer.weight.grad is None


def test_an_update_left_out_moves_the_schedule_only() -> None:
    layer = nn.Linear(3, 2)
    optimizer = Optimizer(layer.named_parameters(), config(schedule="linear"), total_steps=5)
    before = layer.weight.clone()
    optimizer.pass_over(2)
    assert (optimizer.steps_done, optimizer.lr) == (2, lr_at(optimizer.config, 2, 5))
    assert torch.equal(layer.weight, before)


def test_p17_only_unmasked_non_finite_tokens_name_their_segment() -> None:
    nan, inf = float("nan"), float("inf")
    segments = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    mask = torch.tensor([False, True, False, True, False, True, False, True])
    logprobs = torch.tensor([nan, -1.0, 0.0, nan, 0.0, -1.0, 0.0, -1.0])
    losses = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, inf, 0.0, 1.0])
    assert non_finite_segments(segments, mask, logprobs, losses) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_p116_resume_is_exact(tmp_path, dtype: torch.dtype, stop_after: int) -> None:
    """Ten steps in one go, and the same ten with a save and load in between: equal to the bit."""

    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(19, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)
        options = config(lr=1e-3, schedule="cosine", warmup_optimizer_steps=3, weight_decay=0.1)
        return model, Optimizer(model.named_parameters(), options, total_steps=10)

    def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            data = torch.randn(8, 19, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(data).float().pow(2).sum().backward()
            optimizer.step()

    straight = build()
    train(*straight, range(10))
    model, optimizer = build()
    train(model, optimizer, range(stop_after))
    save_file(optimizer.state_tensors(), tmp_path / "optimizer.safetensors")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    model, optimizer = build()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    optimizer.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    train(model, optimizer, range(stop_after, 10))
    assert optimizer.steps_done == 10
    for name, tensor in (straight[0].state_dict() | straight[1].state_tensors()).items():
        assert torch.equal((model.state_dict() | optimizer.state_tensors())[name], tensor), name


def test_small_updates_of_bfloat16_weights_are_not_lost() -> None:
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(layer.weight, 1.0)
    optimizer = Optimizer(layer.named_parameters(), config(lr=1e-4))
    for _ in range(100):  # each update is 1/78 of the spacing of bfloat16 below 1
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.99, abs=0.004)


def test_state_of_another_model_is_refused_by_name() -> None:
    layer, other = nn.Linear(3, 2), nn.Linear(3, 4)
    optimizer, foreign = (Optimizer(m.named_parameters(), config()) for m in (layer, other))
    other(torch.ones(1, 3)).sum().backward()
    foreign.step()
    state = foreign.state_tensors()
    with pytest.raises(ValueError, match=r"weight/exp_avg has shape \(4, 3\), the parameter \(2, 3\)"):
        optimizer.load_state_tensors(state)
    with pytest.raises(ValueError, match="'head/exp_avg' belongs to no trainable parameter"):
        optimizer.load_state_tensors({"steps_done": torch.tensor(1), "head/exp_avg": torch.zeros(2)})
    with pytest.raises(ValueError, match="no steps_done"):
        optimizer.load_state_tensors({})
    partial = {name: tensor for name, tensor in state.items() if not name.startswith("weight")}
    with pytest.raises(ValueError, match=r"lacks \['weight'\]"):
        foreign.load_state_tensors(partial)
    assert optimizer.steps_done == 0


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to optimize"):
        Optimizer([], config())


def test_the_norm_of_half_precision_gradients_is_exact() -> None:
    assert clip_grad_norm([torch.full((10_001,), 1.0, dtype=torch.bfloat16)], None) == pytest.approx(100.005, abs=1e-3)
