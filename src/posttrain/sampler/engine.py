"""Continuous batching, one step at a time: requests in, one forward of the policy's module, tokens out.

Synchronous and deterministic: what `step` does depends only on the order of submissions. Waiting and waking callers is
`native.py`'s. The engine never copies weights: it calls the policy, so a step after an update samples from the update.

A request goes through:  submit -> waiting -> (admit: a row, the longest cached prefix) -> prefill, in chunks if long
-> one token per step -> finished, its keys kept for the session.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from posttrain.sampler.cached_attention import CachedAttention, Chunk, ShapeProbe, SharedKeys
from posttrain.sampler.cached_varlen import CachedVarlen
from posttrain.sampler.compiled_decoder import compiled_decoder
from posttrain.sampler.decode_ahead import Columns, DecodeAhead
from posttrain.sampler.draw import draw
from posttrain.sampler.joined_decoder import joined_decoder, turns_move
from posttrain.sampler.kv_cache import KVCache, LayerShape
from posttrain.sampler.lean_decoder import Written, lean_decoder
from posttrain.sampler.randomness import uniforms
from posttrain.sampler.requests import EngineLimits, Request, SamplerError, SamplerStats, draw_settings, ends
from posttrain.sampler.shared_prefix import grouping, leaders
from posttrain.sampler.slots import Move, Slot, SlotTable, common_prefix
from posttrain.trainer.attention import AttentionContext, has_plain_scores
from posttrain.trainer.flash_attention import use_varlen
from posttrain.trainer.policy import Policy

SHARE_AT_LEAST = 16  # tokens: shorter common prefixes are computed again rather than copied or waited for
PATIENCE = 16  # steps that a prompt may wait while others are decoded ahead
CAPACITY_UNIT = 32  # tokens; capacities are multiples of it


@dataclass(slots=True)
class _Step:
    """What one forward holds: decode rows by ascending cache row, then chunks of prompts."""

    decode: list[Request]
    prefill: list[tuple[Request, int]]  # with the number of tokens to forward now

    @property
    def requests(self) -> list[Request]:
        return [*self.decode, *(request for request, _ in self.prefill)]


@dataclass(frozen=True, slots=True)
class _Alike:
    """The requests of the last decode step, their rows, and the prefix keys that they share: kept while these stay."""

    requests: list[Request]
    rows: list[int]
    shared: SharedKeys | None


class Engine:
    """See the module's docstring. `waiting` is in order of submission, `active` in order of admission."""

    def __init__(self, policy: Policy, limits: EngineLimits) -> None:
        self.policy = policy
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.slots = SlotTable()
        self.stats = SamplerStats()
        self.cache = KVCache(_layer_shapes(policy), policy.device)
        self._version = policy.version
        self._varlen = use_varlen(policy.device, policy.dtype, policy.module)
        self._lean = lean_decoder(policy)
        self._compiled = compiled_decoder(self._lean, self.cache)
        kernels = _has_kernels(policy)
        self._joined = joined_decoder(policy) if kernels else None
        self._ahead = _decode_ahead(policy, self._joined, self.cache, limits.max_batch) if kernels else None
        self._alike = _Alike([], [], None)
        self.forward = threading.Lock()  # held by whoever runs a forward, or must not have one run
        self._may_admit = False  # whether anything happened that could let a waiting request in

    # -- what the sampler calls ---------------------------------------------------------------------------------------

    @property
    def decodes_ahead(self) -> bool:
        """Whether steps are CUDA graphs, launched before the last one is read."""
        return self._ahead is not None

    @property
    def decodes_compiled(self) -> bool:
        """Whether steps of many sequences on a CPU are compiled by numba."""
        return self._compiled is not None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def check_fits(self, request: Request) -> None:
        """Raises ValueError when the request could never fit."""
        needed = row_capacity(request.limit) * self.cache.bytes_per_token
        if needed > self.limits.kv_bytes:
            raise ValueError(
                f"a sequence of up to {request.limit} tokens needs {needed / 2**20:.1f} MiB of keys and values, the "
                f"budget is {self.limits.kv_bytes / 2**20:.1f} MiB: raise kv_gib or lower max_new_tokens"
            )

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        self._may_admit = True

    def cancel(self, request: Request) -> None:
        """Drops a request at any time; its row is free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self._retire(request)

    def release(self, session: str) -> None:
        self.slots.release(session)
        for request in (*self.active, *self.waiting):
            if request.session == session:
                request.session = None

    def reset(self) -> None:
        """Forgets every request and every cached token, and gives the memory back unless graphs know its address."""
        self.waiting.clear()
        self.active.clear()
        self.slots = SlotTable()
        self._alike = _Alike([], [], None)
        if self._ahead is None:
            self.cache.drop()
        else:
            self._ahead.discard()

    def step(self) -> list[Request]:
        """One forward. Returns the requests that finished, their `result` set. No-op without work."""
        with self.forward:
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[Request]:
        if self._ahead is not None and self._ahead.pending:
            return self._step_ahead(self._ahead)
        self._notice_new_weights()
        self._admit()
        if not self.active:
            return []
        self._make_room_to_grow()
        if self._ahead is not None and self._all_decode():
            self._ahead.start(self.active, leaders(self.active))
            return []
        self._apply(self.slots.gather_busy(slack=len(self.active) // 8))
        step = self._plan()
        hidden = self._forward(step)
        sampling, index = self._sampling(step)
        for request, count in self._advanced(step):
            assert request.slot is not None
            request.slot.cached += count
        self._fork()
        if not sampling:
            return []
        finished = self._sample(sampling, hidden[index])
        for request in finished:
            self._retire(request)
        return finished

    # -- decoding ahead (CUDA graphs) ---------------------------------------------------------------------------------

    def _all_plain(self) -> bool:
        return all(map(_is_plain, self.active))

    def _all_decode(self) -> bool:
        return self._all_plain() and all(r.missing == 1 for r in self.active)

    def _worth_draining(self, launched: int) -> bool:
        """Whether to stop decoding ahead for the prompts that wait.

        Their prefill is a forward in which nothing is decoded, so a few prompts wait for more, at most PATIENCE steps.
        """
        waiting = len(self.waiting) if self._may_admit else 0
        return waiting > 0 and (launched >= PATIENCE or waiting >= len(self.active) // 8)

    def _step_ahead(self, ahead: DecodeAhead) -> list[Request]:
        """Reads the pending step; first launches the next one, unless the host has to change something in between."""
        changed = self.policy.version != self._version
        drains = ahead.must_drain or changed or self._worth_draining(ahead.launched)
        finished: list[Request] = []
        for drawn in ahead.drain() if drains else ahead.advance():
            request = drawn.request
            if request.slot is None:
                continue  # it ended, or was cancelled, after this step was launched
            request.slot.cached = len(request.ids)
            self.stats.rows += 1
            self.stats.tokens_forwarded += 1
            self.stats.tokens_generated += 1
            if self._book(request, drawn.token, drawn.logprob):
                finished.append(request)
        self.stats.steps += 1
        for request in finished:
            self._retire(request)
        if not self.active:
            ahead.discard()  # nobody in it is still running
        return finished

    # -- weights ------------------------------------------------------------------------------------------------------

    def _notice_new_weights(self) -> None:
        """Keys of other weights are never read: running requests start over from their tokens."""
        if self.policy.version == self._version:
            return
        self._version = self.policy.version
        self._alike = _Alike([], [], None)
        if not self.slots.slots:
            return
        for request in reversed(self.active):
            self._put_back(request)
        self.stats.restarts += len(self.active)
        self.active.clear()
        self.slots.invalidate()
        self.stats.flushes += 1

    def _put_back(self, request: Request) -> None:
        """To the front of the queue; the caller takes it off `active`."""
        assert request.slot is not None
        self.slots.leave(request.slot)
        request.slot = request.forked_from = None
        self.waiting.appendleft(request)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """First come, first served, while there are rows, memory and room in this forward.

        A request whose long prefix is being prefilled right now waits one step and then copies it; one with the very
        same ids joins at once and shares the last logits.
        """
        self._may_admit = False
        if not self.waiting:
            return
        room = self.limits.tokens_per_step - sum(r.missing for r in self.active)
        fresh: dict[tuple[int, ...], Request] = {}  # new prompts that this very forward prefills to their end
        for request in list(self.waiting):
            if len(self.active) >= self.limits.max_batch or room <= 0:
                return
            leader = fresh.get(tuple(request.ids))
            start, shared, continues = self._best_start(request) if leader is None else (None, 0, False)
            if not continues and leader is None and self._worth_waiting(request, shared, fresh):
                continue
            slot = self._place(request, start, shared)
            if slot is None:
                return
            self.waiting.remove(request)
            self.active.append(request)
            request.slot, request.forked_from = slot, leader
            reused = slot.cached if leader is None else len(request.ids)
            self.stats.tokens_reused += reused
            self.stats.cache_hits += reused > 0
            if leader is None:
                room -= request.missing
                if not continues and room >= 0:
                    fresh[tuple(request.ids)] = request

    def _best_start(self, request: Request) -> tuple[Slot | None, int, bool]:
        """(row to start from, cached tokens of it that match, whether it is the session's own row and all match)"""
        own = self.slots.of_session(request.session)
        most = len(request.ids) - 1  # the last token is always forwarded: its logits are wanted
        kept = common_prefix(own.ids, request.ids, min(own.cached, most)) if own is not None else 0
        if own is not None and kept == own.cached:
            return own, kept, True
        found = self.slots.best_prefix(request.ids, most)
        if found is not None and found[1] >= kept + SHARE_AT_LEAST:
            return *found, False
        return own, kept, False

    def _worth_waiting(self, request: Request, shared: int, fresh: dict[tuple[int, ...], Request]) -> bool:
        least = shared + SHARE_AT_LEAST
        head = request.ids[:least]
        return least < len(request.ids) and any(other.ids[:least] == head for other in fresh.values())

    def _place(self, request: Request, start: Slot | None, shared: int) -> Slot | None:
        """A row with the first `shared` tokens cached; None when there is no row or no memory just now."""
        if start is not None:
            self.slots.touch(start)  # the last to go, should memory have to be made
        busy = len(self.active) + 1
        # a larger cache has other addresses, so that all graphs would be captured again
        whole = self._ahead is not None and self._reserve(request.limit + 1, busy=busy)
        if not whole and not self._reserve(len(request.ids) + 1, busy=busy):
            return None
        limit = self._row_limit(self.cache.capacity)
        if start is not None and start.cached >= shared and self.slots.owns(start):
            if not start.busy and start.session in (None, request.session):
                self.slots.occupy(start, request.session, request.ids, shared)
                return start
        else:
            start, shared = None, 0  # it lost its row when memory was made
        acquired = self.slots.acquire(limit)
        if acquired is None:
            return None
        slot, evicted = acquired
        self.stats.evictions += evicted
        if slot is start:
            self.slots.occupy(slot, request.session, request.ids, shared)
            return slot
        self.slots.occupy(slot, request.session, request.ids, shared)
        self._reserve_rows()
        if start is not None:
            self.cache.copy_rows([slot.row], [start.row], shared)
        return slot

    # -- memory -------------------------------------------------------------------------------------------------------

    def _row_limit(self, capacity: int) -> int:
        by_memory = self.limits.kv_bytes // (self.cache.bytes_per_token * max(capacity, CAPACITY_UNIT))
        return min(by_memory, 4 * self.limits.max_batch)

    def _reserve(self, tokens: int, *, busy: int) -> bool:
        """Rows of at least `tokens`, `busy` of them; idle rows give way. False when busy rows alone don't fit."""
        if tokens <= self.cache.capacity:
            return self._row_limit(self.cache.capacity) >= busy
        generous = row_capacity(max(tokens, self.cache.capacity * 3 // 2))
        capacity = generous if self._row_limit(generous) >= max(busy, len(self.slots)) else row_capacity(tokens)
        limit = self._row_limit(capacity)
        if limit < busy:
            return False
        if len(self.slots) > limit:
            moves, evicted = self.slots.shrink(limit)
            self.stats.evictions += evicted
            self._apply(moves)
        self.cache.reserve(min(self.cache.rows, limit), capacity)
        return True

    def _reserve_rows(self) -> None:
        if len(self.slots) > self.cache.rows:
            limit = self._row_limit(self.cache.capacity)
            least = self.limits.max_batch if self._ahead is not None else 8
            self.cache.reserve(min(limit, max(len(self.slots), self.cache.rows * 3 // 2, least)), self.cache.capacity)

    def _make_room_to_grow(self) -> None:
        """Running requests need one more token of capacity; when memory is out, the newest is put back."""
        while not self._reserve(max(len(r.ids) for r in self.active), busy=len(self.active)):
            victim = self.active.pop()
            forks = [r for r in self.active if r.forked_from is victim]
            for request in forks:
                self.active.remove(request)
                self._put_back(request)
            self._put_back(victim)
            self.stats.preemptions += 1 + len(forks)
        self._reserve_rows()

    def _apply(self, moves: Sequence[Move]) -> None:
        if moves:
            self.cache.copy_rows([m.target for m in moves], [m.source for m in moves], max(m.tokens for m in moves))

    # -- one forward --------------------------------------------------------------------------------------------------

    def _plan(self) -> _Step:
        own = [r for r in self.active if r.forked_from is None]
        decode = sorted((r for r in own if r.missing == 1), key=lambda r: r.slot.row)  # type: ignore[union-attr]
        if self._ahead is not None and len(decode) < len(own) and self._all_plain():
            decode = [r for r in decode if not r.generated]  # prompts first; then everything is decoded ahead
        room = self.limits.tokens_per_step - len(decode)
        prefill: list[tuple[Request, int]] = []
        for request in own:
            if request.missing > 1 and room > 0:
                prefill.append((request, min(request.missing, room)))
                room -= prefill[-1][1]
        return _Step(decode, prefill)

    def _forward(self, step: _Step) -> Tensor:
        """[T, K] hidden states."""
        if self._compiled is not None and not step.prefill and self._compiled.takes(len(step.decode)):
            order = self._compiled.order(step.decode)
            step.decode = order.requests
            self._count(step, len(step.decode))
            return self._compiled.hidden_states(order)
        ids = [r.ids[-1] for r in step.decode]
        rows = [r.slot.row for r in step.decode]  # type: ignore[union-attr]
        positions = [r.slot.cached for r in step.decode]  # type: ignore[union-attr]
        chunks: list[Chunk] = []
        for request, count in step.prefill:
            assert request.slot is not None
            start = request.slot.cached
            chunks.append(Chunk(request.slot.row, start, count, len(ids)))
            ids += request.ids[start : start + count]
            rows += [request.slot.row] * count
            positions += range(start, start + count)
        packed = torch.tensor([ids, rows, positions]).to(self.cache.device, non_blocking=True)
        decoded = len(step.decode)
        attention: AttentionContext
        if self._varlen:
            singles = [Chunk(rows[i], positions[i], 1, i) for i in range(decoded)]
            attention = CachedVarlen(self.cache, packed[1:], [*singles, *chunks])
        else:
            ends = [position + 1 for position in positions[:decoded]]
            shared = self._shared_keys(step.decode, rows[:decoded])
            attention = CachedAttention(self.cache, packed[1], packed[2], rows[:decoded], ends, chunks, shared)
        joined = self._joined if self.policy.dtype is torch.bfloat16 else None  # its products of many rows are as fast
        hidden = (self._lean or joined or self.policy).hidden_states(packed[0], packed[2], attention)[0]
        self._count(step, len(ids))
        return hidden

    def _count(self, step: _Step, tokens: int) -> None:
        self.stats.steps += 1
        self.stats.rows += len(step.decode) + len(step.prefill)
        self.stats.tokens_forwarded += tokens
        self.stats.tokens_prefilled += tokens - sum(r.generated > 0 for r in step.decode)

    def _shared_keys(self, decode: list[Request], rows: list[int]) -> SharedKeys | None:
        """The prefix that the decoded requests share; searched again only when requests or rows have changed.

        On a CPU only: the kernels of a GPU read shared keys where they lie in the cache.
        """
        known = self._alike
        if (decode, rows) != (known.requests, known.rows):
            found = grouping(decode) if len(decode) > 1 and self.cache.device.type == "cpu" else None
            shared = None if found is None else SharedKeys(found, rows, self.cache.device)
            if shared is not None and known.shared is not None:
                shared.adopt(known.shared)
            self._alike = _Alike(decode, rows, shared)
        return self._alike.shared

    def _advanced(self, step: _Step) -> list[tuple[Request, int]]:
        return [*((request, 1) for request in step.decode), *step.prefill]

    def _sampling(self, step: _Step) -> tuple[list[Request], Tensor]:
        """The requests that get a token now, and where in the forward their last token stands."""
        offsets = {id(request): i for i, request in enumerate(step.decode)}
        offset = len(step.decode)
        for request, count in step.prefill:
            offset += count
            if count == request.missing:
                offsets[id(request)] = offset - 1
        requests = [r for r in step.requests if id(r) in offsets]
        forks = [r for r in self.active if r.forked_from is not None]
        index = [offsets[id(r)] for r in requests] + [offsets[id(r.forked_from)] for r in forks]
        return requests + forks, torch.tensor(index, device=self.cache.device)

    def _fork(self) -> None:
        """Copies the keys of prompts prefilled for a whole group to the others of the group."""
        forks = [r for r in self.active if r.forked_from is not None]
        if not forks:
            return
        targets = [r.slot.row for r in forks]  # type: ignore[union-attr]
        sources = [r.forked_from.slot.row for r in forks]  # type: ignore[union-attr]
        self.cache.copy_rows(targets, sources, max(len(r.ids) for r in forks))
        for request in forks:
            assert request.slot is not None
            request.slot.cached = len(request.ids)
            request.forked_from = None

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self, requests: list[Request], hidden: Tensor) -> list[Request]:
        """Draws one token for each and returns those that are done."""
        drawn, values = self._draw(requests, self.policy.next_token_logits(hidden))
        finished: list[Request] = []
        for request, token, logprob in zip(requests, drawn, values, strict=True):
            if self._book(request, token, logprob):
                finished.append(request)
        self.stats.tokens_generated += len(requests)
        self.stats.tokens_truncated_draw += sum(r.params.top_p < 1 or r.params.top_k > 0 for r in requests)
        return finished

    def _draw(self, requests: list[Request], logits: Tensor) -> tuple[list[int], list[float]]:
        if self._compiled is not None and self._compiled.takes(len(requests)) and all(map(_is_plain, requests)):
            return self._compiled.draw(requests, logits)
        device = self.cache.device
        counters = torch.tensor([[r.stream for r in requests], [r.generated for r in requests]], device=device)
        settings = draw_settings(requests, logits.shape[-1], device)
        ids, logprobs = draw(logits, uniforms(counters[0], counters[1]), settings)
        drawn, values = torch.stack([ids.double(), logprobs.double()]).tolist()
        return [int(token) for token in drawn], values

    def _book(self, request: Request, token: int, logprob: float) -> bool:
        """Adds a sampled token to the request. True when it ends the turn; `request.result` is set then."""
        if math.isnan(logprob):
            raise SamplerError(
                f"the policy (version {self._version}) gives logits that are not finite; its weights are broken"
            )
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self._version)
        if request.hear is not None:
            request.hear(token, logprob)
        return ends(request)

    def _retire(self, request: Request) -> None:
        self._may_admit = True
        self.active.remove(request)
        assert request.slot is not None
        self.slots.leave(request.slot)
        request.slot = None
        self.stats.requests += request.result is not None


@torch.inference_mode()
def _layer_shapes(policy: Policy) -> dict[int, LayerShape]:
    """The sizes that every layer caches per token, read off a forward of one token."""
    probe = ShapeProbe()
    zero = torch.zeros(1, dtype=torch.long, device=policy.device)
    policy.hidden_states(zero, zero, probe)
    return probe.shapes


def _has_kernels(policy: Policy) -> bool:
    """Whether the Triton kernels and CUDA graphs of decode steps can serve this policy; else the modules do every step.

    They need an NVIDIA GPU, attention without soft caps and sinks, and rotary positions whose frequencies are fixed.
    """
    if policy.device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return has_plain_scores(policy.module) and not turns_move(policy.decoder)


def _decode_ahead(policy: Policy, joined: Written | None, cache: KVCache, max_batch: int) -> DecodeAhead:
    """For a policy with `_has_kernels`. joined: stands in for its decoder, see `joined_decoder`."""
    from posttrain.sampler.cuda_attention import team_size  # Triton comes with torch's builds for CUDA only
    from posttrain.sampler.cuda_graphs import CudaGraphs

    columns = Columns.of(max_batch, cache.device, members=team_size(*_heads(policy)))
    return DecodeAhead(cache, columns, CudaGraphs(policy, joined or policy, cache, columns))


def _heads(policy: Policy) -> tuple[int, int]:
    """(query heads, key heads)"""
    config = policy.config.get_text_config()
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _is_plain(request: Request) -> bool:
    """Whether it samples from whole distributions: no top-p, no top-k."""
    return request.params.top_p == 1 and not request.params.top_k


def row_capacity(tokens: int) -> int:
    """Tokens of a cache row that holds at least `tokens`: the next multiple of CAPACITY_UNIT."""
    return -(-tokens // CAPACITY_UNIT) * CAPACITY_UNIT
