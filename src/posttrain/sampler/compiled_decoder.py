"""The decoder written out (`lean_decoder.py`), compiled: for forwards in which every sequence gets one token.

What is left of a decode step of a small model beside its matrix products is half of it: operations on a few kilobytes,
each through torch and the interpreter, for which engines on threads wait in turn. Here a layer is one call that holds
no interpreter lock. It needs numba, and float32 on a CPU; few sequences go through torch, for which loading numba would
not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from posttrain.numba_code import may_compile, numba_code
from posttrain.sampler.kv_cache import KVCache
from posttrain.sampler.lean_decoder import LeanDecoder
from posttrain.sampler.requests import Request
from posttrain.sampler.shared_prefix import MOST_MEMBERS, families, pieces, row_of
from posttrain.trainer.compiled_attention import FAR, sgemm_address

FEWEST = 16  # sequences
NOTHING = np.empty(0, np.float32)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Order:
    """How requests stand in a forward: those that begin with the same tokens side by side."""

    requests: list[Request]
    families: NDArray[np.int64]  # [n, 3] first, last, tokens that they share

    @classmethod
    def of(cls, requests: Sequence[Request], *, sharing: bool) -> Order:
        parts = [
            (members, family.shared)
            for family in (families(requests) if sharing else [])
            for members in pieces(family.members)
        ]
        together = {id(r) for members, _ in parts for r in members}
        parts += [([r], 0) for r in requests if id(r) not in together]
        ends = np.cumsum([len(members) for members, _ in parts])
        firsts = ends - [len(members) for members, _ in parts]
        table = np.stack([firsts, ends, [shared for _, shared in parts]], axis=1)
        return cls([r for members, _ in parts for r in members], np.ascontiguousarray(table, np.int64))


class CompiledDecoder:
    """Decode steps of one engine."""

    def __init__(self, lean: LeanDecoder, cache: KVCache, sgemm: int) -> None:
        self._lean = lean
        self._cache = cache
        self._sgemm = sgemm
        self._parameters = list(lean.decoder.parameters())
        self._addresses: list[int] = []
        self._weights: list[tuple[Any, ...]] = []  # by layer
        self._sharing = all(how.sliding_window is None for how in lean.how.values())
        self._known: tuple[list[Request], Order] | None = None
        self._known_scratch: tuple[tuple[int, tuple[int, ...]], tuple[Any, ...]] | None = None

    def takes(self, count: int) -> bool:
        """Whether a step of so many sequences is done here."""
        return count >= FEWEST and kernels() is not None

    def order(self, requests: list[Request]) -> Order:
        """Looked for when others are decoded than in the last forward."""
        if self._known is None or self._known[0] != requests:
            self._known = (requests, Order.of(requests, sharing=self._sharing))
        return self._known[1]

    def hidden_states(self, order: Order) -> Tensor:
        """[R, K] last hidden states for the last token of each request, whose key and value are cached now."""
        found, decoder = kernels(), self._lean.decoder
        assert found is not None
        self._find_weights()
        ends = torch.tensor([len(r.ids) for r in order.requests])
        places = (np.array([row_of(r) for r in order.requests]), ends.numpy(), order.families)
        x = F.embedding(torch.tensor([r.ids[-1] for r in order.requests]), decoder.embed_tokens.weight)
        turn = tuple(part[0].contiguous().numpy() for part in decoder.rotary_emb(x[None], ends[None] - 1))
        for index, layer in enumerate(decoder.layers):
            keys, values = (part.numpy() for part in self._cache.layer(index))
            how = self._lean.how[index]
            found.layer_step(
                self._sgemm,
                x.numpy(),
                turn,
                self._weights[index],
                (keys, values),
                places,
                (np.float32(how.scaling), how.sliding_window or FAR),
                self._scratch_for(layer, len(x), keys.shape),
            )
        return F.rms_norm(x, decoder.norm.weight.shape, decoder.norm.weight, decoder.norm.variance_epsilon)

    def draw(self, requests: Sequence[Request], logits: Tensor) -> tuple[list[int], list[float]]:
        """(ids, log-probs) from logits [R, V], which are overwritten, of requests that do not truncate."""
        found = kernels()
        assert found is not None
        temperatures = np.array([r.params.temperature or 1.0 for r in requests], np.float32)
        greedy = np.array([r.params.temperature == 0 for r in requests])
        streams = np.array([r.stream for r in requests])
        counts = np.array([r.generated for r in requests])
        ids, logprobs = np.empty(len(requests), np.int64), np.empty(len(requests))
        found.draw_tokens(logits.numpy(), temperatures, greedy, streams, counts, ids, logprobs)
        return ids.tolist(), logprobs.tolist()

    def _find_weights(self) -> None:
        """Arrays on the modules' own memory, found again when any of it has moved."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._weights = [_weights(layer) for layer in self._lean.decoder.layers]
            self._addresses = addresses

    def _scratch_for(self, layer: Any, rows: int, cache: tuple[int, ...]) -> tuple[Floats, ...]:
        """In the order in which `layer_step` names it; made anew when the number of sequences or the cache changes."""
        if self._known_scratch is None or self._known_scratch[0] != (rows, cache):
            _, heads, capacity, width = cache
            block, mlp = layer.self_attn, layer.mlp.gate_proj.out_features
            queries, keys = block.q_proj.out_features, block.k_proj.out_features
            together = MOST_MEMBERS * queries // (heads * width)
            shapes = [
                (rows, block.q_proj.in_features), (rows, queries), (rows, queries), (rows, keys), (rows, keys),
                (rows, mlp), (rows, mlp), (together, width), (together, width), (together, capacity),
            ]  # fmt: skip
            self._known_scratch = ((rows, cache), tuple(np.empty(shape, np.float32) for shape in shapes))
        return self._known_scratch[1]


def compiled_decoder(lean: LeanDecoder | None, cache: KVCache) -> CompiledDecoder | None:
    """None where torch has to do it: see the module's docstring. With several threads torch's own operations are
    faster."""
    sgemm = sgemm_address()
    if lean is None or sgemm is None or torch.get_num_threads() > 1 or not may_compile():
        return None
    return CompiledDecoder(lean, cache, sgemm)


def kernels() -> ModuleType | None:
    return numba_code("posttrain.sampler.decode_numba")


def _weights(layer: Any) -> tuple[Any, ...]:
    """norms, eps, attention, biases, mlp, mlp_biases of `layer_step`."""
    block, mlp = layer.self_attn, layer.mlp
    attention = (block.q_proj, block.k_proj, block.v_proj, block.o_proj)
    gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    heads = (block.q_norm, block.k_norm) if hasattr(block, "q_norm") else (None, None)
    norms = (layer.input_layernorm, *heads, layer.post_attention_layernorm)
    return (
        tuple(NOTHING if norm is None else norm.weight.detach().numpy() for norm in norms),
        np.float32(layer.input_layernorm.variance_epsilon),
        *(part for linears in (attention, gated) for part in (_of(linears, "weight"), _of(linears, "bias"))),
    )


def _of(linears: Sequence[nn.Linear], name: str) -> tuple[Floats, ...]:
    found = (getattr(linear, name) for linear in linears)
    return tuple(NOTHING if tensor is None else tensor.detach().numpy() for tensor in found)
