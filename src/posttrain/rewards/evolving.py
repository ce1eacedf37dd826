"""Rubrics that grow while training: a model compares the answers of a group and says what tells them apart.

DR-Tulu (Shao et al. 2025): the items made so far stay in a buffer per question; those that no longer tell answers apart
are retired. Deviations: the buffer is part of the checkpoint; nothing is drawn by lot; a group whose generation failed
is still judged by the active items; evaluations use the persistent items only and teach nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import Field, PositiveInt

from posttrain.rewards.judge import WARNING, EndpointConfig, Judge, fenced, question_of
from posttrain.rewards.rubric_items import Rubric, RubricError, RubricSet, rubrics_of_task
from posttrain.rewards.rubrics import RubricConfig, RubricReward, answer_text
from posttrain.rewards.service import ServiceError
from posttrain.rewards.verdicts import UnreadableReply, read_json
from posttrain.task import Invalid, Outcome, Task
from posttrain.trajectory import Episode

MOST_NEW = 5  # of each sign per call
GENERATE = (
    "Below are {count} responses to one question. Write statements that tell the good ones from the bad ones: positive "
    "ones hold of better responses, negative ones of worse. Each must be checkable on a single response, say something "
    "that the existing statements do not, and not hold (or fail to hold) of all responses alike. {warning}\n\n"
    "<question>{question}</question>\n<existing>\n{existing}\n</existing>\n{responses}\n\n"
    'Reply with JSON: {{"question": "...", "positive_rubrics": [{{"description": "...", "title": "..."}}], '
    '"negative_rubrics": [...]}}, at most {most} of each, empty lists where nothing tells them apart.'
)


class EvolvingConfig(RubricConfig):
    """Options of the reward `evolving_rubric`."""

    max_active: PositiveInt = Field(default=5, description="items per question besides the persistent ones")
    max_words: PositiveInt | None = Field(default=None, description="of each response shown to the generator")
    generator: EndpointConfig | None = Field(default=None, description="who writes the items; null = the judge")


@dataclass(slots=True)
class Entry:
    """An item in the buffer and how it has done. `spread`: of its grades in the last group that it judged."""

    rubric: Rubric
    groups: int = 0
    grades: int = 0
    total: float = 0.0
    spread: float | None = None

    @property
    def mean(self) -> float | None:
        return self.total / self.grades if self.grades else None


@dataclass(slots=True)
class RubricBuffer:
    """Per question: active items, and retired ones so that they are not made again. `state_dict` is plain JSON."""

    max_active: int = 5
    active: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])  # question -> key -> entry
    retired: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])

    def items(self, question: str) -> list[Rubric]:
        return [entry.rubric for _, entry in sorted(self.active.get(question, {}).items())]

    def add(self, question: str, rubrics: Iterable[Rubric]) -> int:
        """How many were new: neither active nor retired."""
        active, retired = self.active.setdefault(question, {}), self.retired.setdefault(question, {})
        new = {r.key: Entry(r) for r in rubrics if r.key not in active and r.key not in retired}
        active.update(new)
        return len(new)

    def observe(self, question: str, grades: Mapping[Rubric, Sequence[float]]) -> int:
        """Counts the grades of a group, then retires: items that graded all answers alike, and beyond `max_active`
        those with the smallest spread (among equals, those that judged most groups). Items that judged none stay.
        Returns how many were retired."""
        active = self.active.setdefault(question, {})
        for rubric, values in grades.items():
            entry = active.get(rubric.key)
            if entry is not None and values:
                entry.groups += 1
                entry.grades += len(values)
                entry.total += math.fsum(values)
                entry.spread = statistics.pstdev(values) if len(values) > 1 else entry.spread
        leaving = [key for key, entry in active.items() if entry.spread == 0]
        kept = sorted(
            (key for key in active if key not in leaving),
            key=lambda key: (-_spread(active[key]), active[key].groups, key),
        )
        leaving += kept[self.max_active :]
        for key in leaving:
            self.retired.setdefault(question, {})[key] = active.pop(key)
        return len(leaving)

    def state_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in ("active", "retired")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.active, self.retired = _entries(state["active"]), _entries(state["retired"])


class EvolvingRubricReward:
    """`RubricReward` over the task's own items and those of the buffer; each group teaches it new ones."""

    def __init__(self, config: EvolvingConfig, name: str = "evolving_rubric") -> None:
        self.name = name
        self.config = config
        self.buffer = RubricBuffer(config.max_active)
        self.generated = 0  # counters, kept with the state: they are reproducible
        self.retired = 0
        self.generations_failed = 0
        self._rubrics = RubricReward(config, name)
        self._generator = self._rubrics.judge if config.generator is None else Judge(config.generator)
        self.counters = self._rubrics.counters

    def check_task(self, task: Task) -> None:
        self._rubrics.check_task(task)

    def for_evaluation(self) -> RubricReward:
        return self._rubrics

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        try:
            persistent = rubrics_of_task(task)
        except RubricError as error:
            return [Invalid("bad_ground_truth", f"task {task.id!r}: {error}")] * len(episodes)
        question = persistent.question or question_of(task)
        made = await self._generate(episodes, question, persistent)
        self.generated += self.buffer.add(question, made)
        active = self.buffer.items(question)
        judged = await self._rubrics.judged(episodes, task, RubricSet(question, (*persistent.items, *active)))
        grades = {item: [shares[item] for _, shares in judged if item in shares] for item in active}
        self.retired += self.buffer.observe(question, grades)
        return [outcome for outcome, _ in judged]

    def close(self) -> None:
        self._rubrics.close()
        self._generator.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer.state_dict(),
            "generated": self.generated,
            "retired": self.retired,
            "generations_failed": self.generations_failed,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state(state["buffer"])
        self.generated, self.retired = state["generated"], state["retired"]
        self.generations_failed = state["generations_failed"]

    def measures(self) -> dict[str, float]:
        """Values of the metric dictionary."""
        return {
            "rubric/active": float(sum(map(len, self.buffer.active.values()))),
            "rubric/generated": float(self.generated),
            "rubric/retired": float(self.retired),
            "rubric/generations_failed": float(self.generations_failed),
        }

    async def _generate(self, episodes: Sequence[Episode], question: str, persistent: RubricSet) -> list[Rubric]:
        """New items from what tells the group's answers apart; none when fewer than two differ, or on failure."""
        answers = sorted({answer_text(episode, self.config.reads) for episode in episodes} - {""})
        if len(answers) < 2:
            return []
        known = [*persistent.items, *self.buffer.items(question)]
        prompt = GENERATE.format(
            count=len(answers),
            warning=WARNING,
            question=question,
            existing="\n".join(f"- {item.description}" for item in known),
            responses="\n".join(f"<response>{fenced(self._cut(answer))}</response>" for answer in answers),
            most=MOST_NEW,
        )
        try:
            return await self._generator.ask(prompt, read_rubrics)
        except ServiceError:
            self.generations_failed += 1
            return []

    def _cut(self, text: str) -> str:
        words = text.split()
        over = self.config.max_words is not None and len(words) > self.config.max_words
        return " ".join(words[: self.config.max_words]) + " [cut]" if over else text


