"""The `tools` section: names, locations, options and what is put around them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.tools import ToolDefinitionError, ToolError
from posttrain.tools.config import ToolConfig, make_tools
from posttrain.tools.guards import Counted
from posttrain.trajectory import CallStatus

FILE = '''
import time
from posttrain.tools import tool, ToolSpec, ToolResult

def lookup(word: str, table: str = "none", loud: bool = False) -> str:
    """Looks a word up.

    Args:
        word: which
    """
    return f"{word} in {table}" + "!" * loud

@tool
def slow(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "slept"

async def later(word: str) -> str:
    """Comes back."""
    return word

class Echo:
    def __init__(self, *, prefix: str = ""):
        self.prefix = prefix
        self.spec = ToolSpec(name="echo", description="Echoes.", parameters={"type": "object", "properties": {}})
    async def call(self, arguments):
        return ToolResult(text=self.prefix + str(dict(arguments)))
    async def close(self):
        pass

ready = Echo(prefix="ready")
number = 3
'''


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "my_tools.py").write_text(FILE)
    return str(tmp_path / "my_tools.py")


def made(*entries: Any) -> dict[str, Counted]:
    return make_tools(TypeAdapter(list[ToolConfig]).validate_python(list(entries)))


def call(tool: Counted, **arguments: Any) -> str:
    async def once() -> str:
        try:
            return (await tool.call(arguments)).text
        finally:
            await tool.close()

    return asyncio.run(once())


def test_a_location_alone_is_enough(place: str):
    tools = made(f"{place}:lookup", f"{place}:later", f"{place}:ready")
    assert list(tools) == ["lookup", "later", "ready"]
    assert call(tools["lookup"], word="a") == "a in none"
    assert call(tools["later"], word="b") == "b"
    assert call(tools["ready"], x=1) == "ready{'x': 1}"


def test_name_description_and_hidden_options(place: str):
    entry = {
        "name": "find",
        "location": f"{place}:lookup",
        "description": "Finds.",
        "options": {"table": "T", "loud": True},
    }
    tool = made(entry)["find"]
    assert (tool.spec.description, list(tool.spec.parameters["properties"])) == ("Finds.", ["word"])
    assert call(tool, word="a") == "a in T!"


def test_a_class_takes_its_options(place: str):
    entry = {"name": "say", "location": f"{place}:Echo", "options": {"prefix": "> "}, "description": "Says."}
    tool = made(entry)["say"]
    assert (tool.spec.name, tool.spec.description, call(tool)) == ("say", "Says.", "> {}")
    with pytest.raises(ToolDefinitionError, match=r"prefx.*Did you mean 'prefix'"):
        made({"name": "e", "location": f"{place}:Echo", "options": {"prefx": "> "}})


def test_limits_become_guards(place: str):
    entry = {"name": "slow", "location": f"{place}:slow", "limits": {"seconds": 0.3, "retries": 0}}
    tool = made(entry)["slow"]
    wait_until_warm(tool)
    with pytest.raises(ToolError) as caught:
        call(tool, seconds=30)
    assert caught.value.status is CallStatus.TIMEOUT
    attempts = {**entry, "limits": {"seconds": 20, "attempt_seconds": 0.3, "retries": 1, "backoff_seconds": 0}}
    again = made(attempts)["slow"]
    wait_until_warm(again)
    with pytest.raises(ToolError, match=r"0\.3 s"):
        call(again, seconds=30)
    assert tool.counters.statuses["timeout"] >= 1


def wait_until_warm(tool: Counted) -> None:
    """A worker that starts beyond the deadline of its call is kept for the next one."""
    for _ in range(20):
        try:
            asyncio.run(tool.call({"seconds": 0.0}))
            return
        except ToolError:
            time.sleep(0.1)


def test_a_cache_and_counters(place: str, tmp_path: Path):
    cache = {"mode": "use", "path": str(tmp_path / "cache")}
    tools = made({"name": "later", "location": f"{place}:later", "cache": cache})
    call(tools["later"], word="a")
    call(tools["later"], word="a")
    counters = tools["later"].counters
    assert (counters.calls, counters.cached, counters.failed) == (2, 1, 0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("pyton", "Did you mean 'python'"),
        ("gogle_search", "Did you mean 'google_search'"),
        ({"name": "google_search", "options": {"keyenv": "K"}}, "options of google_search"),
        ({"name": "a", "use": "python", "location": "a.py:f"}, "either `use`"),
        ({"name": "x"}, "unknown tool 'x'"),
        ({"name": "python", "limts": {}}, "Extra inputs"),
        ({"name": "python", "limits": {"seconds": 0}}, "greater than 0"),
        ({"name": "python", "cache": {"mode": "always"}}, "'replay'"),
    ],
)
def test_a_wrong_entry_is_refused(entry: Any, words: str):
    with pytest.raises(ValidationError, match=words):
        made(entry)


def test_built_in_tools_by_other_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERPER_API_KEY", "x" * 20)
    tools = made({"name": "search", "use": "google_search"}, {"name": "run", "use": "python"})
    assert [tool.spec.name for tool in tools.values()] == ["search", "run"]
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(ToolDefinitionError, match="SERPER_API_KEY"):
        made("google_search")


def test_what_is_no_tool_says_so(place: str):
    for name, words in (("number", "no tool"), ("lookpu", "Did you mean 'lookup'")):
        with pytest.raises(ToolDefinitionError, match=words):
            made(f"{place}:{name}")
    with pytest.raises(ToolDefinitionError, match="two tools are called lookup"):
        made(f"{place}:lookup", f"{place}:lookup")
