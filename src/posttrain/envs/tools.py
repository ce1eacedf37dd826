"""Tools in a loop: the policy calls, reads what came back, and goes on until it answers without a call.

Every attempt is on record with what became of it; what cannot be run is answered by a correction that shows a right
call. How calls are written is `syntax`, a row of `posttrain.chat.calls.SYNTAXES`; what may be called are the tools of
the config. Scoring the answer is the reward's business.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from posttrain.chat.calls import SYNTAXES, Attempt, Framed, Parsed, Signatures, Syntax, over_budget, parse_turn
from posttrain.envs.protocol import Action, Observation, Step
from posttrain.location import did_you_mean
from posttrain.task import Message, Task, detached
from posttrain.tools.protocol import Tool, ToolError, ToolSpec
from posttrain.trajectory import CallStatus, StopReason, ToolCall

Describe = Literal["auto", "template", "text", "none"]
Results = Literal["auto", "messages", "text"]


class ToolEnv:
    """A policy with tools.

    tools: by the name that the policy calls. In a config: names of the `tools` section; all of them when left out.
    syntax: how calls are written.
    max_turns: policy turns; in the last one only an answer counts.
    max_calls, max_calls_per_turn: calls that are run; those beyond are refused as over budget. The calls of a turn run
        at the same time.
    describe: how the policy learns of the tools: `template` (the chat template renders their schemas), `text` (a system
        message in the syntax itself), `none` (the prompts of the data do it); `auto` = text for syntaxes whose results
        stand in the policy's turn, else template.
    results: `messages` of the role tool, or `text` in the syntax's own frame; `auto` = as the syntax says.
    instructions: stands before the description of the tools, with `text`.

    An answer is a turn without a call; syntaxes with a `finish` action (ReAct) end by that one too.
    """

    def __init__(
        self,
        *,
        tools: Mapping[str, Tool],
        syntax: str = "hermes",
        max_turns: int = 8,
        max_calls: int = 16,
        max_calls_per_turn: int = 4,
        describe: Describe = "auto",
        results: Results = "auto",
        instructions: str = "",
    ) -> None:
        if syntax not in SYNTAXES:
            raise ValueError(f"unknown syntax {syntax!r}.{did_you_mean(syntax, SYNTAXES)} Known: {', '.join(SYNTAXES)}")
        if min(max_turns, max_calls, max_calls_per_turn) < 1:
            raise ValueError(f"{max_turns=}, {max_calls=} and {max_calls_per_turn=} must be 1 or more")
        self.syntax: Syntax = SYNTAXES[syntax]
        self.stop_strings = self.syntax.stop_strings
        self.max_turns, self.max_calls, self.max_calls_per_turn = max_turns, max_calls, max_calls_per_turn
        self._tools = dict(tools)
        self._signatures = Signatures([for_checking(tool.spec) for tool in tools.values()])
        in_turn = self.syntax.in_turn
        self._describe = describe if describe != "auto" else ("text" if in_turn else "template")
        self._as_text = results == "text" or (results == "auto" and in_turn)
        self._instructions = instructions
        self.tools = [tool.spec.schema() for tool in tools.values()] if self._describe == "template" else None
        self._turns = self._calls = 0

    async def reset(self, task: Task) -> Observation:
        self._turns = self._calls = 0
        if self._describe != "text":
            return Observation()
        parts = (self._instructions, self.syntax.instructions(self._signatures))
        return Observation(history=with_system("\n\n".join(part for part in parts if part), task.prompt))

    async def step(self, action: Action) -> Step:
        turn = parse_turn(
            action.text, self.syntax, self._signatures, stop_reason=action.stop_reason, in_thought=action.in_thought
        )
        if self._goes_on(turn, action):
            return Step()
        self._turns += 1
        if not turn.attempts:
            return Step(done=True)
        if self._finishes(turn.attempts):
            return Step(done=True, calls=tuple(attempt.record() for attempt in turn.attempts))
        last = self._turns >= self.max_turns
        attempts = self._within_budget(turn.attempts, last)
        outcomes = await self._run_all(attempts, action.text)
        calls = tuple(call for call, _ in outcomes)
        if last:
            return Step(done=True, calls=calls)
        frames = [
            frame or self.syntax.correction(attempt_of(attempt, call), self._signatures, turn=action.text)
            for attempt, (call, frame) in zip(attempts, outcomes, strict=True)
        ]
        return Step(observation=self._observation(calls, frames, action), calls=calls)

    async def close(self) -> None:
        """Tools belong to the run, not to the episode."""
        return

    def _goes_on(self, turn: Parsed, action: Action) -> bool:
        """A stop string inside a thought or a quoted argument ends no turn."""
        return action.stop_reason is StopReason.STOP_STRING and (turn.in_thought or turn.in_call)

    def _finishes(self, attempts: Sequence[Attempt]) -> bool:
        finish = self.syntax.finish
        return any(a.name == finish and a.status is CallStatus.OK and a.name not in self._tools for a in attempts)

    def _within_budget(self, attempts: list[Attempt], last: bool) -> list[Attempt]:
        if last:
            return over_budget(attempts, 0, "this was the last turn: only an answer counts")
        attempts = over_budget(
            attempts, self.max_calls_per_turn, f"only {self.max_calls_per_turn} calls are run in one turn"
        )
        attempts = over_budget(attempts, self.max_calls - self._calls, f"all {self.max_calls} calls are used up")
        self._calls += sum(attempt.status is CallStatus.OK for attempt in attempts)
        return attempts

    async def _run_all(self, attempts: Sequence[Attempt], turn: str) -> list[tuple[ToolCall, Framed | None]]:
        """All at the same time, in order. When one ends the episode, the others are stopped."""
        jobs = [asyncio.ensure_future(self._run(attempt, turn)) for attempt in attempts]
        try:
            return await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _run(self, attempt: Attempt, turn: str) -> tuple[ToolCall, Framed | None]:
        """The record of a call, and its result unless there is none."""
        if attempt.status is not CallStatus.OK:
            return attempt.record(), None
        tool = self._tools.get(attempt.name) or self._named(attempt.name)
        started = time.perf_counter()
        try:
            result = await tool.call(detached(attempt.arguments or {}))  # the record keeps what the policy wrote
        except ToolError as error:
            seconds = time.perf_counter() - started
            return attempt.record(status=error.status, detail=error.message, seconds=seconds), None
        cut = f"{result.bytes_cut} bytes of the result cut" if result.bytes_cut else ""
        detail = ", ".join(filter(None, ("cached" if result.cached else "", cut)))
        record = attempt.record(detail=detail, seconds=time.perf_counter() - started)
        return record, self.syntax.result(attempt.name, result.text, turn=turn)

    def _named(self, name: str) -> Tool:
        """By a name in another case of letters, which some syntaxes allow."""
        return next(tool for known, tool in self._tools.items() if known.lower() == name.lower())

    def _observation(self, calls: Sequence[ToolCall], frames: Sequence[Framed], action: Action) -> Observation:
        if not self._as_text:
            return Observation(messages=tuple(self._message(*pair) for pair in zip(calls, frames, strict=True)))
        if action.stop_reason is StopReason.STOP_ID:  # the policy has closed its turn
            return Observation(messages=({"role": "user", "content": "".join(map(str, frames)).strip()},))
        first, last = frames[0], frames[-1]
        inner = first.text + "".join(a.tail + b.head + b.text for a, b in itertools.pairwise(frames))
        return Observation(head=first.head, text=inner, tail=last.tail)

    def _message(self, call: ToolCall, frame: Framed) -> Message:
        """The chat template puts its own frame around it."""
        head = frame.head.removeprefix(self.syntax.result_head)
        content = head + frame.text + frame.tail.removesuffix(self.syntax.result_tail)
        return {"role": "tool", "name": call.name, "content": content}


class ReActEnv(ToolEnv):
    """Thought, Action, Observation (Yao et al. 2022, arXiv:2210.03629), described in a system message."""

    def __init__(
        self,
        *,
        tools: Mapping[str, Tool],
        max_turns: int = 8,
        max_calls: int = 16,
        instructions: str = "Answer the question. Write a line Thought: with what you think, then an action.",
    ) -> None:
        super().__init__(
            tools=tools,
            syntax="react",
            max_turns=max_turns,
            max_calls=max_calls,
            max_calls_per_turn=1,
            instructions=instructions,
        )


def with_system(text: str, prompt: Sequence[Message]) -> tuple[Message, ...]:
    """The prompt with `text` at the end of its system message, or in one of its own."""
    if prompt and prompt[0].get("role") == "system":
        first = {**prompt[0], "content": f"{prompt[0]['content']}\n\n{text}"}
        return (first, *prompt[1:])
    return ({"role": "system", "content": text}, *prompt)


def attempt_of(attempt: Attempt, call: ToolCall) -> Attempt:
    """The attempt as it ended, for its correction."""
    return replace(attempt, status=call.status, detail=call.detail)


def for_checking(spec: ToolSpec) -> ToolSpec:
    """The spec in strict JSON schema, which has no `nullable`."""
    return replace(spec, parameters=_strict(spec.parameters))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("nullable") is not True:  # a parameter may be called so
        return made
    del made["nullable"]
    return {"anyOf": [made, {"type": "null"}]}