def read_rubrics(reply: str) -> list[Rubric]:
    """Items of weight +1 and -1, at most MOST_NEW of each sign. Raises UnreadableReply."""
    value = read_json(reply)
    if not {"positive_rubrics", "negative_rubrics"} & value.keys():
        raise UnreadableReply(f"neither positive_rubrics nor negative_rubrics in {json.dumps(value)[:200]}")
    made: list[Rubric] = []
    for key, weight in (("positive_rubrics", 1.0), ("negative_rubrics", -1.0)):
        entries = value.get(key) or []
        if not isinstance(entries, list):
            raise UnreadableReply(f"{key} is no list: {entries!r:.100}")
        for entry in entries[:MOST_NEW]:
            text = entry.get("description") if isinstance(entry, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise UnreadableReply(f"{key} holds an item without a description: {entry!r:.100}")
            made.append(Rubric(text.strip(), weight, str(entry.get("title") or ""), "adaptive"))
    return made


def _spread(entry: Entry) -> float:
    return math.inf if entry.spread is None else entry.spread


def _plain(entries: Mapping[str, Mapping[str, Entry]]) -> dict[str, dict[str, Any]]:
    return {q: {key: asdict(entry) for key, entry in sorted(inner.items())} for q, inner in sorted(entries.items())}


def _entries(state: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    return {question: {key: _entry(saved) for key, saved in inner.items()} for question, inner in state.items()}


def _entry(saved: Mapping[str, Any]) -> Entry:
    values: dict[str, Any] = {**saved, "rubric": Rubric(**saved["rubric"])}
    return Entry(**values)
