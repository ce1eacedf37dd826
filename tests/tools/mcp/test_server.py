"""`posttrain serve-tools`, through fastmcp's own client over both transports, and through ours."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastmcp import Client
from fastmcp.client.transports import StdioTransport

from posttrain.cli import main
from posttrain.tools.mcp.client import open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.mcp.offer import ToolOffer, built_in_tools
from posttrain.tools.mcp.serve import serve
from posttrain.tools.mcp.server import build_server
from posttrain.tools.online.config import BUILT_IN
from posttrain.tools.online.render import relabelled
from posttrain.tools.online.service import NotConfigured
from posttrain.tools.protocol import ToolError, ToolResult, ToolSpec
from posttrain.trajectory import CallStatus

from ..online.stub import Reply, Stub, stub_server

TOKEN = "token-0123456789"
USER_TOOLS = '''
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus


async def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def trouble(kind: str) -> str:
    """Fails as told."""
    if kind == "busy":
        raise ToolError(CallStatus.FAILED, "busy", transient=True, retry_after=7.0)
    raise KeyError(kind)
'''


def config_file(folder: Path, stub: Stub) -> Path:
    (folder / "user_tools.py").write_text(USER_TOOLS, encoding="utf-8")
    tools = [
        "user_tools.py:add",
        {"location": "user_tools.py:trouble", "name": "trouble", "limits": {"retries": 0}},
        {"use": "google_search", "options": {"base_url": stub.url, "key_env": "MY_SERPER_KEY"}},
        "browse_webpage",
    ]
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": tools}), encoding="utf-8")  # JSON is YAML
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "posttrain", "serve-tools", "--config", str(config), *arguments]


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with stub_server() as server:
        entry = {"title": "Ada", "link": "https://ada.example/", "snippet": "A mathematician."}
        server.on("/search", Reply({"organic": [entry], "credits": 1}))
        yield server


@contextmanager
def http_server(config: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a server in a child process; ended by SIGTERM."""
    program = subprocess.Popen(
        command(config, "--port", "0", *arguments),
        stderr=subprocess.PIPE,
        text=True,
        cwd=config.parent,
        env={**os.environ, "MY_SERPER_KEY": "serper-0123456789", "MY_TOKEN": TOKEN},
    )
    assert program.stderr is not None
    try:
        line = program.stderr.readline()
        url = re.search(r"http://\S+/mcp", line)
        assert url, line + program.stderr.read()
        yield url[0], program
    finally:
        program.send_signal(signal.SIGTERM)
        code = program.wait(20)
        program.stderr.close()
        assert code in (0, -signal.SIGTERM, -signal.SIGKILL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, stub: Stub) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    with http_server(config_file(folder, stub), "--token-env", "MY_TOKEN") as (address, _):
        yield address


async def exercise(client: Client[Any]) -> None:
    """What a client of the wide world sees."""
    async with client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        assert set(tools) == {"add", "trouble", "google_search", "browse_webpage"}
        assert tools["add"].input_schema["properties"]["a"]["type"] == "integer"
        assert tools["add"].description
        assert tools["google_search"].input_schema["properties"]["num_results"]["default"] == 10
        added = await client.call_tool("add", {"a": 40, "b": 2})
        assert added.content[0].text == "42"
        calls = (client.call_tool("google_search", {"query": f"ada {at}"}) for at in range(8))
        for found in await asyncio.gather(*calls):
            assert found.content[0].text.startswith("<snippet id=")
            assert found.structured_content["data"][0]["title"] == "Ada"
        wrong = await client.call_tool("google_search", {"q": "ada"}, raise_on_error=False)
        assert wrong.is_error
        assert "arguments are query" in wrong.content[0].text
        private = await client.call_tool("browse_webpage", {"url": "http://169.254.169.254/"}, raise_on_error=False)
        assert private.is_error
        assert "not opened" in private.content[0].text
        broken = await client.call_tool("trouble", {"kind": "x"}, raise_on_error=False)
        assert broken.is_error
        assert (await client.call_tool("add", {"a": 1})).content[0].text == "2"  # it goes on


