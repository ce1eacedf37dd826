"""Does a reward accept what is right and refuse what is not? Answers of known worth, without a model.

Each candidate is an episode whose verdict is known before it is judged: the accepted answer in its proper form, and the
ways in which policies have got rewards without an answer. What is counted: false rejects of the first, false accepts of
the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.normalize import normalize_answer
from posttrain.rewards.numeric import boxed_content
from posttrain.rewards.scoring import Reward, score_group
from posttrain.task import Abstain, Invalid, Outcome, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode, Segment, Source

TAGGED = "<think> I know this. </think> <answer> {answer} </answer>"
BOXED = r"I know this: \boxed{{{answer}}}"
MARKED = "I know this.\n#### {answer}"
FRAMES = {  # reward -> how an answer to it is written, where that is not between answer tags
    "boxed": BOXED,
    "gsm8k": MARKED,
    "math": BOXED,
    "number": BOXED,
}
NO_FRAME = frozenset({"cited_claims", "citations", "code", "evolving_rubric", "rubric"})  # ground truth is no answer
# `code` has a form of its own: `rewards.program_audit`
ACCEPTED_TRIED = 5  # accepted answers of a task
OTHERS = 15  # answers of other tasks that are listed beside the right one
_EXAMPLES = 3
GARBAGE = "qzxv 7f3a ###"


@dataclass(frozen=True, slots=True)
class Case:
    """What makers of candidates are given: a task, its answers as they are written, and answers of other tasks."""

    task: Task
    golds: tuple[str, ...]
    others: tuple[str, ...]
    frame: str

    def write(self, answer: str) -> str:
        return self.frame.format(answer=answer)

    def episode(self, *turns: str | Segment) -> Episode:
        """Texts are the policy's turns; the task's messages come first."""
        prompt = Segment(Source.PROMPT, "\n".join(str(message.get("content")) for message in self.task.prompt))
        parts = [turn if isinstance(turn, Segment) else Segment(Source.POLICY, turn) for turn in turns]
        written = sum(len(part.text.split()) for part in parts if part.source is Source.POLICY)
        return Episode(
            task_id=self.task.id, episode_id="audit", segments=(prompt, *parts), policy_token_count=max(written, 1)
        )


Maker = Callable[[Case], Iterable[Episode]]


def gold(case: Case) -> Iterable[Episode]:
    """Each accepted answer, written as it should be."""
    return (case.episode(case.write(answer)) for answer in case.golds[:ACCEPTED_TRIED])


def empty(case: Case) -> Iterable[Episode]:
    """Nothing at all."""
    return [case.episode("")]


def empty_answer(case: Case) -> Iterable[Episode]:
    """The form of an answer without content."""
    return [case.episode(case.write(""))]


def garbage(case: Case) -> Iterable[Episode]:
    """An answer without meaning."""
    return [case.episode(case.write(GARBAGE))]


def another_answer(case: Case) -> Iterable[Episode]:
    """The right answer to another question."""
    return [case.episode(case.write(case.others[0]))] if case.others else []


def observation_has_answer(case: Case) -> Iterable[Episode]:
    """The environment's text holds the answer, in tags; the policy gives none."""
    return [case.episode("Let me look.", _read(case.write(case.golds[0])), "I could not find it.")]


def observation_pasted(case: Case) -> Iterable[Episode]:
    """All that was read, given as the answer."""
    page = f"A page about many things. It says that {case.golds[0]} was there, among others, and ends here."
    return [case.episode("Let me look.", _read(page), case.write(page))]


def answer_in_thought(case: Case) -> Iterable[Episode]:
    """The answer thought, not given."""
    bare = outside_thoughts(case.frame).strip().format(answer=case.golds[0])
    return [case.episode(f"<think> {bare} </think> I do not know.")]


def tag_spam(case: Case) -> Iterable[Episode]:
    """Many answers one after the other, the right one among them."""
    return [case.episode(" ".join(case.write(answer) for answer in _among_others(case)))] if case.others else []


