"""Runs the programs that `code` judges in the sandbox."""

from __future__ import annotations

import threading

from posttrain.deadline import in_thread
from posttrain.rewards.code import Ran, RunnerError
from posttrain.sandbox import Sandbox, SandboxError


class SandboxRunner:
    """A sandbox that starts with the first program. Raises RunnerError where nothing can be isolated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None

    async def run(self, program: str, *, stdin: str, seconds: float) -> Ran:
        try:
            sandbox = await in_thread(self._started)
            result = await sandbox.run(program, stdin=stdin, timeout_s=seconds)
        except SandboxError as error:
            raise RunnerError(str(error)) from error
        timed_out = result.limit in ("wall", "cpu")
        return Ran(result.exit_code, result.stdout, result.stderr, timed_out=timed_out)

    def _started(self) -> Sandbox:
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox()
            return self._sandbox
