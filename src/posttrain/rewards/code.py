"""Programs, judged by tests that run in the sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from posttrain.rewards.answers import Answer, outside_thoughts, scored
from posttrain.rewards.functions import RewardError
from posttrain.rewards.service import JsonService, ServiceConfig, ServiceError
from posttrain.sandbox import Sandbox, SandboxError, SandboxLimits, run_tests
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.trajectory import Episode

_BLOCK = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
Check = dict[str, Any]  # {stdin, stdout}, {call, expected} or {code}: see posttrain.sandbox.checks


class CodeConfig(BaseModel):
    """Options of the reward `code`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    all_or_nothing: bool = Field(default=True, description="1 when every test passes, else 0; false = the share")
    max_tests: PositiveInt | None = Field(default=None, description="the first of a row; null = all")
    seconds_per_test: PositiveFloat = 10.0
    memory_bytes: PositiveInt = 1 << 30
    packages: bool = Field(default=False, description="whether programs may import the installed packages")
    allow_unisolated: bool = Field(default=False, description="run programs even where nothing can confine them")
    concurrency: PositiveInt = Field(default=2, description="programs at once")
    url: str | None = Field(default=None, description="open-instruct's code API instead of the sandbox")
    service: ServiceConfig = ServiceConfig()


def checks_of(task: Task) -> list[Check]:
    """From the accepted answers: `assert` statements, or JSON of a list of these, of `{"inputs": [...], "outputs":
    [...]}` (APPS, TACO; with "fn_name" these are arguments and values), or of `[{"input": ..., "output": ...}]`.

    `assert f(1) == 2` is asked as the value of `f(1)`, so that what is expected never enters the sandbox. Raises
    ValueError.
    """
    checks = [check for gold in task.ground_truth for check in _checks(_decoded(gold))]
    if not checks:
        raise ValueError(f"task {task.id!r} has no tests")
    return checks


def program_of(episode: Episode) -> Answer:
    """The last fenced block of the policy's last turn, outside thoughts; Python ones before others."""
    text = outside_thoughts(episode.final_text)
    blocks = [(found[2].lower(), found[3]) for found in _BLOCK.finditer(text)]
    python = [code for language, code in blocks if language in ("python", "python3", "py")] or [c for _, c in blocks]
    if not python:
        return Answer(problem="malformed_answer" if "```" in text else "no_answer")
    return Answer(python[-1]) if python[-1].strip() else Answer(problem="empty_answer")


class CodeReward:
    """The tests of a row on the program that the policy wrote. The sandbox starts with the first row that needs it."""

    def __init__(self, config: CodeConfig, name: str = "code") -> None:
        self.name = name
        self.config = config
        self._service = None if config.url is None else JsonService(config.url, config.service)
        self._sandbox: Sandbox | None = None
        self._rooms = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    def check_task(self, task: Task) -> None:
        try:
            checks_of(task)
        except (ValueError, SyntaxError) as error:
            raise RewardError(f"reward {self.name}: {error}") from error
        if self._service is None:
            self._box()

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        try:
            checks = checks_of(task)[: self.config.max_tests]
        except (ValueError, SyntaxError) as error:
            return [Invalid("bad_ground_truth", f"task {task.id!r}: {error}")] * len(episodes)
        return list(await asyncio.gather(*(self._one(episode, checks) for episode in episodes)))

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    async def _one(self, episode: Episode, checks: Sequence[Check]) -> Outcome:
        answer = program_of(episode)
        if answer.problem is not None:
            return scored(self.name, answer, 0.0, None)
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.config.concurrency))
        try:
            async with room:
                passed = await self._passed(answer.text, checks)
        except SandboxError as error:
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
        seconds = self.config.seconds_per_test
        results = await run_tests(self._box(), program, checks, timeout_s=seconds)
        return [result.passed for result in results]

    def _box(self) -> Sandbox:
        if self._sandbox is None:
            limits = SandboxLimits(wall_seconds=self.config.seconds_per_test, memory_bytes=self.config.memory_bytes)
            try:
                self._sandbox = Sandbox(
                    limits, packages=self.config.packages, allow_unisolated=self.config.allow_unisolated
                )
            except SandboxError as error:
                raise RewardError(f"reward {self.name}: {error}") from error
        return self._sandbox

    async def _ask(self, service: JsonService, program: str, checks: Sequence[Check]) -> list[bool]:
        """open-instruct: {program, tests, max_execution_time} -> {"results": [0 or 1]}."""
        tests = [_statement(check) for check in checks]
        seconds = self.config.seconds_per_test
        reply = await service.post({"program": program, "tests": tests, "max_execution_time": seconds})
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list):
            raise ServiceError("service_bad_reply", f"{service.url}: no list 'results'", transient=False)
        if len(results) != len(tests):
            raise RewardError(f"{service.url} returned {len(results)} results for {len(tests)} tests")
        return [result in (1, True) for result in results]


def _statement(check: Check) -> str:
    if "stdin" in check:
        raise ServiceError("service_refused", "a code API runs statements, not inputs and outputs", transient=False)
    return check["code"] if "code" in check else f"assert {check['call']} == {check['expected']!r}"


def _checks(value: Any) -> list[Check]:
    if isinstance(value, str):
        return _from_code(value) if value.strip() else []
    if isinstance(value, list):
        return [check for item in value for check in _checks(item)]
    if isinstance(value, Mapping):
        for inputs, outputs in (("inputs", "outputs"), ("input", "output"), ("stdin", "stdout")):
            if inputs in value and outputs in value:
                return _pairs(value[inputs], value[outputs], value.get("fn_name"))
        for key in ("tests", "test", "test_list", "assert", "code"):
            if key in value:
                return _checks(value[key])
        raise ValueError(f"tests with the keys {sorted(map(str, value))}; expected inputs and outputs, or tests")
    raise ValueError(f"a test is a statement or an input with its output, got {value!r:.100}")


def _from_code(code: str) -> list[Check]:
    """Calls with their values where every statement is `assert CALL == LITERAL`; the code as it is otherwise."""
    calls = [_call(node) for node in ast.parse(code).body]
    return [call for call in calls if call is not None] if calls and None not in calls else [{"code": code}]


def _call(node: ast.stmt) -> Check | None:
    match node:
        case ast.Assert(test=ast.Compare(left=ast.Call() as left, ops=[ast.Eq()], comparators=[right])):
            try:
                return {"call": ast.unparse(left), "expected": ast.literal_eval(right)}
            except ValueError:
                return None
    return None


def _pairs(inputs: Any, outputs: Any, function: Any) -> list[Check]:
    ins, outs = (value if isinstance(value, list) else [value] for value in (inputs, outputs))
    if len(ins) != len(outs):
        raise ValueError(f"{len(ins)} inputs and {len(outs)} outputs")
    if function is not None:
        arguments = [", ".join(map(repr, given if isinstance(given, list) else [given])) for given in ins]
        return [{"call": f"{function}({a})", "expected": out} for a, out in zip(arguments, outs, strict=True)]
    return [{"stdin": _text(i), "stdout": _text(o)} for i, o in zip(ins, outs, strict=True)]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _decoded(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text  # Python code may begin with a bracket
    return text
