"""Served tools have what tools of a run have: retries, deadlines, limits, caches. One configuration, one builder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client, FastMCP
from fastmcp.client.client import CallToolResult
from pydantic import ValidationError

from posttrain.config import RLConfig
from posttrain.task import EpisodeInvalid
from posttrain.tools.config import ToolConfig, close_tools
from posttrain.tools.mcp.client import _error_of, _result_of
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.mcp.offer import ToolOffer, open_tools
from posttrain.tools.mcp.opening import open_guarded_mcp_tools
from posttrain.tools.mcp.server import build_server, serve_http
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

from ..online.stub import Reply, Stub, stub_server

FOUND = Reply({"organic": [{"title": "Ada", "link": "https://ada.example/", "snippet": "A mathematician."}]})
Call = Callable[..., Awaitable[CallToolResult]]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("SERPER_API_KEY", "serper-0123456789")
    with stub_server() as server:
        server.on("/search", FOUND)
        yield server


def served(offer: dict[str, Any], action: Callable[[Call], Awaitable[None]]) -> None:
    """`action` gets a function that calls a tool of the offer through a client."""

    async def run() -> None:
        tools = await open_tools(ToolOffer.model_validate(offer))
        try:
            async with Client(build_server(tools)) as client:

                async def call(name: str, **arguments: Any) -> CallToolResult:
                    return await client.call_tool(name, arguments, raise_on_error=False)

                await action(call)
        finally:
            await close_tools(tools)

    asyncio.run(run())


@asynccontextmanager
async def listening(server: FastMCP) -> AsyncIterator[str]:
    """The URL of the server, which runs meanwhile."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    job = asyncio.ensure_future(serve_http(server, port=0, on_ready=url.set_result))
    try:
        yield await url
    finally:
        job.cancel()
        await asyncio.wait([job])


def google(stub: Stub, **more: Any) -> dict[str, Any]:
    return {"use": "google_search", "options": {"base_url": stub.url}, **more}


def test_an_offer_is_the_tools_section_of_a_run():
    assert ToolOffer.model_fields["tools"].annotation == RLConfig.model_fields["tools"].annotation
    entries = ["pubmed_search", {"use": "google_search"}, {"name": "g", "use": "google_search"}, {"location": "a.py:f"}]
    offer = ToolOffer.model_validate({"tools": entries})
    assert [tool.name for tool in offer.tools] == ["pubmed_search", "google_search", "g", "f"]
    assert all(isinstance(tool, ToolConfig) for tool in offer.tools)
    with pytest.raises(ValidationError, match="name"):
        ToolOffer.model_validate({"tools": [{"limits": {"retries": 1}}]})


def test_a_busy_service_is_asked_again(stub: Stub):
    stub.on("/search", Reply("busy", status=503), Reply("busy", status=429), FOUND)

    async def action(call: Call) -> None:
        answer = await call("google_search", query="ada")
        assert not answer.is_error
        assert len(stub.requests) == 3

    served({"tools": [google(stub, limits={"retries": 2, "backoff_seconds": 0})]}, action)


def test_a_run_does_not_try_again_what_the_server_has_tried(stub: Stub):
    """Two sides with two retries each ask three times, not nine."""
    stub.on("/search", Reply("busy", status=503))

    async def run() -> None:
        tools = await open_tools(ToolOffer.model_validate({"tools": [google(stub, limits=limits)]}))
        async with listening(build_server(tools)) as url:
            (tool,) = await open_guarded_mcp_tools([McpServerConfig.model_validate({"url": url, "limits": limits})])
            with pytest.raises(ToolError, match="503") as caught:
                await tool.call({"query": "ada"})
            assert (caught.value.transient, caught.value.attempts) == (True, 3)
            assert len(stub.requests) == 3
            assert (tool.counters.retries, tools[0].counters.retries) == (2, 2)
            stub.on("/search", Reply("busy", status=503), FOUND)
            assert (await tool.call({"query": "ada"})).attempts == 2
            await tool.close()
        await close_tools(tools)

    limits = {"retries": 2, "backoff_seconds": 0}
    asyncio.run(run())


def test_a_huge_result_is_cut_before_it_is_sent(tmp_path: Path):
    (tmp_path / "huge.py").write_text(HUGE)
    location = f"{tmp_path}/huge.py:dump"
    entry = {"location": location, "options": {"isolate": False}, "limits": {"result_bytes": 2000}}

    async def action(call: Call) -> None:
        answer = await call("dump", megabytes=50)
        assert len(str(answer.content)) + len(str(answer.structured_content)) < 6000
        found = _result_of(answer)
        assert found.text.endswith(f"...(cut: this result has {50 << 20} bytes, 2000 are passed on)")
        assert found.bytes_cut >= (50 << 20) - 2000
        assert _result_of(await call("dump", megabytes=0)).bytes_cut == 0

    served({"tools": [entry]}, action)


HUGE = '''
async def dump(megabytes: int) -> str:
    """Gives very much.

    Args:
        megabytes: how much
    """
    return "x" * (megabytes << 20)
'''


@pytest.mark.alone
def test_a_slow_service_meets_the_deadline(stub: Stub):
    stub.on("/search", Reply({"organic": []}, wait=5.0))

    async def action(call: Call) -> None:
        started = time.monotonic()
        with pytest.raises(ToolError, match="longer than") as slow:
            raise _error_of(await call("google_search", query="ada"))
        assert slow.value.status is CallStatus.TIMEOUT
        assert time.monotonic() - started < 3

    served({"tools": [google(stub, limits={"seconds": 0.3, "retries": 0})]}, action)


def test_calls_are_limited_in_rate_and_number(stub: Stub):
    stub.on("/search", Reply(FOUND.body, wait=0.05))

    async def action(call: Call) -> None:
        started = time.monotonic()
        await asyncio.gather(*(call("google_search", query=f"q{n}") for n in range(5)))
        assert time.monotonic() - started > 4 / 20  # the first at once, four more at 20 a second

    served({"tools": [google(stub, limits={"per_second": 20, "concurrency": 2})]}, action)


def test_a_recorded_run_is_served_offline(stub: Stub, tmp_path: Path):
    """What is not stored is no failure to learn from: for our own client it is an episode that cannot be judged."""

    async def record(call: Call) -> None:
        for _ in range(2):
            answer = _result_of(await call("google_search", query="ada"))
        assert answer.cached
        assert len(stub.requests) == 1

    served({"tools": [google(stub, cache={"mode": "use", "path": str(tmp_path)})]}, record)

    async def replay(call: Call) -> None:
        assert _result_of(await call("google_search", query="ada")).data[0]["title"] == "Ada"
        missing = await call("google_search", query="grace")
        assert missing.is_error
        with pytest.raises(EpisodeInvalid) as unknown:
            raise _error_of(missing)
        assert unknown.value.reason == "cache_miss"
        assert len(stub.requests) == 1

    served({"tools": [google(stub, cache={"mode": "replay", "path": str(tmp_path)})]}, replay)


def test_two_tools_of_one_name_are_refused(stub: Stub):
    with pytest.raises(Exception, match="two tools are called google_search"):
        asyncio.run(open_tools(ToolOffer.model_validate({"tools": [google(stub), google(stub)]})))


def test_the_limits_of_an_mcp_server():
    """Left out: a call and its retries take no longer than one call may."""
    assert McpServerConfig(url="http://a", call_seconds=300).limits_of_a_call().seconds == 300
    given = McpServerConfig.model_validate({"url": "http://a", "limits": {"retries": 0}, "cache": {"mode": "replay"}})
    assert (given.limits_of_a_call().retries, given.cache.mode) == (0, "replay")
