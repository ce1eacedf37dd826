"""Runs foreign Python code: `Sandbox().run(code)`.

Knows the outside only: which processes to start, what to ask them, and when to give up. How the code is shut in is in
`confine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.deadline import in_thread, timer
from posttrain.sandbox.scratch import remove

Isolation = Literal["namespaces", "landlock", "none"]
_GRACE_SECONDS = 10.0  # beyond the wall limit, which is kept inside: then the sandbox itself has failed
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_REMOVALS = 20  # tried, 50 ms apart
_START = "import sys; sys.path.append({root!r}); from posttrain.sandbox.launch import main; main()  # for {parent}"


class SandboxError(RuntimeError):
    """The sandbox cannot isolate on this machine, or broke; says nothing about the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one run may take. Sizes in bytes."""

    wall_seconds: float = 10.0
    cpu_seconds: float | None = None  # of each process; None = as many as wall_seconds
    memory_bytes: int = 1 << 30  # address space of each process, and memory of all together
    disk_bytes: int = 64 << 20  # all files together
    file_bytes: int = 32 << 20  # one file
    output_bytes: int = 256 << 10  # stdout and stderr together
    processes: int = 16  # and threads, at one time

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"SandboxLimits.{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What became of one run.

    exit_code: as Python's subprocess gives it: 0 = it ended well, negative = the number of the signal that ended it,
        None = the sandbox stopped it, see `limit`.
    limit: `wall`, `cpu`, `memory`, `output` or `disk`: the limit that was hit; None = none. A program that meets its
        own MemoryError ends with exit code 1 and `memory`.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    limit: str | None
    seconds: float
    cpu_seconds: float
    isolation: Isolation

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Sandbox:
    """Runs Python code that nobody has read: no network, no files but Python's own and an empty folder, and limits.

    Nothing remains of a run for the next one. Thread-safe; as many runs at one time as are asked for.

    isolation: `namespaces` or `landlock`; None = the stronger one that works here.
    allow_unisolated: run even where neither works, or on another system than Linux, with limits only.
    packages: whether the installed packages can be imported (read-only). Python's own library always can.
    readable: further files and directories, read-only.
    Raises SandboxError when it cannot isolate.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        isolation: Isolation | None = None,
        allow_unisolated: bool = False,
        packages: bool = False,
        readable: Sequence[str | Path] = (),
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._packages = [path for path in sys.path if path.endswith("-packages")] if packages else []
        self._readable = [os.path.abspath(path) for path in readable]
        self._idle: list[_Launcher] = []
        self._busy: set[_Launcher] = set()
        self._closed = False
        if isolation == "none" and not allow_unisolated:
            raise SandboxError("isolation 'none' needs allow_unisolated: the code can then do whatever you can")
        self.isolation: Isolation = isolation or "none"
        self.isolation = self._choose(isolation, allow_unisolated)

    async def run(
        self, code: str, *, stdin: str = "", timeout_s: float | None = None, files: Mapping[str, str] | None = None
    ) -> SandboxResult:
        """`run_blocking` without blocking the event loop; when cancelled, the code is killed."""
        launcher: list[_Launcher] = []
        try:
            return await in_thread(lambda: self._run(self._request(code, stdin, timeout_s, files or {}), launcher))
        except BaseException:
            for taken in launcher:
                taken.kill()
            raise

    def run_blocking(
        self,
        code: str,
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        files: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs `code` as the main module of a new process.

        timeout_s: wall time, instead of the limits'. files: relative path -> text, put into the folder beforehand.
        Raises SandboxError when the sandbox broke, never for what the code does.
        """
        return self._run(self._request(code, stdin, timeout_s, files or {}), [])

    def _run(self, request: Mapping[str, Any], taken: list[_Launcher]) -> SandboxResult:
        """`taken` tells the caller which process it is, so that another thread can end it."""
        launcher = self._take()
        self._busy.add(launcher)
        taken.append(launcher)
        try:
            answer = launcher.ask(request, seconds=request["wall_seconds"] + _GRACE_SECONDS)
        finally:
            self._busy.discard(launcher)
        self._give_back(launcher)
        if "problem" in answer:
            raise SandboxError(f"the sandbox could not be set up: {answer['problem']}")
        return _result(answer, request)

    def close(self) -> None:
        """Ends all processes, those with a running program too: its caller gets a SandboxError."""
        self._closed = True
        for launcher in [*self._idle, *self._busy]:
            launcher.kill()
        self._idle.clear()

    def _give_back(self, launcher: _Launcher) -> None:
        if self._closed:
            launcher.kill()
        else:
            self._idle.append(launcher)

    def _take(self) -> _Launcher:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                launcher = self._idle.pop()
                if launcher.is_alive:
                    return launcher
        return _Launcher(self._settings())

    def _settings(self) -> dict[str, Any]:
        """What is the same for every run."""
        return {
            "readable": [*_SYSTEM_LIBRARIES, *self._packages, *self._readable],  # and Python's own, which it knows
            "packages": self._packages,
        }

    def _request(self, code: str, stdin: str, timeout_s: float | None, files: Mapping[str, str]) -> dict[str, Any]:
        for name in files:
            if os.path.isabs(name) or ".." in Path(name).parts or not Path(name).parts:
                raise ValueError(f"files are given by a relative path inside the folder, got {name!r}")
        limits = asdict(self.limits)
        wall = timeout_s if timeout_s is not None else self.limits.wall_seconds
        cpu = self.limits.cpu_seconds or wall
        return limits | {
            "code": code,
            "stdin": stdin,
            "files": dict(files),
            "isolation": self.isolation,
            "wall_seconds": wall,
            "cpu_seconds": min(cpu, wall),
        }

    def _choose(self, wanted: Isolation | None, allow_unisolated: bool) -> Isolation:
        """The first way that really works: each is tried with a small program."""
        problems = []
        for isolation in (wanted,) if wanted else ("namespaces", "landlock"):
            if sys.platform != "linux" and isolation != "none":
                problems.append(f"{isolation} needs Linux, this is {sys.platform}")
                continue
            self.isolation = isolation
            try:
                result = self.run_blocking("print(6 * 7)", timeout_s=20.0)
            except (SandboxError, OSError) as error:
                problems.append(f"{isolation}: {error}")
                continue
            if result.stdout == "42\n":
                return isolation
            problems.append(f"{isolation}: a first program failed: {result}")
        if not allow_unisolated or wanted:
            raise SandboxError(
                f"code cannot be isolated on this machine ({'; '.join(problems)}). Allow user namespaces, or run on "
                "Linux 5.13 or newer with Landlock; or pass allow_unisolated=True to run code that you trust"
            )
        return "none"


class _Launcher:
    """The process that runs one program after the other; see `launch`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _START.format(root=root, parent=os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        scratch = tempfile.mkdtemp(prefix="posttrain-sandbox-")
        os.chmod(scratch, 0o711)  # the program's user passes through to its own folder
        self.kill = weakref.finalize(self, _kill, self._process, scratch)  # also when this program ends
        self.ask({**settings, "scratch": scratch}, seconds=60.0)

    @property
    def is_alive(self) -> bool:
        return self.kill.alive and self._process.poll() is None

    def ask(self, message: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """Its answer to one message. Raises SandboxError, and ends it, when there is none in time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "opened with a pipe"
        assert stdout is not None, "opened with a pipe"
        killer = timer(seconds, self.kill)
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except (OSError, ValueError):
            line = b""
        finally:
            killer.cancel()
        if not line.endswith(b"\n"):
            self.kill()
            raise SandboxError(f"the sandbox gave no answer within {seconds:g} s, or was killed")
        return json.loads(line)


def _kill(process: subprocess.Popen[bytes], scratch: str) -> None:
    """Ends the launcher and its monitor; init and all that it holds end with the monitor. Nothing stays on the disk."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    for _ in range(_REMOVALS):
        try:
            remove(scratch)
        except FileNotFoundError:
            return
        except OSError:  # the program is about to end, and may still write
            time.sleep(0.05)


def _result(answer: Mapping[str, Any], request: Mapping[str, Any]) -> SandboxResult:
    exit_code, limit, cpu = answer.get("exit_code"), answer.get("limit"), answer.get("cpu_seconds", 0.0)
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu >= request["cpu_seconds"] - 0.5:
        exit_code, limit = None, "cpu"
    elif exit_code == 1 and answer["stderr"].rstrip().rpartition("\n")[2].startswith("MemoryError"):
        limit = limit or "memory"
    return SandboxResult(
        stdout=answer["stdout"],
        stderr=answer["stderr"],
        exit_code=None if limit and limit != "memory" else exit_code,
        limit=limit,
        seconds=answer["seconds"],
        cpu_seconds=cpu,
        isolation=request["isolation"],
    )
