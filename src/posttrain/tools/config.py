"""The `tools` section of a config, and how its entries become tools with guards around them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from posttrain.location import LocationError, at_home, did_you_mean, is_location, locate
from posttrain.sandbox import SandboxError
from posttrain.tools.cache import Cached, Mode
from posttrain.tools.function import FunctionTool
from posttrain.tools.guards import (
    Concurrent,
    Counted,
    Counters,
    Cut,
    Deadline,
    Described,
    RateLimited,
    Redacted,
    Retrying,
)
from posttrain.tools.online.config import ONLINE, OnlineToolConfig, make_online_tool
from posttrain.tools.online.service import NotConfigured
from posttrain.tools.protocol import Tool
from posttrain.tools.python import PythonTool
from posttrain.tools.schema import ToolDefinitionError

TOOLS: dict[str, Callable[..., Tool]] = {
    "python": PythonTool,
}
BUILT_IN = sorted({*TOOLS, *ONLINE})
PATIENCE = 3600.0  # seconds of Retry-After that are waited for where a call has no deadline
WORKERS = 2  # of a function in worker processes, when its limits do not say how many calls run at one time


class CacheConfig(BaseModel):
    """Results kept on disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = "off"  # use: ask for what is not stored; record: ask always; replay: never ask
    path: Annotated[Path, AfterValidator(at_home)] = Path("runs/tool_cache")  # may be shared by processes and runs
    failures: bool = False  # store failed calls too


class ToolLimits(BaseModel):
    """What calls of one tool may take, over all episodes of the run. Deadlines of turn and episode are in `limits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: PositiveFloat | None = 60.0  # one call, its retries and its waiting for the rate limit included
    attempt_seconds: PositiveFloat | None = None  # one attempt; a longer one is retried
    retries: NonNegativeInt = 2  # after transient failures; what a tool server retries itself counts, too
    backoff_seconds: float = Field(default=0.5, ge=0)  # before the first retry; doubles with every further one
    max_backoff_seconds: float = Field(default=30.0, ge=0)
    per_second: PositiveFloat | None = None  # calls on average
    burst: PositiveInt = 1  # calls that may come at once
    result_bytes: PositiveInt = 1 << 20  # of a result's text, and of its data; the rest is cut, said and counted
    concurrency: PositiveInt | None = None  # calls at one time; None = no limit, 2 for functions in worker processes


class ToolConfig(BaseModel):
    """One tool: a built-in one, or the user's own. A name or a location alone is enough, as text or as a mapping."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)  # as the policy calls it; left out: as the built-in tool or the function is called
    use: str | None = None  # a built-in tool that the policy shall call by another name
    location: str | None = None  # "path.py:function" or "pkg.mod:function", or of a class that is a Tool
    options: dict[str, Any] = {}  # of the tool's constructor; arguments of a function that the policy does not see
    description: str | None = None  # instead of the docstring's
    limits: ToolLimits = ToolLimits()
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"location": value} if is_location(value) else {"name": value}
        if not isinstance(value, Mapping) or "name" in value:
            return value
        given = value.get("use") or value.get("location")
        return {"name": given.rpartition(":")[2], **value} if isinstance(given, str) else value

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.location is not None and self.use is not None:
            raise ValueError("give either `use`, for a built-in tool, or `location`, for your own")
        if self.location is None and self.built_in not in BUILT_IN:
            raise ValueError(
                f"unknown tool {self.built_in!r}.{did_you_mean(self.built_in, BUILT_IN)} "
                f"Known: {', '.join(BUILT_IN)}. "
                "Your own: give its location, 'path.py:function' or 'package.module:function'"
            )
        if self.location is None and self.built_in in ONLINE:
            OnlineToolConfig(use=self.built_in, options=self.options)
        return self

    @property
    def built_in(self) -> str:
        return self.use or self.name