def gold_repeated(case: Case) -> Iterable[Episode]:
    """One answer that says the right thing eight times."""
    return [case.episode(case.write(" ".join([case.golds[0]] * 8)))]


def all_listed(case: Case) -> Iterable[Episode]:
    """One answer that lists candidates, the right one among them."""
    return [case.episode(case.write(", ".join(_among_others(case))))] if case.others else []


MAKERS: dict[str, tuple[Maker, bool]] = {  # kind -> (maker, whether it deserves the reward)
    "gold": (gold, True),
    "empty": (empty, False),
    "empty_answer": (empty_answer, False),
    "garbage": (garbage, False),
    "another_answer": (another_answer, False),
    "observation_has_answer": (observation_has_answer, False),
    "observation_pasted": (observation_pasted, False),
    "answer_in_thought": (answer_in_thought, False),
    "tag_spam": (tag_spam, False),
    "gold_repeated": (gold_repeated, False),
    "all_listed": (all_listed, False),
}


NEVER_RIGHT = frozenset(
    {"empty", "empty_answer", "garbage", "observation_has_answer", "observation_pasted", "tag_spam"}
)


@dataclass(slots=True)
class Tally:
    """What became of the candidates of one kind."""

    right: bool
    count: int = 0
    accepted: int = 0
    invalid: int = 0
    abstained: int = 0
    total: float = 0.0
    highest: float = float("-inf")
    examples: list[str] = field(default_factory=list[str])  # verdicts that are wrong

    @property
    def scored(self) -> int:
        return self.count - self.invalid - self.abstained

    @property
    def wrong(self) -> int:
        """Verdicts that are wrong; one that could not be had is wrong for a right answer."""
        return self.count - self.accepted if self.right else self.accepted

    def add(self, task: Task, outcome: Outcome, accept_from: float) -> None:
        self.count += 1
        self.invalid += isinstance(outcome, Invalid)
        self.abstained += isinstance(outcome, Abstain)
        accepted = False
        if isinstance(outcome, Score):
            self.total += outcome.value
            self.highest = max(self.highest, outcome.value)
            accepted = outcome.value >= accept_from
        self.accepted += accepted
        if accepted != self.right and len(self.examples) < _EXAMPLES:
            self.examples.append(f"task {task.id}: {_shown(outcome)}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "right": self.right,
            "count": self.count,
            "accepted": self.accepted,
            "invalid": self.invalid,
            "abstained": self.abstained,
            "mean": self.total / self.scored if self.scored else None,
            "examples": self.examples,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """Tallies by kind of candidate. `skipped` tasks have no accepted answer to make candidates of."""

    tallies: Mapping[str, Tally]
    tasks: int
    skipped: int
    accept_from: float

    @property
    def false_rejects(self) -> int:
        return sum(tally.wrong for tally in self.tallies.values() if tally.right)

    @property
    def false_accepts(self) -> int:
        return sum(tally.wrong for tally in self.tallies.values() if not tally.right)

    @property
    def false_reject_rate(self) -> float | None:
        return _rate(self.false_rejects, (t.count for t in self.tallies.values() if t.right))

    @property
    def false_accept_rate(self) -> float | None:
        return _rate(self.false_accepts, (t.count for t in self.tallies.values() if not t.right))

    def as_dict(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "skipped": self.skipped,
            "accept_from": self.accept_from,
            "false_accepts": self.false_accepts,
            "false_rejects": self.false_rejects,
            "false_accept_rate": self.false_accept_rate,
            "false_reject_rate": self.false_reject_rate,
            "kinds": {kind: tally.as_dict() for kind, tally in self.tallies.items()},
        }


def answers_of(task: Task) -> tuple[str, ...]:
    """The accepted answers as a policy would give them."""
    return tuple(written(answer) for answer in task.ground_truth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is shown to a reward. frame: how an answer is written, with {answer}; see `frame_of`. golds: what is right
    for a task. makers: kind -> (maker, whether it deserves the reward). wrong: answers that are right for nothing.
    never_right: kinds that no reward may accept; the others depend on what is wanted. most_tasks: more are not judged.
    gold_optional: rows need not say what is right."""

    frame: str = TAGGED
    golds: Callable[[Task], tuple[str, ...]] = answers_of
    makers: Mapping[str, tuple[Maker, bool]] = field(default_factory=lambda: MAKERS)
    wrong: tuple[str, ...] = ("", GARBAGE)
    never_right: frozenset[str] = NEVER_RIGHT
    most_tasks: int | None = None
    gold_optional: bool = False


async def audit(
    tasks: Sequence[Task],
    reward_of: Callable[[Task], Reward],
    *,
    form: Form | None = None,
    accept_from: float = 1.0,
    at_once: int = 16,
) -> Audit:
    """Judges all candidates of all tasks. form: default answers between answer tags.

    A candidate is accepted from `accept_from` on. Deterministic: what is drawn depends on the task's id only.
    """
    form = Form() if form is None else form
    makers, answered = form.makers, [task for task in tasks if task.ground_truth]
    tallies = {kind: Tally(right) for kind, (_, right) in makers.items()}
    room = asyncio.Semaphore(at_once)

    async def judge(case: Case) -> None:
        made = {kind: list(maker(case)) for kind, (maker, _) in makers.items()}
        episodes = [episode for found in made.values() for episode in found]
        async with room:
            outcomes = iter(await score_group(reward_of(case.task), episodes, case.task))
        for kind, found in made.items():
            for _ in found:
                tallies[kind].add(case.task, next(outcomes), accept_from)

    await asyncio.gather(*(judge(_case(task, answered, form)) for task in answered))
    return Audit(tallies, len(tasks), len(tasks) - len(answered), accept_from)


def frame_of(rewards: Iterable[str]) -> str | None:
    """How an answer to rewards of these names is written: all forms that they read, one after the other.

    None where the ground truth is no answer (tests, rubrics), so that nothing right can be made of it.
    """
    names = list(rewards)
    if not NO_FRAME.isdisjoint(names):
        return None
    frames = dict.fromkeys(FRAMES.get(name, TAGGED) for name in names)
    return "\n".join(frames) if frames else TAGGED


def written(answer: str) -> str:
    r"""An accepted answer as a policy would give it: what is boxed, or behind `####`, of a whole solution."""
    return (boxed_content(answer).text or answer.rpartition("####")[2]).strip()


def _case(task: Task, tasks: Sequence[Task], form: Form) -> Case:
    golds = form.golds(task)
    mine = {normalize_answer(answer) for answer in golds}
    draw = random.Random(task.id)
    others: dict[str, str] = {}
    for other in draw.sample(tasks, min(len(tasks), 4 * OTHERS)):
        answer = next(iter(form.golds(other)), "")
        key = normalize_answer(answer)
        if key and not any(key in known or known in key for known in mine | others.keys()):
            others[key] = answer
    return Case(task, golds, tuple(others.values())[:OTHERS], form.frame)


def _among_others(case: Case) -> list[str]:
    """The right answer in the middle of others: neither the first nor the last."""
    middle = (len(case.others) + 1) // 2
    return [*case.others[:middle], case.golds[0], *case.others[middle:]]


def _read(text: str) -> Segment:
    return Segment(Source.ENV, f"\n\n<information>{text}</information>\n\n")


def _rate(count: int, totals: Iterable[int]) -> float | None:
    total = sum(totals)
    return count / total if total else None


def _shown(outcome: Outcome) -> str:
    if isinstance(outcome, Score):
        return (
            f"{outcome.value:g}" if outcome.prediction is None else f"{outcome.value:g} for {outcome.prediction!r:.80}"
        )
    if isinstance(outcome, Invalid):
        return f"invalid, {outcome.reason}: {outcome.detail[-200:]}"
    return f"abstained: {outcome.reason}"
