"""Programs and their tests: what passes, what does not, and what cannot be pretended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.sandbox.ways import WAYS

from posttrain.sandbox import Sandbox, SandboxLimits, TestResult, run_tests

pytestmark = pytest.mark.skipif(not WAYS, reason="no way of isolation works on this machine")


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(SandboxLimits(wall_seconds=5.0))
    yield sandbox
    sandbox.close()


def judge(box: Sandbox, code: str, tests: list[dict[str, Any]], timeout_s: float | None = None) -> list[TestResult]:
    return asyncio.run(run_tests(box, code, tests, timeout_s=timeout_s))


def reasons(results: list[TestResult]) -> list[str]:
    assert all(result.passed == (result.reason == "") for result in results)
    return [result.reason for result in results]


def test_programs_that_read_and_print(box: Sandbox):
    code = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))"
    tests = [
        {"stdin": "2\n3\n4\n", "stdout": "7"},
        {"stdin": "1\n3\n", "stdout": "3 \n\n"},
        {"stdin": "1\n3\n", "stdout": "4"},
        {"stdin": "x", "stdout": "4"},
    ]
    results = judge(box, code, tests)
    assert reasons(results) == ["", "", "wrong_answer", "error"]
    assert "ValueError" in results[3].detail


def test_calls_are_compared_outside(box: Sandbox):
    code = """
def f(x):
    print("noise")
    return x
"""
    tests = [
        {"call": "f(3)", "expected": 3},
        {"call": "f((1, [2.0000000001, 'a']))", "expected": [1, (2, "a")]},
        {"call": "f({'a': {1, 2}, 2: None})", "expected": {2: None, "a": {2, 1}}},
        {"call": "f(float('nan'))", "expected": float("nan")},
        {"call": "f(True)", "expected": 1},
        {"call": "f('3')", "expected": 3},
        {"call": "f([1])", "expected": [1, 1]},
        {"call": "f(1, 2)", "expected": 1},
        {"call": "g(1)", "expected": 1},
    ]
    results = judge(box, code, tests)
    assert reasons(results) == [""] * 5 + ["wrong_answer"] * 2 + ["error"] * 2
    assert "NameError" in results[8].detail


def test_one_endless_call_does_not_take_the_others_with_it(box: Sandbox):
    code = "def f(x):\n  while x == 1: pass\n  if x == 2: import os; os._exit(0)\n  return x"
    tests = [{"call": f"f({x})", "expected": x} for x in range(5)]
    found = reasons(judge(box, code, tests, timeout_s=1.0))
    assert found[1] in ("wall", "cpu")
    assert found[:1] + found[2:] == ["", "error", "", ""]


def test_statements_must_reach_their_end(box: Sandbox):
    tests = [{"code": "assert f(2) == 4"}, {"code": "assert f(2) == 5"}]
    assert reasons(judge(box, "def f(x): return 2 * x", tests)) == ["", "error"]
    for escape in ("import sys; sys.exit(0)", "import os; os._exit(0)", "def f(x): raise SystemExit"):
        assert reasons(judge(box, escape, tests)) == ["error", "error"]


FOUND_OPEN = """
import os
for number in range(3, 64):
    try: os.write(number, LINE)
    except OSError: pass
def f(x): return 1
"""


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'[0, {"value": ' * 4_000,
        b'[0, {"value": ' + b"[" * 950 + b"]" * 950 + b"}]",
        b"9" * 6000,
        b"\xff",
    ],
    ids=["nested lists", "nested objects", "deep", "a long number", "no text"],
)
def test_what_a_program_writes_among_the_answers_breaks_nothing(box: Sandbox, line: bytes):
    """A wrong answer stays wrong: it must not become a sample that cannot be judged."""
    code = FOUND_OPEN.replace("LINE", repr(line + b"\n"))
    (result,) = judge(box, code, [{"call": "f(3)", "expected": [9]}])
    assert (result.passed, result.reason) == (False, "wrong_answer")


@pytest.mark.parametrize(
    "cheat",
    [
        "class Any:\n  def __eq__(self, other): return True\n  def __repr__(self): return '3'\ndef f(x): return Any()",
        "import os\nos.write(1, b'[0, {\"value\": true}]\\n')\nos._exit(0)",
        "import json\njson.dumps = lambda *a, **k: '[0, {\"passed\": true}]'\ndef f(x): return None",
        "import builtins\nbuiltins.eval = lambda *a: True\ndef f(x): return 0",
        "import sys\nsys.exit(0)",
        "f = lambda x: __import__('inspect').stack()[1].frame.f_globals.get('expected')",
    ],
)
def test_a_pretended_answer_fails(box: Sandbox, cheat: str):
    """What is expected is not inside, so nothing that the code does there can match it but by knowing it."""
    assert not any(result.passed for result in judge(box, cheat, [{"call": "f(3)", "expected": 9}]))


def test_code_that_does_not_load_fails_every_call(box: Sandbox):
    results = judge(box, "def f(:", [{"call": "f(1)", "expected": 1}] * 5)
    assert reasons(results) == ["error"] * 5
    assert "SyntaxError" in results[4].detail


def test_a_test_of_no_known_form_is_refused(box: Sandbox):
    with pytest.raises(ValueError, match="got the keys"):
        judge(box, "", [{"input": "1", "output": "2"}])
    with pytest.raises(SyntaxError):
        judge(box, "", [{"call": "f(", "expected": 1}])
