"""The python tool: what the policy reads of what its code did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.sandbox.ways import WAYS

from posttrain.task import EpisodeInvalid
from posttrain.tools import ToolError
from posttrain.tools.python import PythonTool

pytestmark = pytest.mark.skipif(not WAYS, reason="no way of isolation works on this machine")


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    tool = PythonTool(seconds=1.0, output_bytes=2000)
    yield tool
    asyncio.run(tool.close())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "[no output; use print to see a value]"),
        ("import sys; sys.exit(3)", "[exit code 3]"),
        (
            "print('a')\n1 / 0",
            'a\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n    1 / 0\n',
        ),
        ("import time; print('a', flush=True); time.sleep(9)", "a\n[stopped: it ran longer than 1 s]"),
        ("while True: print('x' * 100)", "[stopped: it wrote more than 2000 bytes]"),
    ],
)
def test_the_policy_reads_what_happened(python: PythonTool, code: str, text: str):
    result = asyncio.run(python.call({"code": code}))
    assert text in result.text
    assert result.data["exit_code"] is not None or result.data["limit"]


def test_bad_arguments_are_refused(python: PythonTool):
    with pytest.raises(ToolError, match="code is missing"):
        asyncio.run(python.call({"source": "x"}))


def test_a_broken_sandbox_is_no_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(EpisodeInvalid, match="cannot be isolated"):
        asyncio.run(PythonTool().call({"code": "print(1)"}))
