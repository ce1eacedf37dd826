"""Search-R1's protocol (Jin et al. 2025, arXiv:2503.09516): think, search, read, answer, all inside one text.

The policy writes `<search> query </search>`; the passages come back between `<information>` tags; `<answer>` ends the
episode. Tags, the document line, and the invalid-action text are Search-R1's, character by character.

Deviations, all on purpose: tags inside `<think>...</think>` are no calls; a tag that is mismatched, nested or in the
wrong case is a typed `malformed` call; a call that the length limit cut ends the episode unexecuted; an empty query
never reaches the server. Scoring answers is no business of this module.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.envs.protocol import Action, Observation, Step
from posttrain.retrieval.protocol import Passage, Retriever
from posttrain.task import EpisodeInvalid, Task
from posttrain.thought import THINK_OPEN, ends_in_thought, outside_thoughts
from posttrain.trajectory import CallStatus, StopReason, ToolCall

SEARCH_R1_PROMPT = (
    "Answer the question at the end. Reason between <think> and </think> first, and again each time you have learnt "
    "something new. Where you lack knowledge, call a search engine with <search> query </search>; the best passages "
    "come back between <information> and </information>. You may search as often as you like. When you know enough, "
    "write the answer between <answer> and </answer>, short and without explanation, for example "
    "<answer> Beijing </answer>. "
    "Question: {question}\n"
)
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
EMPTY_QUERY = (
    "\nMy previous search has an empty query. If I want to search, I should put the query between <search> and "
    "</search>. Let me try again.\n"
)
SEARCH_TIMEOUT = "The search took too long and was given up."
INFORMATION_HEAD = "\n\n<information>"
INFORMATION_TAIL = "</information>\n\n"

_TAG = re.compile(r"<(/?)(search|answer)>", re.IGNORECASE)


def search_prompt(question: str, template: str = SEARCH_R1_PROMPT) -> str:
    """The user message for a question; a missing question mark is added, as Search-R1's data scripts do."""
    question = question.strip()
    return template.replace("{question}", question if question.endswith("?") else question + "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a turn asks for. `name` is 'search', 'answer', or '' when it asks for nothing."""

    name: str = ""
    content: str = ""
    status: CallStatus = CallStatus.OK
    detail: str = ""
    in_thought: bool = False  # the text ends inside an open <think>: the turn is not over
    ignored: int = 0  # further complete calls behind the first one, which are not run


def parse_call(text: str, stop_reason: StopReason) -> Call:
    """The first search or answer tag of a turn, outside thoughts.

    Its own closing tag must be the next tag: `<search>q</answer>`, `<search>a<answer>`, `</search>` alone and
    `<SEARCH>` are MALFORMED. A call still open when the turn stopped by length is TRUNCATED.
    """
    visible = outside_thoughts(text)
    tags = list(_TAG.finditer(visible))
    if not tags:
        return Call(in_thought=ends_in_thought(text))
    first = tags[0]
    name = first[2].lower()
    if first[0] not in ("<search>", "<answer>"):
        return Call(name=name, status=CallStatus.MALFORMED, detail=f"expected <search> or <answer>, got {first[0]}")
    if len(tags) == 1:
        cut = stop_reason is StopReason.LENGTH
        status = CallStatus.TRUNCATED if cut else CallStatus.MALFORMED
        return Call(name=name, content=visible[first.end() :], status=status, detail=f"{first[0]} is not closed")
    content = visible[first.end() : tags[1].start()].strip()
    if tags[1][0] != f"</{name}>":
        detail = f"{first[0]} must be closed by </{name}>, got {tags[1][0]}"
        return Call(name=name, content=content, status=CallStatus.MALFORMED, detail=detail)
    ignored = sum(tag[1] == "/" for tag in tags[2:])
    if name == "search" and not content:
        return Call(name=name, status=CallStatus.EMPTY, detail="empty query", ignored=ignored)
    return Call(name=name, content=content, ignored=ignored)


def format_passages(passages: Sequence[Passage]) -> str:
    """Search-R1's `Doc {i}(Title: {title}) {text}` lines, stripped at both ends."""
    lines: list[str] = []
    for i, passage in enumerate(passages, start=1):
        title, _, text = passage.contents.partition("\n")
        lines.append(f"Doc {i}(Title: {title}) {text}\n")
    return "".join(lines).strip()


class SearchEnv:
    """Search, read, answer.

    max_turns: turns in which a search is run. One last turn follows them, in which only an answer counts; so the policy
        has `max_turns + 1` turns, and that is what the attribute `max_turns` says.
    search_seconds: deadline of one retrieval; past it the policy reads a timeout text and goes on. None = no deadline
        of its own (the rollout's limits still hold).
    search_enabled: False returns empty information blocks: the control that shows whether a policy reads at all.

    Raises EpisodeInvalid("tool_down") when the retriever fails.
    """

    stop_strings: tuple[str, ...] = ("</search>", "</answer>")

    def __init__(
        self,
        *,
        retriever: Retriever,
        top_k: int = 3,
        max_turns: int = 2,
        search_seconds: float | None = None,
        search_enabled: bool = True,
    ) -> None:
        if top_k < 1 or max_turns < 0:
            raise ValueError(f"top_k must be >= 1 and max_turns >= 0, got top_k={top_k}, max_turns={max_turns}")
        self.retriever = retriever
        self.top_k = top_k
        self.max_turns = max_turns + 1
        self.search_seconds = search_seconds
        self.search_enabled = search_enabled
        self._turns_taken = 0

    async def reset(self, task: Task) -> Observation:
        self._turns_taken = 0
        return Observation()

    async def step(self, action: Action) -> Step:
        call = parse_call(THINK_OPEN * action.in_thought + action.text, action.stop_reason)
        if call.in_thought and not call.name and action.stop_reason is StopReason.STOP_STRING:
            return Step()  # the stop string stood in a thought: the policy goes on writing
        self._turns_taken += 1
        last = self._turns_taken >= self.max_turns
        if call.name == "answer" and call.status is CallStatus.OK:
            return Step(done=True, calls=_records(call))
        if call.status is CallStatus.TRUNCATED:
            return Step(done=True, calls=_records(call))
        if last:
            return Step(done=True, calls=_records(call, over_budget=True))
        if call.name == "search" and call.status is CallStatus.OK:
            return await self._search(call)
        text = EMPTY_QUERY if call.status is CallStatus.EMPTY else INVALID_ACTION
        return Step(observation=_correction(text, action), calls=_records(call))

    async def close(self) -> None:
        return None

    async def _search(self, call: Call) -> Step:
        started = time.perf_counter()
        status, text = CallStatus.OK, ""
        if self.search_enabled:
            try:
                async with asyncio.timeout(self.search_seconds) as clock:
                    text = format_passages(await self._passages(call.content))
            except TimeoutError:
                if not clock.expired():
                    raise
                status, text = CallStatus.TIMEOUT, SEARCH_TIMEOUT
        seconds = time.perf_counter() - started
        observation = Observation(head=INFORMATION_HEAD, text=text, tail=INFORMATION_TAIL)
        return Step(observation=observation, calls=_records(call, status=status, seconds=seconds))

    async def _passages(self, query: str) -> Sequence[Passage]:
        try:
            results = await self.retriever.retrieve([query], self.top_k)
        except EpisodeInvalid:
            raise
        except Exception as error:
            raise EpisodeInvalid("tool_down", f"search failed with {type(error).__name__}: {error}") from error
        if len(results) != 1:
            raise EpisodeInvalid("tool_down", f"the retriever returned {len(results)} result lists for one query")
        return results[0]


def _correction(text: str, action: Action) -> Observation:
    """Raw text while the policy's turn is open; a user message once the policy has closed it by its stop id."""
    if action.stop_reason is StopReason.STOP_ID:
        return Observation(messages=({"role": "user", "content": text},))
    return Observation(text="", head=text)


def _records(
    call: Call, *, status: CallStatus | None = None, seconds: float = 0.0, over_budget: bool = False
) -> tuple[ToolCall, ...]:
    """The call and those ignored behind it, as the trajectory stores them; nothing when the turn held no tag."""
    if not call.name:
        return ()
    if over_budget and call.status is CallStatus.OK:
        status = CallStatus.OVER_BUDGET
    arguments = {"query" if call.name == "search" else "answer": call.content}
    record = ToolCall(
        name=call.name, arguments=arguments, status=status or call.status, detail=call.detail, seconds=seconds
    )
    behind = ToolCall(name="any", arguments={}, status=CallStatus.OVER_BUDGET, detail="only a turn's first call is run")
    return (record, *([behind] * call.ignored))
