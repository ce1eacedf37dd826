"""Decoder layers of the plainest architectures, written out for training in float32 on a CPU.

A layer is two functions around its attention (`layer_functions.py`), which hold the interpreter lock only briefly. The
weights are the modules' own. Other architectures, layers with adapters or hooks, and forwards of few rows go through
the modules as before; so does a model whose written-out layers differ from its modules in a trial before the first use.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from threading import Lock
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from posttrain.trainer.attention import exact_attention
from posttrain.trainer.compiled_attention import FEWEST, compiles
from posttrain.trainer.layer_functions import Feed, Project

log = logging.getLogger(__name__)

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # norm, attention, norm, gated SiLU; rotary positions
TRIED = (0, 1, 2, 3, 40, 41, 42)  # positions of the tokens of the comparison
TOLERANCE = 1e-4  # relative to the largest number
QKV = ("q", "k", "v")

_lock = Lock()
_seen: WeakSet[nn.Module] = WeakSet()  # decoders that have been looked at


@dataclass(frozen=True, slots=True)
class How:
    """The arguments with which one layer asks for attention."""

    scaling: float
    sliding_window: int | None


@dataclass(slots=True)
class RecordingAttention:
    """An `AttentionContext`, plain and causal, that records how each layer asked for it."""

    how: dict[int, How] = field(default_factory=dict[int, How])
    extras: bool = False

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        how = self.how[layer_idx] = How(options.pop("scaling"), options.pop("sliding_window", None))
        self.extras |= bool(options)
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        return exact_attention(query, key, value, visible, scaling=how.scaling, **options).transpose(1, 2)


def is_known(module: nn.Module, config: Any) -> bool:
    """Whether it, or its layers, are of those architectures, without adapters, hooks or layers of another kind."""
    parts = list(module.modules())
    return (
        config.model_type in MODEL_TYPES
        and all(type(m) is nn.Linear for m in parts if isinstance(m, nn.Linear) or hasattr(m, "base_layer"))
        and not any(m._forward_hooks or m._forward_pre_hooks for m in parts)
    )


def in_float32_on_cpu(module: nn.Module) -> bool:
    return all(p.device.type == "cpu" and p.dtype is torch.float32 for p in module.parameters())


def quicken_layers(decoder: Any, rows: int) -> None:
    """Called before a forward of `rows` rows; the first large one replaces the layers' forward for good, if it may."""
    if rows < FEWEST or not compiles():
        return
    with _lock:
        if decoder not in _seen:
            _seen.add(decoder)
            layers = getattr(decoder, "layers", None)
            if isinstance(layers, nn.ModuleList) and in_float32_on_cpu(layers) and is_known(layers, decoder.config):
                _quicken(decoder)


def _quicken(decoder: Any) -> None:
    """Replaces the forward of every layer, if all agree with their modules and none is compiled by torch."""
    if any(layer._compiled_call_impl for layer in decoder.layers):
        return
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(TRIED), decoder.config.hidden_size, generator=generator)
        turn = tuple(part.clone() for part in decoder.rotary_emb(x, torch.tensor(TRIED)[None]))
        hows = [_agreed(layer, x, turn) for layer in decoder.layers]
    for layer, how in zip(decoder.layers, hows, strict=True):
        if None not in hows:
            layer.posttrain_how = how
            layer.posttrain_forward = MethodType(_forward, layer)
            vars(layer).setdefault("forward", layer.posttrain_forward)  # the last layer has one that calls it


def _agreed(layer: Any, x: Tensor, turn: tuple[Tensor, ...]) -> How | None:
    """How the layer asks for attention, if written out it gives the same values and gradients."""
    x = x.requires_grad_()
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    recorded = RecordingAttention()
    seed = x.detach().flip(1)
    own = type(layer).forward(layer, x, position_embeddings=turn, attention_mask=None, attention=recorded)
    (how,) = recorded.how.values()
    written_out = _written_out(layer, how, x, turn, RecordingAttention())
    pairs = zip(*((out, *torch.autograd.grad(out, inputs, seed)) for out in (own, written_out)), strict=True)
    close = all((a - b).abs().max() <= TOLERANCE * a.abs().max() for a, b in pairs)
    if not close or recorded.extras:
        log.warning("%s differs from what is known of its kind: it is not compiled for training", type(layer).__name__)
    return how if close and not recorded.extras else None


def _forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Takes the place of the layer's own forward; [1, R, K] -> [1, R, K]."""
    attention = kwargs.get("attention")  # None where the model is asked as anybody would ask it
    if attention is None or hidden_states.shape[1] < FEWEST or not compiles():
        return type(layer).forward(layer, hidden_states, **kwargs)
    return _written_out(layer, layer.posttrain_how, hidden_states, kwargs["position_embeddings"], attention)


def _written_out(layer: Any, how: How, hidden_states: Tensor, turn: tuple[Tensor, ...], attention: Any) -> Tensor:
    block, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, getattr(block, "q_norm", None), getattr(block, "k_norm", None)]
    epsilons = [0.0 if norm is None else norm.variance_epsilon for norm in norms]
    weights = [None if norm is None else norm.weight for norm in norms]
    wanted = getattr(attention, "wanted", QKV)
    weights += _parameters(*(getattr(block, f"{name}_proj") if name in wanted else None for name in QKV))
    x, *qkv = Project.apply(hidden_states.squeeze(0), *(part[0] for part in turn), epsilons, *weights)  # type: ignore[misc]
    q, k, v = (x if x is None else x.unflatten(1, (-1, block.head_dim)).transpose(0, 1).unsqueeze(0) for x in qkv)
    o = attention.attend(block.layer_idx, q, k, v, scaling=how.scaling, sliding_window=how.sliding_window)
    norm = layer.post_attention_layernorm
    weights = [norm.weight, *_parameters(block.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    return Feed.apply(x, o.squeeze(0).flatten(1), norm.variance_epsilon, *weights).unsqueeze(0)  # type: ignore[union-attr]


def _parameters(*linears: nn.Linear | None) -> list[Any]:
    """Weight and bias of each."""
    return [getattr(linear, name, None) for linear in linears for name in ("weight", "bias")]
