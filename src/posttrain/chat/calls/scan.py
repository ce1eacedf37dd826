"""Reading a text that arrives in pieces: every reader is a generator that yields when it needs more of it.

Readers look only at what can no longer change, so the way a text is cut into pieces never shows in what is found.
Every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields while it waits for more text; returns T

SPACE = re.compile(r"\s*+")


class Lookout:
    """Literal strings to be found wherever they begin first; of two that begin together, the longer."""

    def __init__(self, literals: Iterable[str], *, any_case: bool = False) -> None:
        self.literals = tuple(sorted(set(literals), key=len, reverse=True))
        self.longest = max(map(len, self.literals), default=1)
        flags = re.IGNORECASE | re.ASCII if any_case else re.NOFLAG
        self.pattern = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)", flags)
        folded = [text.lower() if any_case else text for text in self.literals]
        self._may_grow = {a for a in folded for b in folded if a != b and b.startswith(a)}
        self._fold = str.lower if any_case else str

    def may_grow(self, found: str) -> bool:
        """Whether what follows could turn it into a longer literal."""
        return self._fold(found) in self._may_grow


class Scan:
    """A text so far, and where the reading stands in it.

    buffer[at:] is unread. `before` is the character in front of what `until` found last ('' at the start of the text).
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.at = 0
        self.ended = False
        self.before = ""
        self._base = 0  # characters dropped in front of the buffer
        self._last = ""  # the last of them
        self._line_start = 0
        self._kept: list[str] | None = None
        self._kept_from = 0

    @property
    def position(self) -> int:
        """Characters read since the start of the text."""
        return self._base + self.at

    def push(self, text: str) -> None:
        """The text goes on."""
        if self.at:
            self._last = self.buffer[self.at - 1]
        if self._kept is not None:
            self._kept.append(self.buffer[self._kept_from : self.at])
            self._kept_from = 0
        self._base += self.at
        self.buffer = self.buffer[self.at :] + text
        self.at = 0

    def start_of_line(self) -> None:
        """What comes counts as the start of a line."""
        self._line_start = self.position

    def mark(self) -> None:
        """`taken` gives what is read from here on. Marks do not nest."""
        self._kept, self._kept_from = [], self.at

    def taken(self) -> str:
        """What was read since the mark."""
        assert self._kept is not None
        self._kept.append(self.buffer[self._kept_from : self.at])
        text, self._kept = "".join(self._kept), None
        return text

    def back(self, count: int) -> None:
        """Unreads what `until` found."""
        self.at -= count

    def peek(self, count: int) -> Wait[str]:
        """The next `count` characters, fewer only at the end of the text. Reads nothing."""
        while len(self.buffer) - self.at < count and not self.ended:
            yield
        return self.buffer[self.at : self.at + count]

    def skip(self, pattern: re.Pattern[str] = SPACE) -> Wait[None]:
        """Reads characters while `pattern`, a repeated character class, matches."""
        while True:
            found = pattern.match(self.buffer, self.at)
            assert found
            self.at = found.end()
            if self.at < len(self.buffer) or self.ended:
                return
            yield

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """As `skip`, and returns what was read."""
        self.mark()
        yield from self.skip(pattern)
        return self.taken()

    def until(self, lookout: Lookout) -> Wait[str]:
        """Reads up to and with the first literal, and returns it; '' when the text ends without any."""
        while True:
            found = lookout.pattern.search(self.buffer, self.at)
            if found and (
                self.ended or found.start() + lookout.longest <= len(self.buffer) or not lookout.may_grow(found[0])
            ):
                self.before = self.buffer[found.start() - 1] if found.start() else self._last
                if self._base + found.start() == self._line_start:
                    self.before = "\n"
                self.at = found.end()
                return found[0]
            if self.ended:
                self.at = len(self.buffer)
                return ""
            safe = len(self.buffer) - lookout.longest + 1
            self.at = max(self.at, min(safe, found.start()) if found else safe)
            yield

    def text_until(self, lookout: Lookout) -> Wait[tuple[str, str]]:
        """As `until`: (the text before, the literal)."""
        self.mark()
        found = yield from self.until(lookout)
        text = self.taken()
        return text[: len(text) - len(found)], found

    def recover(self, closers: Lookout, openers: frozenset[str] = frozenset()) -> Wait[bool]:
        """Reads on to the end of a broken call: through a closing literal, or up to the next opening one.

        Returns whether the text ended first.
        """
        found = yield from self.until(closers)
        if found.lower() in openers:
            self.back(len(found))
        return not found
