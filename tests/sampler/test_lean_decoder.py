"""The decoder written out gives what the modules give, or is not used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain.sampler.lean_decoder import lean_decoder
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.attention import PackedAttention, layout_of
from posttrain.trainer.policy import Policy

from .tiny import CONFIGS, PLAIN, gap, play, policy, prompt, shaken, together


class Adapted(nn.Module):
    """As peft wraps a layer: its weight is the layer's, what it computes is not."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


def both(model: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of two segments, written out and by the modules."""
    lengths = (30, 11)
    ids = torch.tensor([i for n in lengths for i in prompt(n)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    lean = lean_decoder(model)
    assert lean is not None
    layout = layout_of(lengths, model.device)
    attention = PackedAttention(layout)
    token_ids, places = ids[layout.token_of_row], positions[layout.token_of_row]
    with torch.inference_mode():
        return lean.hidden_states(token_ids, places, attention), model.hidden_states(token_ids, places, attention)


@pytest.mark.parametrize("name", list(PLAIN))
def test_it_gives_what_the_modules_give(name: str) -> None:
    model = shaken(PLAIN[name]())
    found, expected = both(model)
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
    observations = [prompt(9), prompt(5)]
    params = SamplingParams(max_new_tokens=6)
    sampler = NativeSampler(model)
    assert (
        gap(model, together(*(play(sampler, prompt(20), params, seed=i, observations=observations) for i in range(3))))
        < 1e-5
    )


def test_it_sees_weights_change() -> None:
    model = policy("qwen3")
    before, _ = both(model)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(1.1)
    after, expected = both(model)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(after, expected, atol=1e-5, rtol=1e-5)


def test_whatever_it_does_not_know_goes_through_the_modules() -> None:
    assert lean_decoder(policy("gemma3")) is None
    assert lean_decoder(Policy.random(CONFIGS["llama"](), seed=0, dtype=torch.bfloat16)) is None
    adapted = policy()
    block = adapted.decoder.layers[0].self_attn  # type: ignore[index, union-attr]
    block.q_proj = Adapted(block.q_proj)  # type: ignore[arg-type, assignment, union-attr]
    assert lean_decoder(adapted) is None
    hooked = policy()
    hooked.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]
    assert lean_decoder(hooked) is None
    twisted = policy()  # computes something else under a known name
    twisted.decoder.norm.forward = lambda x: 2 * x  # type: ignore[union-attr, method-assign]
    assert lean_decoder(twisted) is None
