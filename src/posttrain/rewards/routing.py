"""A row says by a column which verifiers judge it: verl's `data_source`, open-instruct's `dataset`."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.location import did_you_mean
from posttrain.rewards.functions import RewardError
from posttrain.rewards.scoring import Mixture, Part, Reward, for_evaluation, score_group
from posttrain.task import Outcome, Task
from posttrain.trajectory import Episode

# What the field's data sets are judged by, where the config says nothing else about them. Patterns, first match wins.
DATA_SETS: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo*": "number",
    "aime*": "number",
    "amc*": "number",
    "math": "math",
    "strict_math": "math",
    "numina_*": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "em",
    "nq": "em",
    "triviaqa": "em",
    "popqa": "em",
    "hotpotqa": "em",
    "2wikimultihopqa": "em",
    "musique": "em",
    "bamboogle": "em",
    "web_questions": "em",
    "strategyqa": "em",
    "re_search": "em",
    "re_search_f1": "f1",
    "string_matcher": "em",
    "string_f1": "f1",
    "code": "code",
}


@dataclass(frozen=True, slots=True)
class Routed:
    """Judges a task by the rewards that its column names; several are summed by weight like the parts of a mixture.

    With several names and as many accepted answers, the i-th name gets the i-th answer (open-instruct); otherwise
    every name gets all of them.
    """

    column: str  # of Task.extra; "source" = Task.source, "reward" = Task.reward
    parts: Mapping[str, Part]  # pattern -> reward and weight
    default: Part | None = None  # for a name that no pattern matches, and for a row without the column
    name: str = "routed"

    @property
    def inner(self) -> list[Reward]:
        parts = [*self.parts.values(), *([self.default] if self.default is not None else [])]
        return [part.reward for part in parts]

    def for_evaluation(self) -> Routed:
        frozen = {name: Part(for_evaluation(part.reward), part.weight) for name, part in self.parts.items()}
        default = None if self.default is None else Part(for_evaluation(self.default.reward), self.default.weight)
        return replace(self, parts=frozen, default=default)

    def check_task(self, task: Task) -> None:
        """Raises RewardError for a name that nothing judges."""
        for name, own in self._own_tasks(task):
            check: Any = getattr(self._part(name, task).reward, "check_task", None)
            if check is not None:
                check(own)

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        chosen = [(name, own, self._part(name, task)) for name, own in self._own_tasks(task)]
        groups = await asyncio.gather(*(score_group(part.reward, episodes, own) for _, own, part in chosen))
        if len(chosen) == 1 and chosen[0][2].weight == 1.0:
            return list(groups[0])
        labels = [name if name else "default" for name, _, _ in chosen]
        mixture = Mixture(
            {f"{label}#{i}" if labels.count(label) > 1 else label: chosen[i][2] for i, label in enumerate(labels)}
        )
        return mixture.mixed(groups)

    def close(self) -> None:
        for reward in self.inner:
            reward.close()

    def _own_tasks(self, task: Task) -> list[tuple[str, Task]]:
        names = names_of(task, self.column)
        if len(names) > 1 and len(names) == len(task.ground_truth):
            return [
                (name, replace(task, ground_truth=(gold,))) for name, gold in zip(names, task.ground_truth, strict=True)
            ]
        return [(name, task) for name in names or [""]]

    def _part(self, name: str, task: Task) -> Part:
        for pattern, part in self.parts.items():
            if name and fnmatch.fnmatchcase(name.lower(), pattern.lower()):
                return part
        if self.default is not None:
            return self.default
        said = f"names the reward {name!r}" if name else "names no reward"
        raise RewardError(
            f"task {task.id!r} {said} in its column {self.column!r}; nothing judges it."
            f"{did_you_mean(name, self.parts)} "
            f"Known: {', '.join(self.parts)}. Add it under reward.by.rewards, or give reward.by.default"
        )


def names_of(task: Task, column: str) -> list[str]:
    """What a row's column names: text, or a list of texts. Commas separate names, too."""
    value: Any = {"source": task.source, "reward": task.reward}.get(column, task.extra.get(column))
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [name.strip() for item in values for name in str(item).split(",") if name.strip()]
