"""The decoder of the plainest architectures, written out for decode steps on a GPU.

A product of 128 rows takes as long as a launch and a pass over its weights, whatever its width: three of query, key and
value take 12 us where one takes 4 (H100, hidden size 896). So the weights of products that have the same input become
neighbours in memory: the parameters stay what they are, as parts of one tensor, and updates in place are seen by both.
A layer is then four kernels around its attention (`cuda_layer.py`); what they compute is written in torch here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.sampler.lean_decoder import HALF_TOLERANCE, Trial, is_plain, turn_at
from posttrain.trainer.attention import AttentionContext
from posttrain.trainer.lean_layers import How
from posttrain.trainer.policy import Policy

FAR = (0, 1, 41, 1000, 30_000)  # positions whose turns are compared
MOVING = ("dynamic", "longrope")  # kinds of rotary positions, see `turns_move`

Turn = tuple[Tensor, Tensor]  # see `turn_at`


@dataclass(frozen=True, slots=True)
class Product:
    """x -> x weight^T + bias, of one linear layer or of several with the same input, one below the other."""

    parts: tuple[nn.Linear, ...]
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: nn.Linear) -> Product:
        biases = [part.bias for part in parts]
        return cls(parts, _joined([part.weight for part in parts]), None if biases[0] is None else _joined(biases))

    @property
    def in_place(self) -> bool:
        """Whether the parameters are still where they were put."""
        return self.parts[0].weight.data_ptr() == self.weight.data_ptr()

    @property
    def operands(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, and the norm that comes after it."""

    attended: Product  # query, key, value
    out: Product
    gated: Product  # gate, up
    down: Product
    head_norms: tuple[Tensor, Tensor] | None
    norm: Tensor
    next_norm: Tensor
    heads: tuple[int, int]  # size of a head, heads of keys

    @property
    def products(self) -> tuple[Product, ...]:
        return self.attended, self.out, self.gated, self.down

    @classmethod
    def of(cls, layer: Any, next_norm: Any) -> Layer:
        block, mlp = layer.self_attn, layer.mlp
        norms = (block.q_norm.weight, block.k_norm.weight) if hasattr(block, "q_norm") else None
        return cls(
            attended=Product.of(block.q_proj, block.k_proj, block.v_proj),
            out=Product.of(block.o_proj),
            gated=Product.of(mlp.gate_proj, mlp.up_proj),
            down=Product.of(mlp.down_proj),
            head_norms=norms,
            norm=layer.post_attention_layernorm.weight,
            next_norm=next_norm.weight,
            heads=(block.head_dim, block.k_proj.out_features // block.head_dim),
        )


class JoinedDecoder:
    """Stands in for `Policy.hidden_states`; its steps may be captured in CUDA graphs."""

    def __init__(self, decoder: Any, how: dict[int, How]) -> None:
        self._decoder = decoder
        self._how = how
        self._layers: list[Layer] = []
        self._find_weights()

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens."""
        self._find_weights()
        widest = max(len(product.weight) for product in self._layers[0].products)
        kernels = token_ids.is_cuda and kernels_take(self._layers[0].norm.dtype, len(token_ids), widest)
        hidden = self._by_kernels if kernels else self._by_torch
        return hidden(token_ids, positions, attention)[None]

    def _by_torch(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        decoder = self._decoder
        eps = decoder.norm.variance_epsilon
        x = F.embedding(token_ids, decoder.embed_tokens.weight)
        turn = turn_at(decoder, x, positions)
        y = normed(x, decoder.layers[0].input_layernorm.weight, eps)
        for index, layer in enumerate(self._layers):
            qkv = before_attention(y, turn, layer.attended.operands, layer.head_norms, layer.heads, eps)
            mixed = self._mixed(index, qkv, attention)
            further = tuple(product.operands for product in layer.products[1:])
            x, y = after_attention(x, mixed, further, (layer.norm, layer.next_norm), eps)
        return y

    def _by_kernels(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        from posttrain.sampler import cuda_layer  # Triton comes with torch's builds for CUDA only

        decoder = self._decoder
        eps = decoder.norm.variance_epsilon
        first = decoder.layers[0].input_layernorm.weight
        stream, turn = cuda_layer.embed(token_ids, positions, decoder.embed_tokens.weight, first, rotary_of(decoder))
        for index, layer in enumerate(self._layers):
            qkv = cuda_layer.project(stream, layer.attended.operands, turn, layer.head_norms, layer.heads, eps)
            mixed = self._mixed(index, qkv, attention)
            stream = cuda_layer.add(stream, mixed, layer.out.operands, layer.norm, cuda_layer.OUT)
            gated = cuda_layer.gate(stream, layer.gated.operands, eps)
            stream = cuda_layer.add(stream, gated, layer.down.operands, layer.next_norm, cuda_layer.DOWN)
        return F.rms_norm(stream.x, decoder.norm.weight.shape, decoder.norm.weight, eps)

    def _mixed(self, index: int, qkv: tuple[Tensor, Tensor, Tensor], attention: AttentionContext) -> Tensor:
        """[R, H Dv] what attention makes of [R, heads, D] each."""
        how = self._how[index]
        parts = (part.transpose(0, 1)[None] for part in qkv)
        mixed = attention.attend(index, *parts, scaling=how.scaling, sliding_window=how.sliding_window)
        return mixed[0].flatten(1)

    def _find_weights(self) -> None:
        """Once, and again if parameters have been given memory of their own since."""
        if self._layers and all(product.in_place for layer in self._layers for product in layer.products):
            return
        layers = list(self._decoder.layers)
        following = [layer.input_layernorm for layer in layers[1:]] + [self._decoder.norm]
        self._layers = [Layer.of(layer, norm) for layer, norm in zip(layers, following, strict=True)]


def joined_decoder(policy: Policy) -> JoinedDecoder | None:
    """None where the modules have to do it: another architecture, adapters or hooks, or other numbers at a trial."""
    if not is_plain(policy) or (policy.device.type == "cuda" and not _turns_alike(policy.decoder)):
        return None
    trial = Trial(policy)
    decoder = JoinedDecoder(policy.decoder, trial.how)
    return decoder if trial.agrees(decoder) else None


def kernels_take(dtype: torch.dtype, rows: int, widest: int) -> bool:
    """Not float16: they multiply by a norm's weight before they divide by the size of the row, and a few numbers of a
    row may be so large that no room is left. Nor more than 32 bits can count. widest: numbers in a row, at most."""
    return dtype is not torch.float16 and rows * widest < 1 << 31


def rotary_of(decoder: Any) -> tuple[Tensor, float]:
    """Frequencies of half a head, and what cosine and sine are multiplied by."""
    return decoder.rotary_emb.inv_freq, decoder.rotary_emb.attention_scaling


def turns_move(decoder: Any) -> bool:
    """Whether rotary frequencies depend on the longest sequence. They are then read from the device in every forward,
    which no CUDA graph can hold."""
    kinds = str(getattr(getattr(decoder, "rotary_emb", None), "rope_type", ""))  # of each kind of layers, for some
    return any(kind in kinds for kind in MOVING)


def _turns_alike(decoder: Any) -> bool:
    """Whether the rotary kernels serve this model: half a head is a power of two, and frequencies never change."""
    from posttrain.sampler import cuda_layer  # Triton comes with torch's builds for CUDA only

    size = decoder.layers[0].self_attn.head_dim
    if size < 16 or size & (size - 1) or 2 * len(rotary_of(decoder)[0]) != size:
        return False
    if turns_move(decoder):  # a comparison would find what it has moved itself
        return False
    table, norm = decoder.embed_tokens.weight, decoder.norm.weight
    positions = torch.tensor(FAR, device=table.device)
    expected = turn_at(decoder, table[: len(FAR)], positions)
    _, turn = cuda_layer.embed(torch.zeros_like(positions), positions, table, norm, rotary_of(decoder))
    return all(bool((a - b[:, 0]).abs().max() <= HALF_TOLERANCE) for a, b in zip(turn, expected, strict=True))


def before_attention(
    y: Tensor,  # [R, K]
    turn: Turn,
    product: tuple[Tensor, Tensor | None],
    head_norms: tuple[Tensor, Tensor] | None,
    heads: tuple[int, int],  # size of a head, heads of keys
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [R, H, D], [R, Hkv, D], [R, Hkv, Dv]
    head_dim, key_heads = heads
    every = F.linear(y, *product).view(y.shape[0], -1, head_dim)
    count = every.shape[1] - 2 * key_heads
    query, key, value = every.split([count, key_heads, key_heads], dim=1)
    if head_norms is not None:
        query, key = normed(query, head_norms[0], eps), normed(key, head_norms[1], eps)
    both = torch.cat([query, key], dim=1)
    both = both * turn[0] + both.roll(head_dim // 2, -1) * turn[1]
    return both[:, :count], both[:, count:], value


def after_attention(
    x: Tensor,  # [R, K]
    mixed: Tensor,  # [R, H Dv]
    products: tuple[tuple[Tensor, Tensor | None], ...],  # output, gate and up, down
    norms: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """[R, K] the residual stream, and its norm for what comes next."""
    out, gated, down = products
    x = x + F.linear(mixed, *out)
    gate, up = F.linear(normed(x, norms[0], eps), *gated).chunk(2, dim=-1)
    x = x + F.linear(F.silu(gate) * up, *down)
    return x, normed(x, norms[1], eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenates parameters into one tensor and makes each a view of it, with the same values as before."""
    if len(parameters) == 1:
        return parameters[0].detach()
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    return joined
