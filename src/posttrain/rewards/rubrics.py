"""Rubrics judged by a language model, one call per item or one for all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from posttrain.rewards.answers import tagged_answer
from posttrain.rewards.functions import RewardError
from posttrain.rewards.judge import WARNING, EndpointConfig, Judge, fenced, question_of
from posttrain.rewards.rubric_items import Rubric, RubricError, RubricSet, rubric_value, rubrics_of_task
from posttrain.rewards.service import ServiceError
from posttrain.rewards.verdicts import UnreadableReply, read_json, read_number
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode

TOP_GRADE = 2  # 0 = does not hold, 1 = in part, 2 = fully
ONE_ITEM = (
    "How far does the statement hold of the response? 0 = not at all, 1 = in part, 2 = fully. {warning}\n\n"
    "<question>{question}</question>\n<response>{response}</response>\n<statement>{statement}</statement>\n\n"
    'Reply with JSON: {{"reasoning": "one sentence", "score": 0, 1 or 2}}'
)
ALL_ITEMS = (
    "How far does each statement hold of the response? 0 = not at all, 1 = in part, 2 = fully. {warning}\n\n"
    "<question>{question}</question>\n<response>{response}</response>\n<statements>\n{statement}\n</statements>\n\n"
    'Reply with JSON: {{"scores": [one number per statement, in their order: {count}]}}'
)


class RubricConfig(EndpointConfig):
    """Options of the reward `rubric`."""

    calls: Literal["per_item", "together"] = Field(default="per_item", description="one question per item, or one")
    reads: Literal["answer", "final"] = Field(
        default="answer", description="answer: the text in <answer> tags; final: the last turn without thoughts"
    )
    min_total_weight: float = Field(default=0.0, ge=0, description="the divisor's lower bound; DR-Tulu's is 1.0")
    max_failed_share: float = Field(default=0.0, ge=0, lt=1, description="of the weight of items without a judgement")


class RubricReward:
    """The weighted share of rubric items that hold, by a judge. A task without readable rubrics is refused at start."""

    def __init__(self, config: RubricConfig, name: str = "rubric") -> None:
        self.name = name
        self.config = config
        self.judge = Judge(config)
        self.counters = self.judge.counters

    def check_task(self, task: Task) -> None:
        try:
            rubrics_of_task(task)
        except RubricError as error:
            raise RewardError(f"task {task.id!r}: {error}") from error

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        try:
            rubrics = rubrics_of_task(task)
        except RubricError as error:
            return [Invalid("bad_ground_truth", f"task {task.id!r}: {error}")] * len(episodes)
        return [outcome for outcome, _ in await self.judged(episodes, task, rubrics)]

    def close(self) -> None:
        self.judge.close()

    async def judged(
        self, episodes: Sequence[Episode], task: Task, rubrics: RubricSet
    ) -> list[tuple[Outcome, dict[Rubric, float]]]:
        """The outcome of each episode and how far each item holds of it."""
        question = rubrics.question or question_of(task)
        return list(await asyncio.gather(*(self._one(episode, question, rubrics) for episode in episodes)))

    async def _one(self, episode: Episode, question: str, rubrics: RubricSet) -> tuple[Outcome, dict[Rubric, float]]:
        response = answer_text(episode, self.config.reads)
        if not response:
            return Score(0.0, {"rubric": 0.0, "no_answer": 1.0}), {}
        try:
            judged = await self._items(question, response, rubrics.items)
        except ServiceError as error:
            return error.as_invalid(), {}
        return self._outcome(judged, rubrics.items), {
            item: share for item, share in judged.items() if not isinstance(share, ServiceError)
        }

    async def _items(
        self, question: str, response: str, items: Sequence[Rubric]
    ) -> Mapping[Rubric, float | ServiceError]:
        def ask(template: str, statement: str, read: Callable[[str], Any]) -> Any:
            text = template.format(
                warning=WARNING,
                question=question,
                response=fenced(response),
                statement=statement,
                count=len(items),
            )
            return self.judge.ask(text, read)

        if self.config.calls == "together":
            listed = "\n".join(f"{number}. {item.description}" for number, item in enumerate(items, start=1))
            grades = await ask(ALL_ITEMS, listed, _READ_MANY[len(items)])
            return dict(zip(items, grades, strict=True))
        calls = (ask(ONE_ITEM, item.description, read_grade) for item in items)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for share in found:
            if isinstance(share, BaseException) and not isinstance(share, ServiceError):
                raise share
        return dict(zip(items, found, strict=True))  # type: ignore[arg-type]

    def _outcome(self, judged: Mapping[Rubric, float | ServiceError], items: Sequence[Rubric]) -> Outcome:
        failed = {item: share for item, share in judged.items() if isinstance(share, ServiceError)}
        weight = math.fsum(abs(item.weight) for item in items)
        if failed and math.fsum(abs(item.weight) for item in failed) > self.config.max_failed_share * weight:
            error = next(iter(failed.values()))
            return Invalid(error.reason, f"{len(failed)} of {len(items)} rubric items: {error.detail}")
        shares = {item: share for item, share in judged.items() if not isinstance(share, ServiceError)}
        value = rubric_value(shares, self.config.min_total_weight)
        components = {"rubric": value, "no_answer": 0.0, "items_failed": float(len(failed))}
        for kind in sorted({item.kind for item in shares}):
            part = {item: share for item, share in shares.items() if item.kind == kind}
            components[f"rubric_{kind}"] = rubric_value(part, self.config.min_total_weight)
        return Score(value, components)


def answer_text(episode: Episode, reads: str) -> str:
    """What is judged: '' when there is nothing."""
    return tagged_answer(episode).text if reads == "answer" else outside_thoughts(episode.final_text).strip()


def read_grade(reply: str) -> float:
    return read_number(reply, 0, TOP_GRADE) / TOP_GRADE


class _Readers(dict[int, Callable[[str], list[float]]]):
    """One reader per number of items, so that equal questions have equal readers."""

    def __missing__(self, count: int) -> Callable[[str], list[float]]:
        def read(reply: str) -> list[float]:
            grades = read_json(reply, "scores")["scores"]
            if not isinstance(grades, list) or len(grades) != count:
                raise UnreadableReply(f"expected {count} scores, got {grades!r:.200}")
            return [read_number(str(grade), 0, TOP_GRADE) / TOP_GRADE for grade in grades]

        self[count] = read
        return read


_READ_MANY = _Readers()
