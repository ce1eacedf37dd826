"""Decoding on a device that must not wait for the host: every step is launched before the last one has been read.

All that a step needs stands on the device, and a step leaves its token where the next one finds it. So step k + 1 is
launched, then step k is read; a sequence that ended in step k has been decoded once more, which nobody reads.

    start (load the columns, launch a step) -> advance (launch the next, read the last), ... -> drain (read the last)

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
    """Columns in teams of at most `members`, each of one family: the same leader and as many shared tokens.

    families: (leader's row, tokens shared with it) of every column. Those that save most reading come first; a family
    whose columns do not all fit into `most` teams gets none.
    """
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
        """Called when the cache was allocated anew: addresses in captured graphs are no longer valid."""
        ...


@dataclass(slots=True)
class Columns:
    """The state of every sequence on the device, one column each, which a step reads and advances by a token.

    A batch is padded with copies of its last column (see `_padded`).
    """

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
class Drawn:
    """What a step gave one request."""

    request: Request
    token: int
    logprob: float


@dataclass(slots=True)
class _Launched:
    """A step that was launched and not yet read, and for whom."""

    requests: list[Request]
    families: list[tuple[int, int]]  # leader's row and tokens shared with it, of each
    step: Step

    def read(self) -> list[Drawn]:
        tokens, logprobs = self.step.read()
        count = len(self.requests)
        drawn = zip(self.requests, tokens[:count], logprobs[:count], strict=True)
        return [Drawn(request, int(token), logprob) for request, token, logprob in drawn]


class DecodeAhead:
    """Steps of a set of sequences that only shrinks, one launched ahead."""

    def __init__(self, cache: KVCache, columns: Columns, steps: Steps) -> None:
        self._cache = cache
        self._columns = columns
        self._steps = steps
        self._generation = cache.generation
        self._steps_left = 0  # until some sequence would outgrow the cache
        self.launched = 0  # steps since `start`
        self._pending: _Launched | None = None

    @property
    def pending(self) -> bool:
        """Whether a step was launched that has not been read."""
        return self._pending is not None

    @property
    def must_drain(self) -> bool:
        """Whether another step would outgrow the rows of the cache."""
        return self._steps_left <= 0

    def start(self, requests: Sequence[Request], families: Sequence[tuple[int, int]]) -> None:
        """Starts decoding `requests`, each with one token to forward. families: leader's row and shared tokens."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            self._steps.forget()
        self._load(requests, families)
        self._steps_left = self._cache.capacity - max(len(r.ids) for r in requests)
        self.launched = 0
        self._pending = self._launch(list(requests), list(families))

    def advance(self) -> list[Drawn]:
        """Launches the next step of all that are still running, then reads the last one."""
        last = self._pending
        assert last is not None
        going_on = [i for i, request in enumerate(last.requests) if request.slot is not None]
        families = [last.families[i] for i in going_on]
        if going_on and len(going_on) < len(last.requests):
            self._compact(going_on, families)
        self._pending = self._launch([last.requests[i] for i in going_on], families) if going_on else None
        return last.read()

    def drain(self) -> list[Drawn]:
        """Reads the pending step and launches none, so that the host may change cache and columns."""
        last, self._pending = self._pending, None
        assert last is not None
        return last.read()

    def discard(self) -> None:
        """Forgets the pending step without reading it: nobody waits for its tokens any more."""
        self._pending = None

    def _launch(self, requests: list[Request], families: list[tuple[int, int]]) -> _Launched:
        self._steps_left -= 1
        self.launched += 1
        return _Launched(requests, families, self._steps.launch(bucket_of(len(requests))))

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
        """Writes the teams of all columns. Padding is in them too: a copy must be computed as its original is."""
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

    def _compact(self, going_on: Sequence[int], families: Sequence[tuple[int, int]]) -> None:
        """Moves the columns of the sequences that go on to the front; on the device, which alone knows their tokens."""
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
    """Padded to a batch size that has a graph, with the last column: its copies compute and write the same values."""
    return [*columns, *[columns[-1]] * (bucket_of(len(columns)) - len(columns))]
