"""Does a program pass its tests? For rewards: expected answers never enter the sandbox.

Three forms of a test, as a mapping:

* `{"stdin": ..., "stdout": ...}`: a program that reads and prints; lines are compared, blanks at their ends aside;
* `{"call": "f(1, 2)", "expected": 3}`: an expression over what the code defines; its value leaves the sandbox as data
  and is compared here (floats within 1e-6, a tuple equals a list);
* `{"code": "assert f(1) == 2"}`: statements that run after the code and must reach their end. Code that wants to cheat
  can see them, and pretend: prefer the other two for rewards.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.boundary.foreign_json import read_json
from posttrain.sandbox.box import Sandbox, SandboxResult

Reason = Literal["", "wrong_answer", "error", "wall", "cpu", "memory", "output", "disk"]
_SHOWN_CHARACTERS = 300
_TOLERANCE = 1e-6
_SIDE_BY_SIDE = 4
_LOADED = -1  # index of the line which says that the code has run to its end

# Runs inside. Answers go to the real stdout, one line each; what the code prints goes to stderr.
_CALLS = """
def _encode(value, depth=0):
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"f": repr(float(value))}
    if depth > 50:
        return {"r": "nested too deeply"}
    if isinstance(value, (list, tuple)):
        return {"l": [_encode(entry, depth + 1) for entry in value]}
    if isinstance(value, (set, frozenset)):
        return {"s": sorted((_encode(entry, depth + 1) for entry in value), key=repr)}
    if isinstance(value, dict):
        pairs = [[_encode(key, depth + 1), _encode(entry, depth + 1)] for key, entry in value.items()]
        return {"d": sorted(pairs, key=repr)}
    return {"r": repr(value)}
"""
_HARNESS = (
    """
import json as _json, os as _os
_answers = _os.fdopen(_os.dup(1), "w", encoding="utf-8")
_os.dup2(2, 1)
"""
    + _CALLS
    + """
_scope = {"__name__": "solution"}
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), _scope)
_answers.write("[-1, {}]\\n")
_answers.flush()
for _index, _call in _json.load(open("calls.json", encoding="utf-8")):
    try:
        _answer = {"value": _encode(eval(compile(_call, "call", "eval"), _scope))}
    except BaseException as _error:
        _answer = {"error": f"{type(_error).__name__}: {_error}"[:300]}
    _answers.write(_json.dumps([_index, _answer]) + "\\n")
    _answers.flush()
"""
)
_scope: dict[str, Any] = {}
exec(compile(_CALLS, __file__, "exec"), _scope)  # the same function on both sides
_encode = _scope["_encode"]


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test: `reason` is "" when it passed; else what went wrong, or the limit that was hit."""

    __test__ = False  # not one of pytest's

    passed: bool
    reason: Reason = ""
    detail: str = ""


async def run_tests(
    sandbox: Sandbox, code: str, tests: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None
) -> list[TestResult]:
    """One result per test, in order. Each test has the time limit for itself.

    Raises SandboxError when the sandbox broke, ValueError for a test of no known form.
    """
    kinds = [_kind(test) for test in tests]
    room = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def single(index: int) -> tuple[int, TestResult]:
        async with room:
            return index, await _single(sandbox, code, tests[index], timeout_s)

    calls = [i for i, kind in enumerate(kinds) if kind == "call"]
    others = [single(i) for i, kind in enumerate(kinds) if kind != "call"]
    found = dict(await asyncio.gather(*others))
    found |= await _calls(sandbox, code, {i: tests[i] for i in calls}, timeout_s)
    return [found[i] for i in range(len(tests))]


def _kind(test: Mapping[str, Any]) -> str:
    if "call" in test and "expected" in test:
        ast.parse(test["call"], mode="eval")
        return "call"
    if "stdin" in test and "stdout" in test:
        return "stdin"
    if "code" in test:
        return "code"
    raise ValueError(f"a test is {{stdin, stdout}}, {{call, expected}} or {{code}}; got the keys {sorted(test)}")


async def _single(sandbox: Sandbox, code: str, test: Mapping[str, Any], timeout_s: float | None) -> TestResult:
    if "code" in test:
        mark = secrets.token_hex(16)  # printed by the last line: an early sys.exit(0) is no success
        program = f"{code}\n\n{test['code']}\n\nprint(flush=True)\nprint({mark!r})\n"
        result = await sandbox.run(program, timeout_s=timeout_s)
        if result.ok and result.stdout.rstrip("\n").endswith(mark):
            return TestResult(True)
        return _failure(result) or TestResult(False, "error", "ended before the end of the test")
    result = await sandbox.run(code, stdin=test["stdin"], timeout_s=timeout_s)
    failure = _failure(result)
    if failure is not None:
        return failure
    if compared_lines(result.stdout) == compared_lines(test["stdout"]):
        return TestResult(True)
    return TestResult(False, "wrong_answer", f"printed {_shown(result.stdout)}")


async def _calls(
    sandbox: Sandbox, code: str, tests: Mapping[int, Mapping[str, Any]], timeout_s: float | None
) -> dict[int, TestResult]:
    """All calls in one run; where one of them ends the run, the others go on in a further one."""
    found: dict[int, TestResult] = {}
    while left := [i for i in tests if i not in found]:
        files = {"solution.py": code, "calls.json": json.dumps([[i, tests[i]["call"]] for i in left])}
        result = await sandbox.run(_HARNESS, timeout_s=timeout_s, files=files)
        answers = [_answer(line) for line in result.stdout.splitlines()]
        for answer in answers:
            if answer is not None and answer[0] in left:
                found.setdefault(answer[0], _judged(answer[1], tests[answer[0]]["expected"]))
        missing = next((i for i in left if i not in found), None)
        if missing is not None:
            found[missing] = _failure(result) or TestResult(False, "error", "the code ended the program")
            if (_LOADED, {}) not in answers:
                return dict.fromkeys(left, found[missing]) | found
    return found


def _answer(line: str) -> tuple[int, Mapping[str, Any]] | None:
    try:
        index, answer = read_json(line)
        return (index, answer) if isinstance(index, int) and isinstance(answer, dict) else None
    except (ValueError, TypeError):
        return None


def _judged(answer: Mapping[str, Any], expected: Any) -> TestResult:
    if "value" not in answer:
        return TestResult(False, "error", str(answer.get("error", "")))
    if _equal(answer["value"], _encode(expected)):
        return TestResult(True)
    return TestResult(False, "wrong_answer", f"gave {_shown(json.dumps(answer['value']))}")


def _equal(one: Any, other: Any) -> bool:
    """Of two encoded values. 1, 1.0 and True are equal, as in Python."""
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        if isinstance(first, float) or isinstance(second, float):
            both_nan = first != first and second != second
            return both_nan or math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        return first == second
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


def _number(value: Any) -> int | float | None:
    if isinstance(value, dict) and set(value) == {"f"}:
        try:
            return float(value["f"])
        except (TypeError, ValueError):
            return None
    return value if isinstance(value, int) else None


def _failure(result: SandboxResult) -> TestResult | None:
    if result.limit is not None:
        return TestResult(False, result.limit, _shown(result.stderr))  # type: ignore[arg-type]
    if result.exit_code != 0:
        return TestResult(False, "error", result.stderr.rstrip()[-_SHOWN_CHARACTERS:] or f"exit {result.exit_code}")
    return None


def compared_lines(text: str) -> list[str]:
    """What of a program's output is compared: lines without white space at their ends, none empty at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
