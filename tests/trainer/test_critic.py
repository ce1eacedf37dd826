"""Values: at policy tokens, read from the token before, no look across segments, kept by save and load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from posttrain.trainer.critic import HEAD_FILE, Critic, CriticConfig
from posttrain.trainer.loading import ModelConfig, ModelError
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig

from .batches import ragged_batch
from .models import tiny_policy


@pytest.fixture(params=["llama", "gemma3"])
def critic(request: pytest.FixtureRequest, tmp_path: Path) -> Critic:
    tiny_policy(request.param).save(tmp_path / "policy")
    return Critic.from_policy(tmp_path / "policy", "cpu", "float32")


def test_values_start_at_zero_and_learn(critic: Critic) -> None:
    batch = ragged_batch()
    assert torch.equal(critic.values(batch), torch.zeros(len(batch)))
    optimizer = Optimizer(critic.parameters(), OptimizerConfig(lr=1e-2))
    target = torch.where(batch.loss_mask, torch.sin(batch.positions.float()), 0.0)
    losses = []
    for _ in range(12):
        loss = (critic.values(batch) - target).pow(2).sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert (critic.values(batch)[~batch.loss_mask] == 0).all()


def test_values_equal_the_decoder_alone(critic: Critic) -> None:
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    batch = ragged_batch()
    values = critic.values(batch)
    critic.module.set_attn_implementation("eager")
    hidden = [critic.module(input_ids=ids[None]).last_hidden_state[0] for ids in batch.token_ids.split(batch.lengths)]
    before = torch.cat([torch.cat([h.new_zeros(1, h.shape[1]), h[:-1]]) for h in hidden])
    expected = critic.head(before)[:, 0] * batch.loss_mask
    assert torch.allclose(values, expected, atol=1e-5)


def test_a_value_does_not_see_its_own_token(critic: Critic) -> None:
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    batch = ragged_batch((9,))
    before = critic.values(batch)
    batch.token_ids[6] = (batch.token_ids[6] + 1) % 61
    after = critic.values(batch)
    assert torch.equal(before[:7], after[:7])
    assert not torch.equal(before[7:], after[7:])


def test_save_and_load(critic: Critic, tmp_path: Path) -> None:
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    critic.save(tmp_path / "critic")
    again = Critic.from_policy(tmp_path / "critic", "cpu", "float32")
    assert torch.equal(again.values(ragged_batch()), critic.values(ragged_batch()))
    assert [name for name, _ in again.parameters()] == [name for name, _ in critic.parameters()]


@pytest.mark.filterwarnings("ignore")  # of what the compiler imports
@pytest.mark.parametrize("asked", [True, False])
def test_it_is_held_as_the_policy_is(tmp_path: Path, asked: bool) -> None:
    policy = tiny_policy("llama")
    policy.save(tmp_path)
    held = ModelConfig(path="another", device="cpu", dtype="bfloat16", gradient_checkpointing=asked, compile=asked)
    critic = Critic.from_config(tmp_path, held)
    assert critic.dtype is torch.bfloat16
    assert critic.module.training == asked
    compiled = [part for part in critic.module.modules() if part._compiled_call_impl is not None]
    assert len(compiled) == (policy.config.num_hidden_layers if asked else 0)


def test_a_foreign_head_is_refused(critic: Critic, tmp_path: Path) -> None:
    critic.save(tmp_path / "critic")
    save_file({"weight": torch.zeros(1, 5)}, tmp_path / "critic" / HEAD_FILE)
    with pytest.raises(ModelError, match=r"this critic's head is"):
        Critic.from_policy(tmp_path / "critic", "cpu", "float32")


def test_defaults_of_the_config() -> None:
    config = CriticConfig()
    assert config.path is None
    assert config.optimizer.lr == 1e-5
