r"""Mathematical answers: `\boxed{}` (or the whole stated answer) against the accepted ones, by meaning.

Equal numbers and equal LaTeX text are seen here, for nothing; everything else goes to math-verify in worker processes
that are killed at the deadline, so an answer that cannot be evaluated is Invalid("reward_timeout"), never a hang.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.deadline import in_thread
from posttrain.rewards.answers import Answer, no_gold, scored
from posttrain.rewards.functions import FunctionSpec, RewardError
from posttrain.rewards.isolation import WorkerPool
from posttrain.rewards.numeric import boxed_content, comparable, parse_number, stated_answer
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.trajectory import Episode

SYMBOLIC = FunctionSpec("posttrain.rewards.symbolic:equal")
_MAX_CHARACTERS = 1000  # of an answer: longer ones are no answers but work for the comparison


def answer_of(episode: Episode) -> Answer:
    """What is compared; see `numeric.stated_answer`."""
    return stated_answer(episode)


def golds_of(task: Task) -> list[str]:
    r"""The accepted answers; of a whole solution, what is boxed last."""
    return [text for gold in task.ground_truth if (text := (boxed_content(gold).text or gold).strip())]


@dataclass(frozen=True, slots=True)
class Maths:
    """1 when the answer means the same as an accepted one, else 0. `prediction` is the answer in a comparable form."""

    pool: WorkerPool
    seconds: float
    name: str = "math"

    @classmethod
    def start(cls, *, seconds: float, workers: int) -> Maths:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError("reward math compares with math-verify: pip install 'posttrain[maths]'")
        return cls(WorkerPool(SYMBOLIC, size=workers), seconds)

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        if not golds_of(task):
            return [no_gold(task)] * len(episodes)
        answers = [answer_of(episode) for episode in episodes]
        first = {  # a group often gives one answer many times
            answer.text: (episode, answer)
            for episode, answer in zip(episodes, answers, strict=True)
            if answer.problem is None
        }
        judged = await asyncio.gather(*(self._judge(episode, answer, task) for episode, answer in first.values()))
        known = dict(zip(first, judged, strict=True))
        return [self._outcome(answer, known) for answer in answers]

    def close(self) -> None:
        self.pool.close()

    def _outcome(self, answer: Answer, known: dict[str, Outcome]) -> Outcome:
        return known[answer.text] if answer.problem is None else scored(self.name, answer, 0.0, None)

    async def _judge(self, episode: Episode, answer: Answer, task: Task) -> Outcome:
        prediction = comparable(answer.text)
        golds = [comparable(gold) for gold in golds_of(task)]
        if prediction in golds:
            return scored(self.name, answer, 1.0, prediction)
        both_numbers = parse_number(answer.text) is not None and all(parse_number(g) is not None for g in golds)
        if both_numbers or len(answer.text) > _MAX_CHARACTERS:
            return scored(self.name, answer, 0.0, prediction[:_MAX_CHARACTERS])
        (found,) = await in_thread(lambda: self.pool.evaluate([episode], task, self.seconds))
        if isinstance(found, Invalid):
            return Invalid(found.reason, f"answer {answer.text[:200]!r}: {found.detail}")
        assert isinstance(found, Score)
        return scored(self.name, answer, found.value, prediction)
