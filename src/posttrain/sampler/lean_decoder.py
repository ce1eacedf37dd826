"""The decoder of the plainest architectures, written out for few tokens in float32 on a CPU.

A decode step of a small model is a few hundred tiny operations around its matrix products; transformers' modules take
three times as many as are needed, and engines on threads wait for each other's interpreter in every one of them. The
weights are the modules' own, read anew in every forward. Whatever is not known to be computed exactly so, adapters and
hooks included, goes through the modules; a comparison with them at the start has the last word.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.trainer.attention import AttentionContext
from posttrain.trainer.lean_layers import How, RecordingAttention, in_float32_on_cpu, is_known
from posttrain.trainer.policy import Policy

TRIAL = (0, 1, 2, 3, 40, 41, 42)  # positions of the tokens of the comparison
TOLERANCE = 1e-4  # relative to the largest hidden state
HALF_TOLERANCE = 5e-2  # where numbers have eight bits

_known: WeakKeyDictionary[Policy, LeanDecoder | None] = WeakKeyDictionary()


def lean_decoder(policy: Policy) -> LeanDecoder | None:
    """None where the modules have to do it."""
    if policy not in _known:
        _known[policy] = _tried(policy) if in_float32_on_cpu(policy.decoder) and is_plain(policy) else None
    return _known[policy]


class Written(Protocol):
    """Stands in for `Policy.hidden_states`."""

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor: ...


class LeanDecoder:
    """Stands in for `Policy.hidden_states`."""

    def __init__(self, decoder: Any, how: dict[int, How]) -> None:
        self.decoder = decoder
        self.how = how  # by layer

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens."""
        decoder = self.decoder
        x = F.embedding(token_ids, decoder.embed_tokens.weight)
        turn = turn_at(decoder, x, positions)
        for layer_idx, layer in enumerate(decoder.layers):
            x = self._attended(layer_idx, layer, x, turn, attention)
            x = _fed_forward(layer, x)
        return _normed(x, decoder.norm)[None]

    def _attended(
        self, layer_idx: int, layer: Any, x: Tensor, turn: tuple[Tensor, Tensor], attention: AttentionContext
    ) -> Tensor:
        block, how = layer.self_attn, self.how[layer_idx]
        y = _normed(x, layer.input_layernorm)
        query, key, value = (
            F.linear(y, p.weight, p.bias).view(len(x), -1, block.head_dim)
            for p in (block.q_proj, block.k_proj, block.v_proj)
        )
        if hasattr(block, "q_norm"):
            query, key = _normed(query, block.q_norm), _normed(key, block.k_norm)
        heads = query.shape[1]
        both = torch.cat([query, key], dim=1)
        both = torch.addcmul(both * turn[0], both.roll(both.shape[-1] // 2, -1), turn[1])
        query, key, value = (part.transpose(0, 1)[None] for part in (both[:, :heads], both[:, heads:], value))
        window = how.sliding_window
        out = attention.attend(layer_idx, query, key, value, scaling=how.scaling, sliding_window=window)
        return _added(x, out.reshape(len(x), -1), block.o_proj)


def turn_at(decoder: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Of rotary positions, [R, 1, D] each: the cosine, and the sine that goes with the swapped halves of a head."""
    cos, sin = (part[0, :, None] for part in decoder.rotary_emb(x[None], positions[None]))
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def _fed_forward(layer: Any, x: Tensor) -> Tensor:
    mlp = layer.mlp
    y = _normed(x, layer.post_attention_layernorm)
    gate = F.silu(F.linear(y, mlp.gate_proj.weight, mlp.gate_proj.bias), inplace=True)
    return _added(x, gate.mul_(F.linear(y, mlp.up_proj.weight, mlp.up_proj.bias)), mlp.down_proj)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _added(x: Tensor, y: Tensor, linear: Any) -> Tensor:
    """x + linear(y)"""
    out = torch.addmm(x, y, linear.weight.t())
    return out if linear.bias is None else out.add_(linear.bias)


def is_plain(policy: Policy) -> bool:
    """Whether it is one of those architectures, without adapters, hooks or layers of another kind."""
    embedding = getattr(policy.decoder, "embed_tokens", None)
    return is_known(policy.decoder, policy.config) and type(embedding) is nn.Embedding


class Trial:
    """A few tokens through the modules, for what is written out to be compared with."""

    @torch.inference_mode()
    def __init__(self, policy: Policy) -> None:
        size: int = policy.decoder.embed_tokens.num_embeddings  # type: ignore[assignment, union-attr]
        self._positions = torch.tensor(TRIAL, device=policy.device)
        self._token_ids = torch.arange(len(TRIAL), device=policy.device) % size
        recorded = RecordingAttention()
        self._expected = policy.hidden_states(self._token_ids, self._positions, recorded)
        self.how = recorded.how
        self._extras = recorded.extras

    @torch.inference_mode()
    def agrees(self, decoder: Written) -> bool:
        """Whether nothing else was asked of attention, and the hidden states are the same."""
        if self._extras:
            return False
        found = decoder.hidden_states(self._token_ids, self._positions, RecordingAttention())
        tolerance = TOLERANCE if found.dtype is torch.float32 else HALF_TOLERANCE
        return bool((found - self._expected).abs().max() <= tolerance * self._expected.abs().max())


def _tried(policy: Policy) -> LeanDecoder | None:
    trial = Trial(policy)
    lean = LeanDecoder(policy.decoder, trial.how)
    return lean if trial.agrees(lean) else None
