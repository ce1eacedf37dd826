"""Throws broken turns at the parsers of tool calls: `python benchmarks/fuzz_calls.py --cases 1000000`.

Each case is a text made of marks of all syntaxes, of valid calls and of pieces of them, or of random characters. It is
read at once and in random pieces. A case fails if something is raised, if the pieces give another result, if a position
lies outside the text, or if a call that is OK does not fit its tool's schema. The first failure is printed and stops.
"""

# ruff: noqa: E501 -- a table
from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from posttrain.chat.calls import SYNTAXES, CallParser, NotExpressible, Parsed, Signatures, Syntax, parse_turn
from posttrain.trajectory import CallStatus, StopReason

MARKS = [
    "<think>", "</think>", "<call_tool", ' name="search"', " name='find'", ' limit="2"', ">", "</call_tool>", "</call>",
    "<tool ", "</tool>", "<search>", "</search>", "</answer>", "<SEARCH>", "<tool_call>", "</tool_call>", "\n", "{", "}",
    "[", "]", '"name": "search"', '"arguments": ', '"parameters":', '{"query": "x"}', '"', "'", '"""', "\\", "\\u12",
    ",", ":", " ", "<function=search>", "<parameter=query>", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "search(", "query=", '"x"', ")", "**", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "Action: ", "Action 1: ", "Action Input: ", "search[", "\nObservation", "\nThought", "Finish[a]", "1e999", "12", "-",
    "true", "nul", "é", "\ud800", "\x00", "&quot;", "&amp;", "(", "9" * 500, "\u2028", "\r\n", "🙂", ".call(", "=", "#",
]  # fmt: skip
STOPS = [None, StopReason.LENGTH, StopReason.STOP_ID, StopReason.STOP_STRING]


@dataclass(frozen=True)
class Spec:
    name: str
    description: str
    parameters: dict[str, Any]


def _spec(tool: str, required: list[str], **properties: Any) -> Spec:
    return Spec(tool, "", {"type": "object", "properties": properties, "required": required})


SPECS = [
    _spec("search", ["query"], query={"type": "string"}),
    _spec(
        "find", ["query"], query={"type": "string"}, limit={"type": "integer"}, any={}, flag={"type": ["boolean", "null"]},
        tags={"type": "array", "items": {"type": "string"}}, deep={"type": "object"},
    ),
    _spec("now", []),
]  # fmt: skip
TOOLS = Signatures(SPECS)
VALIDATORS = {tool.name: Draft202012Validator(tool.schema) for tool in TOOLS}


@dataclass
class Tally:
    cases: int = 0
    statuses: Counter[CallStatus] = field(default_factory=Counter)


def text_of(rng: random.Random, syntax: Syntax) -> str:
    """One broken turn."""
    marks = "".join(rng.choice(MARKS) for _ in range(rng.randint(0, 20)))
    kind = rng.random()
    if kind < 0.1:
        return "".join(chr(rng.randint(0, 0x2FFF)) for _ in range(rng.randint(0, 60)))
    if kind < 0.5:
        return marks
    call = _call(rng, syntax)
    cut = rng.randint(0, len(call))
    return (
        rng.choice(["", marks])
        + call[:cut]
        + rng.choice(["", rng.choice(MARKS)])
        + call[cut:]
        + rng.choice(["", marks])
    )


def _call(rng: random.Random, syntax: Syntax) -> str:
    query = rng.choice(["a", "a]b", "</search>", "x\ny", "", '"', "</tool_call>", " b "])
    wild = {"query": query, "limit": 2, "any": [1.5, {"a": None}], "tags": ["x", query], "flag": True}
    calls = [rng.choice([("search", {"query": query}), ("find", wild), ("now", {})]) for _ in range(rng.randint(1, 2))]
    try:
        return syntax.render(calls, TOOLS)
    except NotExpressible:
        return ""


def in_pieces(rng: random.Random, text: str, parser: CallParser, stop: StopReason | None) -> Parsed:
    """The turn, fed in random pieces."""
    at, size = 0, rng.choice([1, 3, 9])
    while at < len(text):
        step = rng.randint(1, size)
        parser.feed(text[at : at + step])
        at += step
    return parser.finish(stop)


def check(rng: random.Random, tally: Tally) -> None:
    """One case; AssertionError, or whatever a parser raises, when it fails."""
    syntax = SYNTAXES[rng.choice(list(SYNTAXES))]
    text, stop, tools, in_thought = (
        text_of(rng, syntax),
        rng.choice(STOPS),
        rng.choice([TOOLS, None]),
        rng.random() < 0.1,
    )
    try:
        whole = parse_turn(text, syntax, tools, stop_reason=stop, in_thought=in_thought)
        pieces = in_pieces(rng, text, CallParser(syntax, tools, in_thought=in_thought), stop)
        assert pieces == whole, f"in pieces {pieces}, at once {whole}"
        for found in whole.attempts:
            assert 0 <= found.start <= found.end <= len(text), found
            assert (found.status is CallStatus.OK) == (found.detail == ""), found
            if found.status is CallStatus.OK and tools and found.name in VALIDATORS:
                VALIDATORS[found.name].validate(found.arguments)
            tally.statuses[found.status] += 1
            assert str(syntax.correction(found, tools))
    except BaseException:
        print(f"syntax {syntax.name}, stop {stop}, tools {tools is not None}, in_thought {in_thought}\n{text!r}")
        raise
    tally.cases += 1


def run(seed: int, cases: int) -> Tally:
    """`cases` cases; the same for the same seed."""
    rng, tally = random.Random(seed), Tally()
    for _ in range(cases):
        check(rng, tally)
    return tally


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.process_time()
    tally = run(options.seed, options.cases)
    seconds = time.process_time() - start
    print(f"{tally.cases:,} cases, seed {options.seed}, {seconds:.0f} s, no failure")
    print(", ".join(f"{status} {count:,}" for status, count in tally.statuses.most_common()))


if __name__ == "__main__":
    main()
