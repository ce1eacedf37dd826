"""Programs, judged by tests that run in the sandbox, in a runner of one's own, or at a code API."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from posttrain.boundary.foreign_json import read_json
from posttrain.rewards.answers import Answer, scored
from posttrain.rewards.functions import RewardError
from posttrain.rewards.service import JsonService, ServiceConfig, ServiceError
from posttrain.sandbox import Sandbox, SandboxError, SandboxLimits
from posttrain.sandbox.checks import compared_lines
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode

_BLOCK = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended. `exit_code` is None when it was killed."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False


class RunnerError(Exception):
    """The sandbox itself failed: this says nothing about the program."""


class Runner(Protocol):
    """Runs a Python program where it can do no harm. Raises RunnerError when the sandbox fails."""

    async def run(self, program: str, *, stdin: str, seconds: float) -> Ran: ...


class SandboxRunner:
    """Runs programs in the sandbox. Raises RewardError where it cannot isolate and is not told to go without."""

    def __init__(self, seconds: float, *, allow_unisolated: bool) -> None:
        try:
            self._sandbox = Sandbox(SandboxLimits(wall_seconds=seconds), allow_unisolated=allow_unisolated)
        except SandboxError as error:
            raise RewardError(f"reward code: {error}; or give options.url of a code API") from error

    async def run(self, program: str, *, stdin: str, seconds: float) -> Ran:
        try:
            done = await self._sandbox.run(program, stdin=stdin, timeout_s=seconds)
        except SandboxError as error:
            raise RunnerError(str(error)) from error
        return Ran(done.exit_code, done.stdout, done.stderr, timed_out=done.limit in ("wall", "cpu"))

    def close(self) -> None:
        self._sandbox.close()


class CodeConfig(BaseModel):
    """Options of the reward `code`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    all_or_nothing: bool = Field(default=True, description="1 when every test passes, else 0; false = the share")
    max_tests: PositiveInt | None = Field(default=None, description="the first of a row; null = all")
    seconds_per_test: PositiveFloat = 10.0
    concurrency: PositiveInt = 4
    allow_unisolated: bool = Field(default=False, description="run programs even where nothing isolates them")
    url: str | None = Field(default=None, description="open-instruct's code API instead of the sandbox")
    service: ServiceConfig = ServiceConfig()


@dataclass(frozen=True, slots=True)
class Check:
    """One test: statements that must not raise, or an input and what must be printed for it."""

    code: str = ""
    stdin: str = ""
    stdout: str | None = None


def checks_of(task: Task) -> list[Check]:
    """From the accepted answers: `assert` statements, or JSON of a list of these, of `{"inputs": [...], "outputs":
    [...]}` (APPS, TACO) or of `[{"input": ..., "output": ...}]`. Raises ValueError."""
    checks = [check for gold in task.ground_truth for check in _checks(_decoded(gold))]
    if not checks:
        raise ValueError(f"task {task.id!r} has no tests")
    return checks


def program_of(episode: Episode) -> Answer:
    """The last fenced block of the policy's last turn, outside thoughts; Python ones before others."""
    text = outside_thoughts(episode.final_text)
    python = fenced_programs(text)
    if not python:
        unclosed = "```" in text
        return Answer(problem="malformed_answer" if unclosed else "no_answer")
    return Answer(python[-1]) if python[-1].strip() else Answer(problem="empty_answer")


def fenced_programs(text: str) -> list[str]:
    """The fenced blocks of a text: the Python ones, or all where none says that it is."""
    blocks = [(found[2].lower(), found[3]) for found in _BLOCK.finditer(text)]
    return [code for language, code in blocks if language in ("python", "python3", "py")] or [c for _, c in blocks]