def make_tools(configs: Sequence[ToolConfig]) -> dict[str, Counted]:
    """Name -> tool with its guards, in the order of the config. Raises ToolDefinitionError."""
    tools: dict[str, Counted] = {}
    for config in configs:
        tool = guarded(make_tool(config), config.limits, config.cache)
        name = tool.spec.name
        if name in tools:
            raise ToolDefinitionError(f"two tools are called {name}; give one of them another name")
        tools[name] = tool
    return tools


async def close_tools(tools: Iterable[Tool]) -> None:
    """Ends their connections and worker processes, all at the same time."""
    await asyncio.gather(*(tool.close() for tool in tools))


def make_tool(config: ToolConfig) -> Tool:
    """The tool alone."""
    tool = _built_in(config) if config.location is None else _located(config)
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(f"{config.location or config.name} gave {tool!r:.100}, which is no tool")
    if isinstance(tool, FunctionTool):
        tool.check_location()
    elif isinstance(tool, PythonTool):
        _check_sandbox(tool)
    if (config.name, config.description or tool.spec.description) != (tool.spec.name, tool.spec.description):
        return Described(tool, config.name, config.description)
    return tool


def _built_in(config: ToolConfig) -> Tool:
    if config.built_in in TOOLS:
        return _constructed(TOOLS[config.built_in], config)
    try:
        return make_online_tool(OnlineToolConfig(use=config.built_in, name=config.name, options=config.options))
    except NotConfigured as error:
        raise ToolDefinitionError(f"tool {config.name}: {error}") from error


def guarded(tool: Tool, limits: ToolLimits, cache: CacheConfig) -> Counted:
    """The tool inside the guards that its limits ask for; see `posttrain.tools.guards` for their order."""
    counters = Counters()
    inner: Tool = Cut(Redacted(tool), limits.result_bytes)
    if limits.attempt_seconds is not None:
        inner = Deadline(inner, limits.attempt_seconds, transient=True)
    if limits.per_second is not None:
        inner = RateLimited(inner, limits.per_second, burst=limits.burst)
    inner = Retrying(
        inner,
        retries=limits.retries,
        backoff_seconds=limits.backoff_seconds,
        max_backoff_seconds=limits.max_backoff_seconds,
        patience=limits.seconds or PATIENCE,
        counters=counters,
    )
    if limits.seconds is not None:
        inner = Deadline(inner, limits.seconds)
    concurrency = limits.concurrency or (WORKERS if isinstance(tool, FunctionTool) and tool.isolate else None)
    if concurrency is not None:  # around the deadline: waiting for a worker is no fault of the call
        inner = Concurrent(inner, concurrency)
    if cache.mode != "off":
        inner = Cached(inner, cache.path, cache.mode, failures=cache.failures)
    return Counted(inner, counters)


def _located(config: ToolConfig) -> Any:
    assert config.location is not None, "checked by the caller"
    found: Any
    try:
        found = locate(config.location)
    except LocationError as error:
        raise ToolDefinitionError(f"tool {config.name}: {error}") from error
    if isinstance(found, FunctionTool):
        found = found.function
    if isinstance(found, type):
        made: Callable[..., Any] = found
        return _constructed(made, config)
    if inspect.isfunction(found):
        workers = config.limits.concurrency or WORKERS
        own = {key: config.options[key] for key in ("isolate", "memory_bytes") if key in config.options}
        options = {key: value for key, value in config.options.items() if key not in own}
        return FunctionTool(
            found,
            name=config.name,
            description=config.description,
            options=options,
            location=config.location,
            workers=workers,
            **own,
        )
    return found


def _constructed(make: Callable[..., Tool], config: ToolConfig) -> Tool:
    try:
        return make(**config.options)
    except TypeError as error:
        parameters = inspect.signature(make).parameters
        wrong = next((name for name in config.options if name not in parameters), "")
        near = did_you_mean(wrong, parameters)
        raise ToolDefinitionError(f"tool {config.name} cannot be made with {config.options}: {error}.{near}") from error


def _check_sandbox(tool: PythonTool) -> None:
    try:
        tool.check()
    except SandboxError as error:
        raise ToolDefinitionError(f"tool python: {error}") from error
