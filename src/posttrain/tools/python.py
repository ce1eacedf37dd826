"""The `python` tool: code of the policy, run in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.deadline import in_thread
from posttrain.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxResult
from posttrain.task import EpisodeInvalid
from posttrain.tools.protocol import ToolResult, ToolSpec
from posttrain.tools.schema import Signature

_LIMITS = {
    "wall": "stopped: it ran longer than {wall_seconds:g} s",
    "cpu": "stopped: it used more than {cpu_seconds:g} s of processor time",
    "memory": "it needed more than {memory_mib} MiB of memory",
    "output": "stopped: it wrote more than {output_bytes} bytes",
    "disk": "stopped: its files took more than {disk_mib} MiB",
}


class PythonTool:
    """Runs Python in a sandbox, each call on its own: no network, no files, nothing left for the next call.

    seconds, memory_mib: limits of one call; further ones in posttrain.sandbox.SandboxLimits. packages: whether the
    installed packages can be imported. allow_unisolated: run even where nothing can be isolated; only for code that
    you would run yourself.
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory_mib: int = 1024,
        output_bytes: int = 64 << 10,
        packages: bool = False,
        allow_unisolated: bool = False,
    ) -> None:
        self._limits = SandboxLimits(wall_seconds=seconds, memory_bytes=memory_mib << 20, output_bytes=output_bytes)
        self._packages, self._allow_unisolated = packages, allow_unisolated
        self._sandbox: Sandbox | None = None
        self._signature = Signature(_python, "python")
        self.spec = ToolSpec(
            name="python", description=self._signature.description, parameters=self._signature.parameters
        )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """What the code printed, then its traceback or the limit that it hit: an error of the code is a result.

        Raises ToolError(BAD_ARGUMENTS); EpisodeInvalid("tool_down") when the sandbox itself broke.
        """
        code = self._signature.bind(arguments)["code"]
        try:
            if self._sandbox is None:
                self._sandbox = await in_thread(self._start)
            result = await self._sandbox.run(code)
        except SandboxError as error:
            raise EpisodeInvalid("tool_down", f"python: {error}") from error
        return ToolResult(text=self._text(result), data=_data(result))

    async def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def check(self) -> None:
        """Raises SandboxError where code cannot be isolated; called before a run starts."""
        self._start().close()

    def _start(self) -> Sandbox:
        return Sandbox(self._limits, packages=self._packages, allow_unisolated=self._allow_unisolated)

    def _text(self, result: SandboxResult) -> str:
        parts = [result.stdout.rstrip(), result.stderr.rstrip()]
        if result.limit is not None:
            parts.append("[" + _LIMITS[result.limit].format(**self._shown_limits()) + "]")
        elif result.exit_code and not result.stderr.strip():
            parts.append(f"[exit code {result.exit_code}]")
        return "\n".join(part for part in parts if part) or "[no output; use print to see a value]"

    def _shown_limits(self) -> dict[str, Any]:
        limits = self._limits
        return {
            "wall_seconds": limits.wall_seconds,
            "cpu_seconds": limits.cpu_seconds or limits.wall_seconds,
            "memory_mib": limits.memory_bytes >> 20,
            "output_bytes": limits.output_bytes,
            "disk_mib": limits.disk_bytes >> 20,
        }


def _data(result: SandboxResult) -> dict[str, Any]:
    return {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": result.exit_code,
        "limit": result.limit,
        "seconds": round(result.seconds, 3),
    }


def _python(code: str) -> None:
    """Runs Python code and returns what it prints. Each call starts anew: no variable is kept from an earlier one.

    Args:
        code: the program; print what you want to see
    """
