"""What an episode answered: the content of the answer tag in the policy's last turn.

Only the policy's own text is read. Prompt, tool output and earlier turns may hold answer tags; they count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.task import Invalid, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode, Source

Problem = Literal["no_answer", "malformed_answer", "empty_answer"]
PROBLEMS: tuple[Problem, ...] = ("no_answer", "malformed_answer", "empty_answer")

_ANSWER_TAG = re.compile(r"</?answer>")


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` is '' when there is a `problem`."""

    text: str = ""
    problem: Problem | None = None


def tagged_answer(episode: Episode) -> Answer:
    """The text between `<answer>` and `</answer>`, stripped.

    Exactly one pair must stand outside thoughts in the policy's last turn: more than one, or one that is not closed, is
    malformed. So answers cannot be tried by the dozen.
    What an external agent gave as its answer is read instead, and is the answer as a whole when it holds no tags.
    """
    given = episode.answer
    text = outside_thoughts(episode.final_text if given is None else given)
    tags = list(_ANSWER_TAG.finditer(text))
    if not tags and given is not None and text.strip():
        return Answer(text.strip())
    if not tags:
        return Answer(problem="no_answer")
    if [tag[0] for tag in tags] != ["<answer>", "</answer>"]:
        return Answer(problem="malformed_answer")
    content = text[tags[0].end() : tags[1].start()].strip()
    return Answer(content) if content else Answer(problem="empty_answer")


def scored(name: str, answer: Answer, value: float, prediction: str | None) -> Score:
    """A Score with the value under `name` and one 0/1 component per problem, so that their means are rates."""
    flags = {problem: float(answer.problem == problem) for problem in PROBLEMS}
    return Score(value, {name: value, **flags}, prediction)


def best_over_answers(
    name: str,
    episode: Episode,
    task: Task,
    *,
    normalize: Callable[[str], str],
    compare: Callable[[str, str], float],
) -> Score | Invalid:
    """The best `compare(prediction, gold)` over the accepted answers, both normalised; 0 without a usable answer.

    Invalid when the task has no accepted answer left: one that normalises to nothing would match everything.
    """
    golds = [gold for gold in map(normalize, task.ground_truth) if gold]
    if not golds:
        return no_gold(task)
    answer = tagged_answer(episode)
    prediction = normalize(answer.text)
    if answer.problem is None and not prediction:
        answer = Answer(problem="empty_answer")
    if answer.problem is not None:
        return scored(name, answer, 0.0, None)
    return scored(name, answer, max(compare(prediction, gold) for gold in golds), prediction)


def no_gold(task: Task) -> Invalid:
    shown = ", ".join(repr(gold) for gold in task.ground_truth) or "none"
    return Invalid(
        "bad_ground_truth", f"task {task.id!r} has no accepted answer that can be compared (it has: {shown})"
    )


def turns_with_replies(episode: Episode) -> Iterator[tuple[str, str]]:
    """Each policy turn with the environment's text between it and the next turn ('' when there is none)."""
    turn: str | None = None
    reply = ""
    for segment in episode.segments:
        if segment.source is Source.POLICY:
            if turn is not None:
                yield turn, reply
            turn, reply = segment.text, ""
        elif segment.source in (Source.ENV, Source.TEMPLATE):
            reply += segment.text
    if turn is not None:
        yield turn, reply
