"""The steps of `decode_ahead.py` as CUDA graphs.

A step of a small batch is hundreds of kernels of a few microseconds each; launched one by one from Python they take
longer to launch than to run. A graph holds them all: embedding, layers, head, draw. One is captured per batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.sampler.cuda_attention import decode_attention, splits_for
from posttrain.sampler.cuda_draw import draw_and_advance
from posttrain.sampler.decode_ahead import POSITION, TOKEN, Columns, teams_for
from posttrain.sampler.kv_cache import KVCache
from posttrain.sampler.lean_decoder import Written
from posttrain.trainer.fused import head_product
from posttrain.trainer.policy import Policy, head_of

WARM_UPS = 2  # runs before a capture: kernels are compiled, workspaces allocated


@dataclass(slots=True)
class DecodeAttention:
    """The attention context of a step: the new token of every sequence, see `decode_attention`."""

    cache: KVCache
    places: Tensor  # [5, B]
    teams: Tensor  # [n, 2 + members]

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, B, D]
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        **extras: Any,
    ) -> Tensor:  # [1, B, H, Dv]
        if extras:
            raise NotImplementedError(f"the decode kernel does not apply {', '.join(extras)}")
        query, key, value = (x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (query, key, value))
        return decode_attention(
            query,
            (key, value),
            self.cache.layer(layer_idx),
            self.places,
            self.teams,
            scaling=scaling,
            window=sliding_window,
            splits=splits_for(query.shape[1], key.shape[0], self.cache.capacity),
        )[None]


@dataclass(slots=True)
class _Launched:
    result: Tensor  # [2, B] pinned
    done: torch.cuda.Event

    def read(self) -> list[list[float]]:
        self.done.synchronize()
        return self.result.tolist()


@dataclass(slots=True)
class _Captured:
    """One batch size: its graph and where its results appear."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # [2, B] float64 token and log-prob
    pinned: tuple[Tensor, Tensor]  # copies on the host, used in turn: one is read while the other is written


class CudaGraphs:
    """`Steps` on a GPU."""

    def __init__(self, policy: Policy, decoder: Written, cache: KVCache, columns: Columns) -> None:
        self._policy = policy
        self._decoder = decoder
        self._cache = cache
        self._columns = columns
        self._captured: dict[int, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._turn = 0

    def launch(self, size: int) -> _Launched:
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._capture(size)
        captured.graph.replay()
        self._turn = 1 - self._turn
        result = captured.pinned[self._turn]
        result.copy_(captured.out, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Launched(result, done)

    def forget(self) -> None:
        torch.cuda.synchronize()
        self._captured.clear()
        self._memory = torch.cuda.graph_pool_handle()  # memory without graphs is gone

    def _capture(self, size: int) -> _Captured:
        """Warm-up runs decode for real; the state is put back, and what they cached will be written once more."""
        state = self._columns.state
        out = torch.zeros(2, size, dtype=torch.float64, device=state.device)
        before = state.clone()
        for _ in range(WARM_UPS):  # in the stream of the replays, see `counters`
            self._step(out)
            state.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be training meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(out)
        first, second = (torch.zeros(out.shape, dtype=out.dtype).pin_memory() for _ in range(2))
        return _Captured(graph, out, (first, second))

    def _step(self, out: Tensor) -> None:
        decode_step(self._policy, self._decoder, self._cache, self._columns, out)


def decode_step(policy: Policy, decoder: Written, cache: KVCache, columns: Columns, out: Tensor) -> None:
    """One token more for the first B columns, and their state moved on by it. decoder: the policy, or what stands in
    for its layers; out: [2, B] float64 token and log-prob."""
    size = out.shape[1]
    state = columns.state[:, :size]
    attention = DecodeAttention(cache, state[: POSITION + 1], columns.teams[: teams_for(size)])
    hidden = decoder.hidden_states(state[TOKEN], state[POSITION], attention)[0]
    head = head_of(policy.module)
    logits = head_product(hidden, head.weight, head.bias)
    draw_and_advance(logits, columns.temperatures[:size], state[POSITION:], out, policy.rule)
