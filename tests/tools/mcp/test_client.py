"""Tools of real MCP servers in child processes: a public one from the registry, and one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from posttrain.boundary.processes import TOKEN, living, wait_gone
from posttrain.tools.mcp.client import McpTool, McpToolError, open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.online.service import NotConfigured
from posttrain.tools.protocol import ToolError, ToolResult
from posttrain.trajectory import CallStatus

T = TypeVar("T")
ODD = Path(__file__).with_name("odd_server.py")
Tools = dict[str, McpTool]


def odd(*arguments: str, **options: Any) -> McpServerConfig:
    return McpServerConfig(command=sys.executable, args=(str(ODD), *arguments), **options)


def use(action: Callable[[Tools], Awaitable[T]], *configs: McpServerConfig, taken: tuple[str, ...] = ()) -> T:
    """Opens the tools, acts, closes them; afterwards no process of theirs is left."""

    async def run() -> T:
        tools = await open_mcp_tools(configs, taken)
        assert all(isinstance(tool, McpTool) for tool in tools)
        tokens = {tool._shared.connection._open.link.token for tool in tools}  # type: ignore[union-attr]
        try:
            return await action({tool.spec.name: tool for tool in tools})  # type: ignore[misc]
        finally:
            await asyncio.gather(*(tool.close() for tool in tools))
            assert [living(token) for token in tokens if token] == [set()] * len(tokens - {None})

    return asyncio.run(run())


async def failure(call: Awaitable[ToolResult]) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await call
    return caught.value


def token_of(tools: Tools) -> str:
    token = next(iter(tools.values()))._shared.connection._open.link.token
    assert token is not None
    return token


async def server_pid(tools: Tools) -> int:
    return json.loads((await tools["who"].call({})).text)["pid"]


class TestTheTimeServer:
    """`mcp-server-time`, a public package."""

    CONFIG = McpServerConfig.model_validate(f"{sys.executable} -m mcp_server_time --local-timezone UTC")

    def test_it_is_usable_killed_and_usable_again(self):
        pytest.importorskip("mcp_server_time")

        async def action(tools: Tools) -> None:
            assert set(tools) == {"get_current_time", "convert_time"}
            parameters = tools["convert_time"].spec.parameters
            assert parameters["required"] == ["source_timezone", "time", "target_timezone"]
            assert "title" not in json.dumps(parameters)
            arguments = {"source_timezone": "Europe/Paris", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            answers = await asyncio.gather(*(tools["convert_time"].call(arguments) for _ in range(20)))
            assert {answer.data["target"]["timezone"] for answer in answers} == {"Asia/Tokyo"}
            assert json.loads(answers[0].text) == answers[0].data
            wrong = await failure(tools["get_current_time"].call({"timezone": "Mars/Olympus"}))
            assert (wrong.status, wrong.transient) == (CallStatus.FAILED, False)
            assert "Mars/Olympus" in wrong.message

            before = living(token_of(tools))
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            lost = await failure(tools["get_current_time"].call({"timezone": "UTC"}))
            assert (lost.status, lost.transient) == (CallStatus.FAILED, True)
            again = await tools["get_current_time"].call({"timezone": "UTC"})
            assert again.data["timezone"] == "UTC"
            assert not living(token_of(tools)) & before

        use(action, self.CONFIG)


def test_results_of_every_kind():
    async def action(tools: Tools) -> None:
        echo = await tools["echo"].call({"text": "héllo\u2028x"})
        assert (echo.text, echo.data) == ("héllo\u2028x", {"text": "héllo\u2028x"})
        assert (await tools["picture"].call({})).text == "[image/png, 3 bytes]\nx"
        failed = await failure(tools["fail"].call({}))
        assert (failed.status, failed.message) == (CallStatus.FAILED, "it did not work")
        refused = await failure(tools["refuse"].call({}))
        assert (refused.status, refused.message) == (CallStatus.BAD_ARGUMENTS, "the MCP server odd1: text is wrong")
        generic = await failure(tools["generic"].call({}))  # the code of a closed connection, for something else
        assert (generic.status, generic.transient) == (CallStatus.FAILED, False)
        assert tools["echo"]._shared.connection.restarts == 0
        assert tools["odd_name"].remote_name == "odd.name"
        assert (await tools["odd_name"].call({"text": "x"})).text == "x"
        assert tools["echo"].spec.parameters["properties"]["text"] == {"type": "string"}

    use(action, odd(name="odd1"))


@pytest.mark.alone
def test_calls_run_side_by_side():
    async def action(tools: Tools) -> None:
        started = time.monotonic()
        await asyncio.gather(*(tools["sleep"].call({"seconds": 0.3, "text": "x"}) for _ in range(20)))
        assert time.monotonic() - started < 3.0

    use(action, odd())


def test_a_call_has_a_deadline_and_the_others_go_on():
    async def action(tools: Tools) -> None:
        slow, quick = await asyncio.gather(
            failure(tools["sleep"].call({"seconds": 30})), tools["echo"].call({"text": "x"})
        )
        assert (slow.status, slow.transient, quick.text) == (CallStatus.TIMEOUT, True, "x")
        assert slow.message == "the MCP server gave no answer within 0.4 s"
        pid = await server_pid(tools)
        assert (await tools["echo"].call({"text": "y"})).text == "y"
        assert await server_pid(tools) == pid  # it answered a ping, so it was kept

    use(action, odd(call_seconds=0.4))


def test_a_server_that_hangs_is_started_anew():
    async def action(tools: Tools) -> None:
        pid = await server_pid(tools)
        assert (await failure(tools["hang"].call({}))).status is CallStatus.TIMEOUT
        assert await server_pid(tools) != pid

    use(action, odd(call_seconds=0.4))


def test_a_caller_that_gives_up_leaves_the_connection_whole():
    async def action(tools: Tools) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools["sleep"].call({"seconds": 30}), 0.2)
        assert (await tools["echo"].call({"text": "x"})).text == "x"

    use(action, odd())


def test_calls_that_die_together_restart_the_server_once():
    async def action(tools: Tools) -> None:
        calls = [failure(tools["sleep"].call({"seconds": 30})) for _ in range(10)]
        waiting = asyncio.gather(*calls)
        await asyncio.sleep(0.3)
        await failure(tools["die"].call({}))
        assert {(error.status, error.transient) for error in await waiting} == {(CallStatus.FAILED, True)}
        answers = await asyncio.gather(*(tools["echo"].call({"text": str(at)}) for at in range(10)))
        assert [answer.text for answer in answers] == [str(at) for at in range(10)]
        connection = tools["echo"]._shared.connection
        assert (connection.restarts, connection._open.link._failures) == (1, 1)

    use(action, odd())


@pytest.mark.alone
def test_restarts_are_bounded_and_the_end_is_final():
    async def action(tools: Tools) -> None:
        for _ in range(3):
            assert (await failure(tools["die"].call({}))).transient
        started = time.monotonic()
        error = await failure(tools["die"].call({}))
        assert (error.status, error.transient) == (CallStatus.FAILED, False)
        assert error.message == "the MCP server odd1 failed 3 times in a row and is not started again"
        assert "the last words" in error.__notes__[0]  # for the operator
        assert time.monotonic() - started < 0.5
        assert not living(token_of(tools))

    use(action, odd(name="odd1", max_restarts=2, backoff_seconds=0.01))


def test_the_policy_reads_no_path_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ODD_API_KEY", "key-0123456789")

    async def action(tools: Tools) -> None:
        seen = json.loads((await tools["who"].call({})).text)["env"]
        assert (seen["ODD_API_KEY"], seen["COLOUR"]) == ("key-0123456789", "red")
        assert "SERPER_API_KEY" not in seen
        assert "PYTHONPATH" not in seen, "our packages may be of another Python than the server's"
        error = await failure(tools["die"].call({}))
        assert error.message == "the MCP server ended during the call"
        assert "key-0123456789" not in repr(error) + str(error.__notes__)

    monkeypatch.setenv("SERPER_API_KEY", "serper-0123456789")
    use(action, odd(env={"COLOUR": "red"}, pass_env=("ODD_API_KEY",)))


def test_names_that_clash_get_the_servers_name():
    async def action(tools: Tools) -> None:
        assert {"a_echo", "b_echo", "a_odd_name"} <= set(tools)
        assert "echo" not in tools
        assert (await tools["b_echo"].call({"text": "x"})).text == "x"

    use(action, odd("--named", "a"), odd("--named", "b"))

    async def action2(tools: Tools) -> None:
        assert set(tools) == {"mine_echo", "sleep"}

    use(action2, odd(name="mine", tools=("echo", "sleep")), taken=("echo",))


def test_a_tool_that_is_not_there_is_named():
    with pytest.raises(McpToolError, match=r"has no tool 'ecco'.*'echo'"):
        use(lambda _: asyncio.sleep(0), odd(tools=("sleep", "ecco")))


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ToolError, match="did not start") as died:
        use(lambda _: asyncio.sleep(0), odd("--die-at-start"))
    assert "cannot find its settings" in died.value.__notes__[0]
    with pytest.raises(ToolError, match="did not start") as absent:
        use(lambda _: asyncio.sleep(0), McpServerConfig(command="no-such-command-here"))
    assert "no-such-command-here: No such file" in absent.value.__notes__[0]
    started = time.monotonic()
    with pytest.raises(ToolError, match="did not start"):
        use(lambda _: asyncio.sleep(0), odd("--slow-start", start_seconds=0.5))
    assert time.monotonic() - started < 8.0


def test_a_server_that_is_not_there():
    with pytest.raises(ToolError, match="did not start") as absent:
        use(lambda _: asyncio.sleep(0), McpServerConfig(url="http://127.0.0.1:9/mcp"))
    assert absent.value.transient


def test_one_that_fails_leaves_none_running():
    before = children()
    with pytest.raises(ToolError):
        use(lambda _: asyncio.sleep(0), odd(), odd("--die-at-start"))
    assert children() <= before


def children() -> set[int]:
    """Our child processes, of whichever thread."""
    return {int(word) for file in Path("/proc/self/task").glob("*/children") for word in file.read_text().split()}


def test_a_stubborn_server_and_its_grandchild_are_ended():
    async def action(tools: Tools) -> None:
        pid = int((await tools["grandchild"].call({})).text)
        assert pid in living(token_of(tools))

    started = time.monotonic()
    use(action, odd("--stubborn"))  # checks that nothing is left
    assert time.monotonic() - started < 12.0


def test_it_serves_one_event_loop_after_the_other():
    """A run opens tools in one loop and uses them in others; the server is started once."""
    tools = {tool.spec.name: tool for tool in asyncio.run(open_mcp_tools([odd()]))}
    pids = {asyncio.run(server_pid(tools)) for _ in range(3)}  # type: ignore[arg-type]
    assert len(pids) == 1
    asyncio.run(tools["echo"].close())
    assert pids  # the others still hold the connection
    assert asyncio.run(server_pid(tools)) in pids  # type: ignore[arg-type]
    for _ in range(2):
        token = token_of(tools)  # type: ignore[arg-type]
        for tool in tools.values():
            asyncio.run(tool.close())
        assert wait_gone(token, 1.0)
        assert asyncio.run(server_pid(tools)) not in pids  # type: ignore[arg-type]  (used again, it is there again)
    asyncio.run(tools["who"].close())


WAYS = {"raise": 5, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}
SCRIPT = """
import asyncio, os, signal, sys, time
from posttrain.tools.mcp.client import open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig

