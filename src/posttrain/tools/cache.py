"""Results of tools on disk: a run can be repeated offline, and a call is paid for once.

One file per result, named by the hash of tool, version and arguments. A file appears whole or not at all, so processes
may share a directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from posttrain.task import EpisodeInvalid
from posttrain.tools.guards import Guard
from posttrain.tools.protocol import Tool, ToolError, ToolResult
from posttrain.trajectory import CallStatus

Mode = Literal["off", "use", "record", "replay"]


class Cached(Guard):
    """A tool whose results are kept in `path`.

    use: a stored result is given, another one is asked for and stored. record: always asked for, and stored.
    replay: the tool is never called; a result that is not stored is an error that says so (EpisodeInvalid
    "cache_miss": the policy must not learn from it). failures: store failed calls too, and give them again.
    Equal calls at one time are made once.
    """

    def __init__(self, tool: Tool, path: str | Path, mode: Mode = "use", *, failures: bool = False) -> None:
        super().__init__(tool)
        self.path, self.mode, self.failures = Path(path), mode, failures
        self._running: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[ToolResult]] = {}

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self.mode == "off":
            return await self.tool.call(arguments)
        key = self.key(arguments)
        if self.mode != "record":
            stored = self._stored(key)
            if stored is not None:
                return stored
        if self.mode == "replay":
            raise EpisodeInvalid("cache_miss", self._miss(arguments))
        return await self._shared(key, arguments)

    def key(self, arguments: Mapping[str, Any]) -> str:
        """Depends on the arguments' values, not on the order in which they were written."""
        spec = self.spec
        parts = [spec.name, spec.version, dict(arguments)]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, key: str) -> Path:
        return self.path / self.spec.name / key[:2] / f"{key}.json"

    async def _shared(self, key: str, arguments: Mapping[str, Any]) -> ToolResult:
        """One call for all that ask the same at one time; it goes on when one of them gives up."""
        place = (asyncio.get_running_loop(), key)
        running = self._running.get(place)
        if running is None:
            running = self._running[place] = asyncio.ensure_future(self._ask(key, arguments))
            running.add_done_callback(lambda _: self._running.pop(place, None))
            return await running
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():  # the one that asked first gave up, not we
                return await self._shared(key, arguments)
            raise

    async def _ask(self, key: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            result = await self.tool.call(arguments)
        except ToolError as error:
            if self.failures:
                self._store(key, arguments, {"error": {"status": error.status.value, "message": error.message}})
            raise
        record = {"text": result.text, "data": result.data, "cost": dict(result.cost)}
        self._store(key, arguments, {"result": record})
        return result

    def _stored(self, key: str) -> ToolResult | None:
        try:
            record = json.loads(self.file(key).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ToolError(
                CallStatus.FAILED, f"the stored result of {self.spec.name} is damaged; remove the file {key}.json"
            ) from error
        if "error" in record:
            failure = record["error"]
            raise ToolError(CallStatus(failure["status"]), failure["message"])
        return ToolResult(**record["result"], cached=True)

    def _store(self, key: str, arguments: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Written beside its place and moved there."""
        file = self.file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = {"tool": self.spec.name, "version": self.spec.version, "arguments": dict(arguments), **record}
        text = json.dumps(whole, ensure_ascii=True, default=repr, indent=1)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "w", encoding="ascii") as stream:
                stream.write(text)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise

    def _miss(self, arguments: Mapping[str, Any]) -> str:
        shown = json.dumps(dict(arguments), ensure_ascii=False, default=repr)
        return (
            f"{self.spec.name}({shown:.300}) is not in the cache {self.path} and replay never calls the tool; "
            "record it first with cache.mode: use"
        )
