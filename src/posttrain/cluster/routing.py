"""Session affinity: which of several samplers gets a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Who = TypeVar("Who")


@dataclass(slots=True)
class Routing(Generic[Who]):
    """An episode stays where its keys are, and requests with one prompt go to one sampler, so that a group's prompt is
    computed once. Otherwise the sampler with the fewest open requests gets the next."""

    prompts: dict[tuple[int, ...], Who] = field(default_factory=dict[tuple[int, ...], Who])
    sessions: dict[str, Who] = field(default_factory=dict[str, Who])

    def choose(
        self, ids: Sequence[int], session: str | None, there: Collection[Who], load: Callable[[Who], int]
    ) -> Who:
        """One of those who are there. load: the open requests of one."""
        prompt = tuple(ids)
        home = self.sessions.get(session or "", self.prompts.get(prompt))
        if home is None or home not in there:
            home = min(there, key=load)
        self.prompts[prompt] = home
        if session is not None:
            self.sessions[session] = home
        return home

    def clear(self) -> None:
        self.prompts.clear()
        self.sessions.clear()
