"""Decoding on a device that must not wait for the host: every step is launched before the last one has been read.

All that a step needs stands on the device, and a step leaves its token where the next one finds it. So step k + 1 is
launched, then step k is read; a sequence that ended in step k has been decoded once more, which nobody reads.

    take_off -> in the air: advance, advance, ... -> land           (load columns; launch and read; read the last)

How a step is done is `Steps`' business (`cuda_graphs.py`); who ends and who joins is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from posttrain.sampler.kv_cache import KVCache
from posttrain.sampler.requests import Request

ROW, LEADER, SHARED, TOGETHER, POSITION, TOKEN, STREAM, NUMBER = range(8)  # rows of the state, a column per sequence
TEAM = 8  # sequences whose shared tokens are read together
COARSER = ((16, 16), (64, 32))  # (sequences, multiple): larger batches are padded to a multiple


def bucket_of(count: int) -> int:
    """The batch size that serves `count` sequences; at least 2, for 1 is a special case to compilers."""
    multiple = next((multiple for least, multiple in reversed(COARSER) if count > least), None)
    return max(2, 1 << (count - 1).bit_length()) if multiple is None else -(-count // multiple) * multiple


def teams_for(size: int) -> int:
    """How many teams a batch has room for."""
    return max(1, size // 4)


def teams_of(families: Sequence[tuple[int, int]], members: int, most: int) -> list[list[int]]:
    """Columns with the same leader and as many shared tokens, in teams; families that save most reading come first,
    and have all of their columns in teams or none."""
    columns: dict[tuple[int, int], list[int]] = {}
    for column, family in enumerate(families):
        if family[1]:
            columns.setdefault(family, []).append(column)
    teams: list[list[int]] = []
    for _, alike in sorted(columns.items(), key=lambda item: item[0][1] * (1 - len(item[1]))):
        parts = [alike[start : start + members] for start in range(0, len(alike), members)]
        if min(members, len(alike)) > 1 and len(teams) + len(parts) <= most:
            teams += parts
    return teams


class Step(Protocol):
    """A launched step."""

    def read(self) -> list[list[float]]:
        """[2][B] tokens and log-probs; waits for them."""
        ...


class Steps(Protocol):
    """One step of the first `size` columns: forward, draw, and the state moved on by a token."""

    def launch(self, size: int) -> Step: ...

    def forget(self) -> None:
        """The cache has moved: addresses that are remembered hold no more."""
        ...


@dataclass(slots=True)
class Columns:
    """What the steps read and move on, on the device. Columns from the last sequence on repeat it (see `_padded`)."""

    state: Tensor  # [8, most] long: row, leader's row, tokens shared with it, those that its team reads, position,
    # token, stream, number of draw
    temperatures: Tensor  # [most] float32; 0 = greedy
    teams: Tensor  # [most // 4, 2 + members] long: leader's row, tokens read together (0: no team), columns or -1

    @classmethod
    def of(cls, max_batch: int, device: torch.device, *, members: int = TEAM) -> Columns:
        most = bucket_of(max_batch)
        state = torch.zeros(8, most, dtype=torch.long, device=device)
        teams = torch.zeros(teams_for(most), 2 + members, dtype=torch.long, device=device)
        return cls(state, torch.ones(most, device=device), teams)


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step gave one request."""

    request: Request
    token: int
    logprob: float


@dataclass(slots=True)
class _Flight:
    requests: list[Request]
    families: list[tuple[int, int]]  # leader's row and tokens shared with it, of each
    step: Step

    def read(self) -> list[Landed]:
        tokens, logprobs = self.step.read()
        count = len(self.requests)
        drawn = zip(self.requests, tokens[:count], logprobs[:count], strict=True)
        return [Landed(request, int(token), logprob) for request, token, logprob in drawn]


