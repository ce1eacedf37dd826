"""What a retriever is, what it finds, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.task import EpisodeInvalid


@dataclass(frozen=True, slots=True)
class Passage:
    """One piece of a corpus in Search-R1's form: the first line of `contents` is the title in quotes, then the text.

    `score` is the retriever's own (higher is better); None = the retriever gave none.
    """

    id: str
    contents: str
    score: float | None = None

    @property
    def title(self) -> str:
        """The first line without its surrounding quotes."""
        first = self.contents.partition("\n")[0].strip()
        return first[1:-1] if len(first) >= 2 and first[0] == first[-1] == '"' else first

    @property
    def text(self) -> str:
        """Everything after the first line; empty when there is only one line."""
        return self.contents.partition("\n")[2]


def quoted(title: str, text: str) -> str:
    """Title and text in Search-R1's form; a line break in the title would end it there, so it becomes a space."""
    return f'"{" ".join(title.split())}"\n{text}'


class Retriever(Protocol):
    """Finds passages.

    The answer has one list per query, in order, each of at most `top_k` passages, best first; a list is empty when
    nothing matches. Raises `RetrievalError` when the search itself failed, ValueError when `top_k` < 1.
    """

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]: ...

    async def close(self) -> None:
        """Frees what it holds (connections); a retriever may be used again afterwards."""
        ...


FailureKind = Literal["timeout", "connection", "http_status", "bad_payload"]


class RetrievalError(EpisodeInvalid):
    """The search could not be done; nothing is known about the query.

    It is an `EpisodeInvalid("tool_down", ...)`, so an env that does not catch it ends its episode as `Invalid`, which
    is counted and stays out of every baseline: an empty result would teach the policy that nothing was found.

    kind: `timeout` (a deadline passed), `connection` (nobody answers, or the line broke before an answer began),
    `http_status` (answered with an error status, in `status`), `bad_payload` (answered with something else than the
    documented JSON, or with part of it). `transient`: worth another try.
    """

    def __init__(self, kind: FailureKind, message: str, *, status: int | None = None, transient: bool = True) -> None:
        super().__init__("tool_down", f"retrieval {kind}: {message}")
        self.kind: FailureKind = kind
        self.message = message
        self.status = status
        self.transient = transient
        self.retry_after_seconds: float | None = None  # what a 429 or 503 asked for


def check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
