"""Products with the same input as one, on weights that are neighbours, give what the modules give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from posttrain.sampler.joined_decoder import JoinedDecoder, joined_decoder, kernels_take, turns_move
from posttrain.sampler.lean_decoder import Trial
from posttrain.trainer.attention import PackedAttention, layout_of
from posttrain.trainer.policy import Policy

from .tiny import PLAIN, SIZES, policy, prompt, shaken

LENGTHS = (30, 11)


def states(model: Policy, decoder: JoinedDecoder | Policy) -> torch.Tensor:
    """Hidden states of two segments."""
    layout = layout_of(LENGTHS, model.device)
    ids = torch.tensor([i for n in LENGTHS for i in prompt(n)])[layout.token_of_row]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[layout.token_of_row]
    with torch.inference_mode():
        return decoder.hidden_states(ids, positions, PackedAttention(layout))


def joined(model: Policy) -> JoinedDecoder:
    decoder = joined_decoder(model)
    assert decoder is not None
    return decoder


@pytest.mark.parametrize("name", list(PLAIN))
def test_it_gives_what_the_modules_give(name: str) -> None:
    model = shaken(PLAIN[name]())
    expected = states(model, model)
    assert torch.allclose(states(model, joined(model)), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states(model, model), expected)  # whose weights only moved


def test_weights_that_change_in_place_are_seen_by_both() -> None:
    model = policy("qwen3")
    decoder = joined(model)
    before = states(model, decoder)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(1.1)
    after = states(model, decoder)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(after, states(model, model), atol=1e-5, rtol=1e-5)


def test_weights_that_were_put_elsewhere_are_found() -> None:
    model = policy("qwen3")
    decoder = joined(model)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.data = weight.data * 1.1
    assert torch.allclose(states(model, decoder), states(model, model), atol=1e-5, rtol=1e-5)


def test_joined_weights_train_and_are_saved_as_before(tmp_path: Path) -> None:
    model = policy("qwen2")
    names = {name: value.clone() for name, value in model.module.state_dict().items()}
    decoder = joined(model)
    block = model.decoder.layers[0].self_attn  # type: ignore[index, union-attr]
    assert block.q_proj.weight.untyped_storage().data_ptr() == block.v_proj.weight.untyped_storage().data_ptr()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(states(model, decoder), states(model, model), atol=1e-5, rtol=1e-5)
    model.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.allclose(saved[name], names[name] - 0.1) for name in saved)


def test_whatever_it_does_not_know_goes_through_the_modules() -> None:
    assert joined_decoder(policy("gemma3")) is None
    model = policy("llama")
    trial = Trial(model)
    decoder = JoinedDecoder(model.decoder, trial.how)
    assert trial.agrees(decoder)
    with torch.no_grad():
        model.decoder.layers[0].mlp.down_proj.weight.mul_(1.01)  # type: ignore[index, operator, union-attr]
    assert not trial.agrees(decoder)


def test_kernels_take_what_they_have_room_for() -> None:
    """A prompt of 64k rows through an MLP of 2 x 28672 has more places than 32 bits can count."""
    assert kernels_take(torch.bfloat16, 16_384, 57_344)
    assert kernels_take(torch.float32, 128, 57_344)
    assert not kernels_take(torch.bfloat16, 65_536, 57_344)
    assert not kernels_take(torch.float16, 128, 57_344)


def test_frequencies_that_move_are_known() -> None:
    """Dynamic NTK works out its frequencies anew whenever a sequence is longer than all before."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    assert turns_move(shaken(LlamaConfig(rope_parameters=rope, **SIZES)).decoder)
    assert not any(turns_move(shaken(make()).decoder) for make in PLAIN.values())
    assert not turns_move(policy("gemma3").decoder)