class DecodeAhead:
    """Steps of a set of sequences that only shrinks, one launched ahead."""

    def __init__(self, cache: KVCache, columns: Columns, steps: Steps) -> None:
        self._cache = cache
        self._columns = columns
        self._steps = steps
        self._generation = cache.generation
        self._fuel = 0  # steps until some sequence would outgrow the cache
        self.flown = 0  # steps since the last take-off
        self._in_air: _Flight | None = None

    @property
    def in_air(self) -> bool:
        return self._in_air is not None

    @property
    def must_land(self) -> bool:
        return self._fuel <= 0

    def take_off(self, requests: Sequence[Request], families: Sequence[tuple[int, int]]) -> None:
        """Starts decoding `requests`, each with one token to forward. families: leader's row and shared tokens."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            self._steps.forget()
        self._load(requests, families)
        self._fuel = self._cache.capacity - max(len(r.ids) for r in requests)
        self.flown = 0
        self._in_air = self._launch(list(requests), list(families))

    def advance(self) -> list[Landed]:
        """Launches the next step of all that are still running, then reads the last one."""
        landing = self._in_air
        assert landing is not None
        going_on = [i for i, request in enumerate(landing.requests) if request.slot is not None]
        families = [landing.families[i] for i in going_on]
        if going_on and len(going_on) < len(landing.requests):
            self._close_ranks(going_on, families)
        self._in_air = self._launch([landing.requests[i] for i in going_on], families) if going_on else None
        return landing.read()

    def land(self) -> list[Landed]:
        """Reads the step in the air; nothing is in the air afterwards."""
        landing, self._in_air = self._in_air, None
        assert landing is not None
        return landing.read()

    def abandon(self) -> None:
        """Nobody wants to know what is in the air."""
        self._in_air = None

    def _launch(self, requests: list[Request], families: list[tuple[int, int]]) -> _Flight:
        self._fuel -= 1
        self.flown += 1
        return _Flight(requests, families, self._steps.launch(bucket_of(len(requests))))

    def _load(self, requests: Sequence[Request], families: Sequence[tuple[int, int]]) -> None:
        padded = _padded(range(len(requests)))
        columns = [
            (r.slot.row, leader, shared, 0, len(r.ids) - 1, r.ids[-1], r.stream, r.generated)  # type: ignore[union-attr]
            for r, (leader, shared) in zip(requests, families, strict=True)
        ]
        state = torch.tensor([columns[i] for i in padded]).T.contiguous()
        temperatures = torch.tensor([float(requests[i].params.temperature) for i in padded])
        self._columns.state[:, : len(padded)] = self._sent(state)
        self._columns.temperatures[: len(padded)] = self._sent(temperatures)
        self._team_up([families[i] for i in padded])

    def _team_up(self, families: Sequence[tuple[int, int]]) -> None:
        """Of all columns, padding included: it must compute what its twin computes."""
        most, width = self._columns.teams.shape
        teams = teams_of(families, width - 2, min(most, teams_for(len(families))))
        table = torch.full((most, width), -1)
        table[:, :2] = 0
        together = torch.zeros(len(families), dtype=torch.long)
        for number, team in enumerate(teams):
            row = [*families[team[0]], *team]
            table[number, : len(row)] = torch.tensor(row)
            together[team] = row[1]
        self._columns.teams.copy_(self._sent(table))
        self._columns.state[TOGETHER, : len(families)] = self._sent(together)

    def _close_ranks(self, going_on: Sequence[int], families: Sequence[tuple[int, int]]) -> None:
        """Done on the device, which alone knows the newest tokens."""
        index = self._sent(torch.tensor(_padded(going_on)))
        for tensor in (self._columns.state, self._columns.temperatures):
            tensor[..., : len(index)] = tensor.index_select(-1, index)
        self._team_up([families[i] for i in _padded(range(len(families)))])

    def _sent(self, tensor: Tensor) -> Tensor:
        """To the device without waiting for it."""
        if self._cache.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._cache.device, non_blocking=True)


def _padded(columns: Sequence[int]) -> list[int]:
    """Up to a batch size that is served, the last one repeated: it computes and writes the same as its twin."""
    return [*columns, *[columns[-1]] * (bucket_of(len(columns)) - len(columns))]
