"""Results on disk: asked for once, replayed without the tool, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tools.test_guards import BROKEN, Script, run

from posttrain.task import EpisodeInvalid
from posttrain.tools import ToolError, ToolResult, ToolSpec
from posttrain.tools.cache import Cached
from posttrain.trajectory import CallStatus


def test_a_stored_result_is_given_without_a_call(tmp_path: Path):
    script = Script(ToolResult(text="ö", data=[{"id": 1}], cost={"requests": 1}), "second")
    tool = Cached(script, tmp_path)
    assert run(tool, a=1, b=2).cached is False
    again = run(tool, b=2, a=1)
    assert (again.text, again.data, again.cost, again.cached) == ("ö", [{"id": 1}], {"requests": 1}, True)
    assert run(tool, a=1, b="2").text == "second", "another type is another call"
    assert len(script.started) == 2
    assert run(Cached(Script("never"), tmp_path), a=1, b=2).text == "ö", "another run, the same directory"


def test_replay_never_calls_and_says_what_is_missing(tmp_path: Path):
    run(Cached(Script("stored"), tmp_path), q="a")
    script = Script("never")
    tool = Cached(script, tmp_path, "replay")
    assert run(tool, q="a").text == "stored"
    with pytest.raises(EpisodeInvalid, match=r'script\(\{"q": "b"\}\) is not in the cache') as caught:
        run(tool, q="b")
    assert caught.value.reason == "cache_miss"
    assert not script.started


def test_record_asks_always_and_off_stores_nothing(tmp_path: Path):
    run(Cached(Script("old"), tmp_path), q="a")
    assert run(Cached(Script("new"), tmp_path, "record"), q="a").text == "new"
    assert run(Cached(Script("x"), tmp_path, "replay"), q="a").text == "new"
    run(Cached(Script("x"), tmp_path / "none", "off"))
    assert not (tmp_path / "none").exists()


def test_failures_are_stored_only_when_asked_for(tmp_path: Path):
    with pytest.raises(ToolError):
        run(Cached(Script(BROKEN), tmp_path))
    assert not list(tmp_path.rglob("*.json"))
    with pytest.raises(ToolError):
        run(Cached(Script(BROKEN), tmp_path, failures=True))
    with pytest.raises(ToolError, match="broken") as caught:
        run(Cached(Script("never"), tmp_path, "replay"))
    assert caught.value.status is CallStatus.FAILED


def test_another_version_of_a_tool_has_other_results(tmp_path: Path):
    script = Script("new")
    run(Cached(Script("old"), tmp_path))
    script.spec = ToolSpec(name="script", description="", parameters={}, version="2")
    assert run(Cached(script, tmp_path)).text == "new"


def test_equal_calls_at_one_time_are_made_once(tmp_path: Path):
    script = Script("once", "twice", seconds=0.05)
    tool = Cached(script, tmp_path)

    async def together() -> list[str]:
        return [result.text for result in await asyncio.gather(*(tool.call({"q": 1}) for _ in range(5)))]

    assert asyncio.run(together()) == ["once"] * 5


def test_the_first_asker_may_give_up(tmp_path: Path):
    tool = Cached(Script("a", "b", seconds=0.1), tmp_path)

    async def give_up() -> str:
        first = asyncio.ensure_future(tool.call({}))
        second = asyncio.ensure_future(tool.call({}))
        await asyncio.sleep(0.02)
        first.cancel()
        return (await second).text

    assert asyncio.run(give_up()) == "a"


def test_a_damaged_file_is_a_failure_that_names_it(tmp_path: Path):
    tool = Cached(Script("x"), tmp_path)
    run(tool)
    (file,) = tmp_path.rglob("*.json")
    file.write_text('{"result":')
    with pytest.raises(ToolError, match=file.name):
        run(tool)


def test_processes_share_a_directory_and_see_whole_files_only(tmp_path: Path):
    """Two writers and this reader, all on the same key."""
    code = """
import asyncio, sys
from tests.tools.test_guards import Script
from posttrain.tools.cache import Cached
for i in range(150):
    asyncio.run(Cached(Script(sys.argv[2] * 20000), sys.argv[1], "record").call({}))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), letter]) for letter in "ab"]
    file = Cached(Script(), tmp_path).file(Cached(Script(), tmp_path).key({}))
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if file.exists():
            text = json.loads(file.read_text())["result"]["text"]
            assert text in ("a" * 20000, "b" * 20000)
            seen.add(text[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [file.name], "nothing half-written is left"