way = None
for other in sys.argv[2:]:  # a program for each way to end, which need not import everything again
    if os.fork() == 0:
        way = other
        break
if way is None:
    for _ in sys.argv[2:]:
        pid, status = os.wait()
        os.write(1, f"ended {pid} {os.waitstatus_to_exitcode(status)}\\n".encode())  # whole lines: others write, too
    sys.exit()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
tools = asyncio.run(open_mcp_tools([McpServerConfig(command=sys.executable, args=(sys.argv[1],))]))
named = {tool.spec.name: tool for tool in tools}
asyncio.run(named["grandchild"].call({}))
os.write(1, f"{way} {os.getpid()} {named['echo']._shared.connection._open.link.token}\\n".encode())
if way == "raise":
    raise SystemExit(5)
time.sleep(60)
"""


def test_no_child_outlives_the_program():
    """Neither an end without a `close`, nor Ctrl-C, nor a kill -9 leaves a server or what that started."""
    command = [sys.executable, "-c", SCRIPT, str(ODD), *WAYS]
    started: dict[str, tuple[int, str]] = {}
    codes: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            word, pid, rest = line.split()
            if word == "ended":
                codes[int(pid)] = int(rest)
                continue
            started[word] = (int(pid), rest)
            assert len(rest) == 16
            if word != "raise":
                assert len(living(rest)) == 3  # leash, server, its child
                os.kill(int(pid), signal.SIGKILL if word == "kill" else signal.SIGINT)
    assert all(wait_gone(token, 5.0) for _, token in started.values())
    assert {way: codes[pid] for way, (pid, _) in started.items()} == WAYS


def test_the_token_of_children_is_not_inherited_from_us():
    assert TOKEN not in os.environ


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "either a url or a command"),
        ({"url": "http://a/mcp", "command": "x"}, "either a url or a command"),
        ({"url": "a/mcp"}, "expected a URL"),
        ({"url": "http://a/mcp", "args": ["x"]}, "args belongs to a command"),
        ({"command": "x", "token_env": "T"}, "pass_env"),
        ({"command": "x", "name": "a b"}, "letters"),
        ({"command": "x", "retries": 3}, "Extra inputs"),
        ("", "empty"),
        ("'x", "quotation"),
    ],
)
def test_configs_say_what_is_wrong(given: Any, said: str):
    with pytest.raises(ValueError, match=said):
        McpServerConfig.model_validate(given)


def test_texts_are_urls_or_commands():
    assert McpServerConfig.model_validate("https://mcp.example/mcp").url == "https://mcp.example/mcp"
    command = McpServerConfig.model_validate("npx -y 'a server' --flag")
    assert (command.command, command.args) == ("npx", ("-y", "a server", "--flag"))


def test_missing_variables_are_named():
    with pytest.raises(NotConfigured, match="NO_SUCH_VARIABLE"):
        odd(pass_env=("NO_SUCH_VARIABLE",)).child_environment()
    with pytest.raises(NotConfigured, match="NO_SUCH_VARIABLE"):
        McpServerConfig(url="http://127.0.0.1:9/", token_env="NO_SUCH_VARIABLE").token()
