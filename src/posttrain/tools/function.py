"""A Python function as a tool: `@tool`, or `function_tool(fn)`."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, overload

from posttrain.deadline import in_thread
from posttrain.tools.invoke import as_error, as_result
from posttrain.tools.pool import WorkerPool
from posttrain.tools.protocol import ToolResult, ToolSpec
from posttrain.tools.schema import Signature, ToolDefinitionError
from posttrain.tools.worker import WorkerJob

_NAME = re.compile(r"^[A-Za-z_][\w.-]{0,63}$")


class FunctionTool:
    """A function that a policy may call. It stays callable as it was.

    An async function runs on the event loop. A sync one runs in a worker process, which is killed with all its children
    when the call is cancelled (that is what a deadline does); with `isolate=False` it runs in a thread, which nothing
    can end. `workers` is how many calls run side by side.

    location: where a worker finds the function; by default its own module and name.
    options: arguments that the policy neither sees nor gives.
    memory_bytes: address space of a worker.
    Raises ToolDefinitionError when the function cannot be offered.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        options: Mapping[str, Any] | None = None,
        location: str | None = None,
        isolate: bool = True,
        workers: int = 2,
        memory_bytes: int | None = None,
    ) -> None:
        name = name or str(getattr(function, "__name__", ""))
        if not _NAME.match(name):
            raise ToolDefinitionError(f"{name!r} is no name for a tool: letters, digits and _ only; pass name=...")
        self.function = function
        self.options = dict(options or {})
        self._check_options(name)
        self._signature = Signature(function, name, given=self.options)
        self.spec = self._spec(name, description)
        self.is_async = inspect.iscoroutinefunction(function)
        self.isolate = isolate and not self.is_async
        self.location = location
        self._workers, self._memory_bytes = workers, memory_bytes
        self._pool: WorkerPool | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolError(BAD_ARGUMENTS) when they do not fit the type hints."""
        bound = self._signature.bind(arguments)
        if self.isolate:
            return await self._workers_of().call(arguments)
        try:
            if self.is_async:
                return as_result(await self.function(**bound, **self.options))
            return as_result(await in_thread(lambda: self.function(**bound, **self.options)))
        except Exception as error:
            raise as_error(self.spec.name, error) from error

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def warm(self) -> None:
        """Starts a worker beforehand, where one is needed."""
        if self.isolate:
            self._workers_of().warm()

    def _workers_of(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(self._job(), size=self._workers)
        return self._pool

    def check_location(self) -> None:
        """Raises ToolDefinitionError unless a worker process can find the function, where one is needed."""
        if self.isolate:
            self._job()

    def _spec(self, name: str, description: str | None) -> ToolSpec:
        words = description or self._signature.description
        if not words:
            raise ToolDefinitionError(f"tool {name} needs a docstring: the policy reads what the tool does")
        parameters = self._signature.parameters
        return ToolSpec(
            name=name, description=words, parameters=parameters, version=_version(self.function, self.options)
        )

    def _check_options(self, name: str) -> None:
        unknown = self.options.keys() - inspect.signature(self.function).parameters.keys()
        if unknown:
            raise ToolDefinitionError(f"tool {name} has no parameter {sorted(unknown)[0]!r} to be set by its options")

    def _job(self) -> WorkerJob:
        return WorkerJob(
            name=self.spec.name,
            location=self.location or importable(self.function, self.spec.name),
            options=self.options,
            memory_bytes=self._memory_bytes,
        )


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(**options: Any) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: `@tool`, or `@tool(name=..., workers=4)` with the options of FunctionTool."""
    if function is not None:
        return FunctionTool(function, **options)
    return lambda decorated: FunctionTool(decorated, **options)


def function_tool(function: Callable[..., Any], **options: Any) -> FunctionTool:
    """The same without a decorator, for a function of someone else."""
    return FunctionTool(function, **options)


def importable(function: Callable[..., Any], name: str) -> str:
    """The location under which another process finds the function."""
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    fix = "move it to the top level of a module, or pass isolate=False (a thread, which no deadline can end)"
    if module is None or "<" in qualified or "." in qualified:
        kind = "a lambda or inner function" if "<" in qualified else "no plain function of a module"
        raise ToolDefinitionError(f"tool {name} is {kind}, which its worker process cannot find; {fix}")
    if module == "__main__":
        raise ToolDefinitionError(
            f"tool {name} stands in the script that was started, which its worker would run again; {fix}"
        )
    loaded = sys.modules.get(module)
    found = getattr(loaded, qualified, None)
    if getattr(found, "function", found) is not function:
        raise ToolDefinitionError(f"{module}.{qualified} is not the function of tool {name}; {fix}")
    place = getattr(loaded, "__file__", None) if module.startswith("posttrain_user_") else None
    return f"{place or module}:{qualified}"


def _version(function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Changes with the function's own source and its options; what it calls is not looked into."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(f"{source}\0{sorted(options.items())!r}".encode()).hexdigest()[:12]