def test_fastmcps_client_over_http(url: str):
    asyncio.run(exercise(Client(url, auth=TOKEN)))


def test_fastmcps_client_over_stdio(tmp_path: Path, stub: Stub):
    config = config_file(tmp_path, stub)
    words = command(config, "--stdio")
    environment = {**os.environ, "MY_SERPER_KEY": "serper-0123456789"}
    transport = StdioTransport(words[0], words[1:], env=environment, cwd=str(tmp_path), keep_alive=False)
    asyncio.run(exercise(Client(transport)))


def test_our_client_loses_nothing(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", TOKEN)

    async def run() -> None:
        tools = {
            tool.spec.name: tool for tool in await open_mcp_tools([McpServerConfig(url=url, token_env="MY_TOKEN")])
        }
        found = await tools["google_search"].call({"query": "ada"})
        assert found.cost == {"requests": 1.0, "credits": 1.0}
        assert found.data[0]["url"] == "https://ada.example/"
        assert relabelled(found, "aaaaaaaa").text.startswith("<snippet id=aaaaaaaa-0>\nTitle: Ada")
        with pytest.raises(ToolError) as busy:
            await tools["trouble"].call({"kind": "busy"})
        assert (busy.value.message, busy.value.transient, busy.value.retry_after) == ("busy", True, 7.0)
        with pytest.raises(ToolError) as wrong:
            await tools["add"].call({"a": "many"})
        assert wrong.value.status is CallStatus.BAD_ARGUMENTS
        for tool in tools.values():
            await tool.close()

    asyncio.run(run())


def test_a_server_that_comes_back_is_found_again(tmp_path: Path, stub: Stub):
    config = config_file(tmp_path, stub)
    with http_server(config) as (address, program):
        port = address.split(":")[2].split("/")[0]

        async def first() -> Any:
            tools = {tool.spec.name: tool for tool in await open_mcp_tools([McpServerConfig(url=address)])}
            assert (await tools["add"].call({"a": 1})).text == "2"
            return tools

        tools = asyncio.run(first())
        program.kill()
        program.wait()

        async def down() -> None:
            with pytest.raises(ToolError) as lost:
                await tools["add"].call({"a": 1})
            assert lost.value.transient

        asyncio.run(down())

    async def again() -> None:
        assert (await tools["add"].call({"a": 2})).text == "3"
        for tool in tools.values():
            await tool.close()

    with http_server(config, "--port", port):
        asyncio.run(again())


def initialize(url: str, **headers: str) -> httpx.Response:
    body = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
    }  # fmt: skip
    accept = {"accept": "application/json, text/event-stream"}
    return httpx.post(url, json=body, headers={**accept, **headers}, trust_env=False)


class TestAttacks:
    def test_without_the_token_nothing_is_told(self, url: str):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": ""}):
            refused = initialize(url, **headers)
            assert refused.status_code == 401
            assert "add" not in refused.text
        assert initialize(url, authorization=f"Bearer {TOKEN}").status_code == 200

    def test_health_needs_no_token(self, url: str):
        answer = httpx.get(url.replace("/mcp", "/health"), trust_env=False)
        assert (answer.status_code, answer.text) == (200, "OK")

    def test_other_names_for_this_machine_are_refused(self, url: str):
        """A page in a browser whose name was rebound to 127.0.0.1."""
        right = {"authorization": f"Bearer {TOKEN}"}
        assert initialize(url, host="attacker.example", **right).status_code in (400, 403, 421)
        assert initialize(url, origin="http://attacker.example", **right).status_code in (400, 403)

    @pytest.mark.parametrize(
        ("body", "status"), [(b"[" * (64 << 20), 413), (b"[" * 100_000, 400)], ids=["a huge body", "a deep one"]
    )
    def test_odd_bodies_are_refused_and_it_goes_on(self, url: str, body: bytes, status: int):
        right = {"authorization": f"Bearer {TOKEN}", "accept": "application/json, text/event-stream"}
        right["content-type"] = "application/json"
        assert httpx.post(url, content=body, headers=right, trust_env=False, timeout=30).status_code == status
        assert initialize(url, authorization=right["authorization"]).status_code == 200

    def test_it_listens_on_this_machine_only(self, url: str):
        assert url.startswith("http://127.0.0.1:")
        port = int(url.split(":")[2].split("/")[0])
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                     if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port]  # fmt: skip
        assert listening == [f"0100007F:{port:04X}"]