class CodeReward:
    """The tests of a row on the program that the policy wrote."""

    def __init__(self, config: CodeConfig, runner: Runner | None, name: str = "code") -> None:
        self.name = name
        self.config = config
        self._given = runner
        self._own: SandboxRunner | None = None  # opened by the first row that needs it
        self._service = None if config.url is None else JsonService(config.url, config.service)
        self._rooms = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    def check_task(self, task: Task) -> None:
        try:
            checks_of(task)
        except ValueError as error:
            raise RewardError(f"reward {self.name}: {error}") from error
        if self._service is None:
            self._runner()  # a machine that cannot isolate says so before anything starts

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        try:
            checks = checks_of(task)[: self.config.max_tests]
        except ValueError as error:
            return [Invalid("bad_ground_truth", str(error))] * len(episodes)
        return list(await asyncio.gather(*(self._one(episode, checks) for episode in episodes)))

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def _runner(self) -> Runner:
        if self._given is not None:
            return self._given
        if self._own is None:
            c = self.config
            self._own = SandboxRunner(c.seconds_per_test, allow_unisolated=c.allow_unisolated)
        return self._own

    async def _one(self, episode: Episode, checks: Sequence[Check]) -> Outcome:
        answer = program_of(episode)
        if answer.problem is not None:
            return scored(self.name, answer, 0.0, None)
        try:
            passed = await self._passed(answer.text, checks)
        except RunnerError as error:
            return Invalid("sandbox_failed", str(error))
        except ServiceError as error:
            return error.as_invalid()
        share = sum(passed) / len(passed)
        value = float(all(passed)) if self.config.all_or_nothing else share
        verdict = scored(self.name, answer, value, None)
        return Score(value, {**verdict.components, "tests_passed": share})

    async def _passed(self, program: str, checks: Sequence[Check]) -> list[bool]:
        if self._service is not None:
            return await self._ask(self._service, program, checks)
        return [await self._passes(program, check) for check in checks]

    async def _passes(self, program: str, check: Check) -> bool:
        """Tests that did not run to their end have not passed: a program that ends itself early prints no token."""
        runner = self._runner()
        token = secrets.token_hex(16)
        text = program if check.stdout is not None else f"{program}\n{check.code}\nprint({token!r})\n"
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.config.concurrency))
        async with room:
            ran = await runner.run(text, stdin=check.stdin, seconds=self.config.seconds_per_test)
        if ran.timed_out or ran.exit_code != 0:
            return False
        if check.stdout is None:
            return ran.stdout.rstrip("\n").endswith(token)
        return compared_lines(ran.stdout) == compared_lines(check.stdout)

    async def _ask(self, service: JsonService, program: str, checks: Sequence[Check]) -> list[bool]:
        """open-instruct: {program, tests, max_execution_time} -> {"results": [0 or 1]}."""
        tests = [check.code for check in checks]
        if any(check.stdout is not None for check in checks):
            raise ServiceError("service_refused", "a code API runs statements, not inputs and outputs", transient=False)
        seconds = self.config.seconds_per_test
        reply = await service.post({"program": program, "tests": tests, "max_execution_time": seconds})
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list):
            raise ServiceError("service_bad_reply", f"{service.url}: no list 'results'", transient=False)
        if len(results) != len(tests):
            raise RewardError(f"{service.url} returned {len(results)} results for {len(tests)} tests")
        return [result in (1, True) for result in results]


def _checks(value: Any) -> list[Check]:
    if isinstance(value, str):
        return [Check(code=value)] if value.strip() else []
    if isinstance(value, list):
        return [check for item in value for check in _checks(item)]
    if isinstance(value, Mapping):
        for inputs, outputs in (("inputs", "outputs"), ("input", "output"), ("stdin", "stdout")):
            if inputs in value and outputs in value:
                return _pairs(value[inputs], value[outputs])
        for key in ("tests", "test", "test_list", "assert", "code"):
            if key in value:
                return _checks(value[key])
        raise ValueError(f"tests with the keys {sorted(map(str, value))}; expected inputs and outputs, or tests")
    raise ValueError(f"a test is a statement or an input with its output, got {value!r:.100}")


def _pairs(inputs: Any, outputs: Any) -> list[Check]:
    ins, outs = (value if isinstance(value, list) else [value] for value in (inputs, outputs))
    if len(ins) != len(outs):
        raise ValueError(f"{len(ins)} inputs and {len(outs)} outputs")
    return [Check(stdin=_text(i), stdout=_text(o)) for i, o in zip(ins, outs, strict=True)]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _decoded(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return read_json(text)
        except ValueError:
            return text  # Python code may begin with a bracket
    return text
