"""What a docstring says: what the function does, and what each parameter means. Google, NumPy and Sphinx style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_GOOGLE_PARAMETERS = re.compile(r"^(?:Args|Arguments|Parameters|Params):\s*$")
_GOOGLE_SECTION = re.compile(
    r"^(?:Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|Attributes|References|"
    r"See Also|Todo|Keyword Arg(?:ument)?s|Other Parameters):\s*$"
)
_GOOGLE_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_RULE = re.compile(r"^-{3,}\s*$")
_NUMPY_ENTRY = re.compile(r"^\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_SPHINX_PARAMETER = re.compile(r"^:(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_SPHINX_FIELD = re.compile(r"^:\w[^:]*:")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What was found; parameters by name."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def parse_docstring(text: str | None) -> Docstring:
    """The description (all before the first section, line breaks within a paragraph removed) and the parameters'."""
    lines = inspect.cleandoc(text or "").splitlines()
    end = next((i for i in range(len(lines)) if _begins_section(lines, i)), len(lines))
    return Docstring(_paragraphs(lines[:end]), dict(_parameters(lines[end:])))


def _begins_section(lines: list[str], i: int) -> bool:
    underlined = i + 1 < len(lines) and bool(lines[i].strip()) and bool(_NUMPY_RULE.match(lines[i + 1]))
    return underlined or bool(_GOOGLE_SECTION.match(lines[i]) or _SPHINX_FIELD.match(lines[i]))


def _parameters(lines: list[str]) -> Iterator[tuple[str, str]]:
    for i, line in enumerate(lines):
        sphinx = _SPHINX_PARAMETER.match(line)
        if sphinx:
            yield sphinx[1], _joined([sphinx[2], *_indented(lines, i + 1)])
        elif _GOOGLE_PARAMETERS.match(line):
            yield from _google(list(_indented(lines, i + 1)))
        elif line.strip() in ("Parameters", "Other Parameters") and _begins_section(lines, i):
            yield from _numpy(_section(lines, i + 2))


def _google(body: list[str]) -> Iterator[tuple[str, str]]:
    """Entries stand at the least indentation; what is indented deeper belongs to the entry above."""
    margin = min((_margin(line) for line in body if line.strip()), default=0)
    name, words = "", [""]
    for line in body:
        entry = _GOOGLE_ENTRY.match(line.strip()) if _margin(line) == margin else None
        if entry is None:
            words.append(line)
            continue
        if name:
            yield name, _joined(words)
        name, words = entry[1], [entry[2]]
    if name:
        yield name, _joined(words)


def _numpy(body: list[str]) -> Iterator[tuple[str, str]]:
    for i, line in enumerate(body):
        entry = _NUMPY_ENTRY.match(line) if line and not line[0].isspace() else None
        if entry:
            text = _joined(list(_indented(body, i + 1)))
            yield from ((name.strip(), text) for name in entry[1].split(","))


def _section(lines: list[str], start: int) -> list[str]:
    end = next((i for i in range(start, len(lines)) if _begins_section(lines, i)), len(lines))
    return lines[start:end]


def _indented(lines: list[str], start: int) -> Iterator[str]:
    """The lines from `start` on that are indented or blank."""
    for line in lines[start:]:
        if line.strip() and not line[0].isspace():
            return
        yield line


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def _paragraphs(lines: list[str]) -> str:
    return "\n".join(_joined(part.splitlines()) for part in re.split(r"\n\s*\n", "\n".join(lines).strip()))