class Fake:
    """A tool that gives what it was made with."""

    def __init__(self, name: str, result: ToolResult | Exception) -> None:
        self.spec = ToolSpec(name=name, description="A tool.", parameters={"type": "object", "properties": {}})
        self._result = result

    async def call(self, arguments: Any) -> ToolResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    async def close(self) -> None: ...


def test_a_fault_of_a_tool_tells_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERPER_API_KEY", "serper-0123456789")

    async def run() -> None:
        server = build_server([Fake("bad", RuntimeError("with serper-0123456789"))])
        async with Client(server) as client:
            answer = await client.call_tool("bad", {}, raise_on_error=False)
        assert answer.is_error
        assert "serper-0123456789" not in answer.content[0].text

    asyncio.run(run())


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are called 'x'"):
        build_server([Fake("x", ToolResult(text="")), Fake("x", ToolResult(text=""))])


def test_the_token_must_be_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with pytest.raises(NotConfigured, match="NO_SUCH_TOKEN"):
        serve(ToolOffer(), token_env="NO_SUCH_TOKEN")


def test_mistakes_end_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "tools.yaml"
    path.write_text("tools:\n- pubmed_search\n- use: browse_webpage\n  options: {fetchr: jina}\nmcp: ['']\n")
    monkeypatch.setattr(sys, "argv", ["posttrain", "serve-tools", "--config", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "options.fetchr" in said
    assert "mcp[0]: expected a URL or a command" in said
    assert "Traceback" not in said


def test_mcp_servers_are_served_on(tmp_path: Path):
    """An offer may hold tools of other servers, listed in a file as other programs have it."""
    odd = Path(__file__).with_name("odd_server.py")
    listed = {"odd": {"command": sys.executable, "args": [str(odd)], "tools": ["echo"], "type": "stdio"},
              "off": {"command": "nothing", "disabled": True}}  # fmt: skip
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": listed}))
    offer = ToolOffer.model_validate({"mcp": [str(tmp_path / "servers.json")]})
    assert [(config.name, config.tools) for config in offer.mcp] == [("odd", ("echo",))]

    async def run() -> None:
        tools = await open_mcp_tools(offer.mcp)
        async with Client(build_server(tools)) as client:
            assert (await client.call_tool("echo", {"text": "through"})).content[0].text == "through"
        for tool in tools:
            await tool.close()

    asyncio.run(run())


def test_the_yaml_of_the_page_is_an_offer():
    page = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    offer = ToolOffer.model_validate(yaml.safe_load(block))
    assert (len(offer.tools), len(offer.mcp)) == (4, 1)


def test_without_an_offer_all_that_can_be_had_is_served(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_SUBSCRIPTION_KEY")):
            monkeypatch.delenv(name)
    left_out: list[str] = []
    names = [tool.spec.name for tool in built_in_tools(left_out.append)]
    assert names[:4] == ["snippet_search", "semantic_scholar_search", "pubmed_search", "browse_webpage"]
    assert len(names) + len(left_out) == 11  # ten online ones, and python where it can be isolated
    assert any("SERPER_API_KEY" in reason for reason in left_out)


def test_built_in_tools_have_one_name_each():
    assert len(BUILT_IN) == 10
    assert "serper_google_webpage_search" not in BUILT_IN
