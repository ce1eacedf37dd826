"""Functions as tools: in a process that can be killed, with whatever they return or raise."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tools import functions

from posttrain.boundary.processes import living, wait_gone
from posttrain.task import EpisodeInvalid
from posttrain.tools import FunctionTool, ToolDefinitionError, ToolError, ToolResult, function_tool
from posttrain.tools.function import importable
from posttrain.trajectory import CallStatus


@pytest.fixture
def bad() -> Iterator[FunctionTool]:
    tool = function_tool(functions.misbehave.function, workers=1)
    yield tool
    asyncio.run(tool.close())


def call(tool: FunctionTool, seconds: float | None = None, **arguments: Any) -> ToolResult:
    async def within() -> ToolResult:
        async with asyncio.timeout(seconds):
            return await tool.call(arguments)

    return asyncio.run(within())


def token_of(tool: FunctionTool) -> str:
    """The mark of its one worker, which is idle."""
    call(tool, how="none")
    assert tool._pool is not None
    (worker,) = tool._pool._idle
    return worker.token


def test_a_decorated_function_is_a_tool_and_still_a_function():
    assert functions.add(2) == 3
    assert functions.add.spec.description == "Adds two numbers."
    assert functions.add.spec.parameters["required"] == ["a"]
    assert call(functions.add, a=2, b="5").text == "7"
    assert call(functions.add_later, a=2).text == "3"


def test_wrong_arguments_say_what_was_seen_and_expected(bad):
    for tool in (functions.add, functions.add_later):
        with pytest.raises(ToolError, match=r'a: expected a valid integer.*got "x"') as caught:
            call(tool, a="x")
        assert caught.value.status is CallStatus.BAD_ARGUMENTS


def test_a_worker_is_used_again_and_printing_does_not_disturb_it():
    first, second = call(functions.count).data, call(functions.count).data
    assert (first["calls"], second["calls"]) == (1, 2)
    assert first["pid"] == second["pid"] != os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="finds left processes in /proc")
def test_p54_p55_a_hanging_call_is_killed_with_all_its_children(bad):
    token = token_of(bad)
    started = time.perf_counter()

    async def hang() -> int:
        running = asyncio.ensure_future(bad.call({"how": "hang"}))
        ticks = 0
        while time.perf_counter() < started + 1.0:
            await asyncio.sleep(0.02)
            ticks += 1
        assert len(living(token)) >= 4, "the worker, its watcher and two daemons"
        running.cancel()
        await asyncio.wait({running})
        return ticks

    assert asyncio.run(hang()) > 15  # the event loop lived on
    assert time.perf_counter() - started < 5
    assert not living(token)
    assert "sleep 600" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True, text=True).stdout
    assert call(bad, how="none").text == ""  # and the next call finds a new worker


@pytest.mark.parametrize("how", ["sleep", "big_number"])
def test_p55_code_that_holds_the_interpreter_is_killed(bad, how: str):
    token = token_of(bad)
    with pytest.raises(TimeoutError):
        call(bad, 0.4, how=how)
    assert not living(token)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "exit code 3"),
        ("sys_exit", "SystemExit: bye"),
        ("segfault", "segmentation fault"),
        ("kill", "no memory left"),
        ("memory", "MemoryError"),
        ("raise", "ValueError: no such thing"),
        ("unpicklable", "cannot leave its process"),
    ],
)
def test_a_crash_is_a_failure_with_its_reason(bad, how: str, words: str):
    with pytest.raises(ToolError, match=words) as caught:
        call(bad, how=how)
    assert caught.value.status is CallStatus.FAILED
    assert not caught.value.transient
    assert call(bad, how="bytes").text == "\ufffd ok"  # the tool goes on


@pytest.mark.skipif(sys.platform != "linux", reason="finds left processes in /proc")
def test_children_of_a_crashed_worker_die_too(bad):
    token = token_of(bad)
    with pytest.raises(ToolError, match="exit code 7"):
        call(bad, how="fork_and_crash")
    assert wait_gone(token, 1.0)


def test_a_lost_connection_is_transient_and_own_errors_pass(bad):
    with pytest.raises(ToolError) as caught:
        call(bad, how="connection")
    assert caught.value.transient
    with pytest.raises(ToolError, match="busy") as caught:
        call(bad, how="own_error")
    assert caught.value.retry_after == 2.0
    with pytest.raises(EpisodeInvalid, match="tool_down"):
        call(bad, how="invalid")


def test_a_secret_in_an_error_is_replaced_by_its_name(bad, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    with pytest.raises(ToolError) as caught:
        call(bad, how="secret")
    assert caught.value.message.endswith("key=[SOME_API_KEY]")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("none", ""),
        ("bytes", "\ufffd ok"),
        ("surrogate", "\ufffd\ufffd\ufffd"),
        ("exception", "ValueError: returned"),
        ("object", '{"a": "{1, 2}"}'),
        ("result", "t"),
        ("stdin", ""),
    ],
)
def test_p58_whatever_it_returns_becomes_text(bad, how: str, text: str):
    assert call(bad, how=how).text == text


def test_a_worker_ends_with_its_parent_in_the_midst_of_a_call():
    code = """
import asyncio, os, threading, time
from tests.tools.test_function import functions, token_of
print(token_of(functions.misbehave), flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
asyncio.run(functions.misbehave.call({"how": "big_number"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    token = done.stdout.strip()
    assert token, done.stderr
    assert wait_gone(token, 3.0), living(token)


def test_a_limit_on_memory():
    tool = function_tool(functions.misbehave.function, workers=1, memory_bytes=512 << 20)
    with pytest.raises(ToolError, match="MemoryError"):
        call(tool, how="memory")
    asyncio.run(tool.close())


def test_closures_lambdas_and_scripts_are_refused_with_the_way_out():
    def inner(a: int) -> int:
        """Adds."""
        return a + 1

    with pytest.raises(ToolDefinitionError, match="isolate=False"):
        call(function_tool(inner), a=1)
    assert call(function_tool(inner, isolate=False), a=1).text == "2"
    with pytest.raises(ToolDefinitionError, match="lambda"):
        importable(lambda: 0, "f")


def test_options_are_hidden_from_the_policy():
    tool = function_tool(functions.add.function, options={"b": 40})
    assert list(tool.spec.parameters["properties"]) == ["a"]
    assert call(tool, a=2).text == "42"
    assert tool.spec.version != functions.add.spec.version
    asyncio.run(tool.close())
    with pytest.raises(ToolDefinitionError, match="no parameter 'c'"):
        function_tool(functions.add.function, options={"c": 1})


def test_a_function_that_cannot_be_loaded_in_its_process_says_so(tmp_path):
    (tmp_path / "t.py").write_text("import os\nassert 'POSTTRAIN_WORKER' not in os.environ, 'not here'\n")
    tool = function_tool(functions.add.function, location=f"{tmp_path / 't.py'}:add")
    with pytest.raises(ToolDefinitionError, match="not here"):
        call(tool, a=1)


def test_calls_run_side_by_side_up_to_the_number_of_workers():
    tool = function_tool(functions.nap, workers=3)

    async def many() -> list[ToolResult]:
        return await asyncio.gather(*(tool.call({"seconds": 0.2}) for _ in range(6)))

    pids = {result.text for result in asyncio.run(many())}
    asyncio.run(tool.close())
    assert len(pids) == 3
