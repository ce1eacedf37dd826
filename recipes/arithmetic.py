"""Arithmetic expressions: make a number from given ones, each used once; a wrong one may be corrected.

    Make 15 from 3, 5.   ->   <answer>3 + 5</answer>   That makes 8.   <answer>3 * 5</answer>

The env of arithmetic.yaml: tasks, the world that answers, and a reward that reads what was written and runs none of it.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from posttrain.envs import Action, Observation, Step
from posttrain.rewards.answers import tagged_answer
from posttrain.task import Score, Task
from posttrain.trajectory import CallStatus, Episode, StopReason, ToolCall

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS = ("+", "-", "*")
ALLOWED = re.compile(r"[0-9\s+\-*/()]{1,100}")  # as long as an answer may be
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
EVAL_SHARE = 4  # one of so many tasks is kept for evaluation


class WrongExpression(ValueError):
    """What was written is no expression of the given numbers; the text is for the policy."""


def evaluate(text: str, numbers: list[int]) -> Fraction:
    """The value of an expression that uses each of the numbers once: whole numbers, + - * / and parentheses."""
    if not ALLOWED.fullmatch(text):
        raise WrongExpression("an expression has digits, + - * / and parentheses only")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value, used = _value(tree), [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    except (SyntaxError, RecursionError, MemoryError):
        raise WrongExpression("this is no expression") from None
    except ZeroDivisionError:
        raise WrongExpression("this divides by 0") from None
    if sorted(map(str, used)) != sorted(map(str, numbers)):
        raise WrongExpression("each number must be used once")
    return value


def _value(node: ast.expr) -> Fraction:
    """Nothing is run: a tree of sums and products is added up, in exact fractions."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise WrongExpression("only + - * / are known")


class Arithmetic:
    """Says what an expression makes, until it is right or the tries are used up."""

    stop_strings: tuple[str, ...] = ("</answer>",)

    def __init__(self, *, tries: int = 3) -> None:
        self.max_turns = tries
        self._task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        self._task = task
        return Observation()

    async def step(self, action: Action) -> Step:
        assert self._task is not None
        found = ANSWER.search(action.text)
        said = found[1].strip() if found else ""
        call = {"name": "answer", "arguments": {"expression": said}}
        try:
            value = evaluate(said, self._task.extra["numbers"])
        except WrongExpression as error:
            record = ToolCall(**call, status=CallStatus.MALFORMED, detail=str(error))
            return Step(observation=_told(f"No: {error}.", action), calls=(record,))
        record = ToolCall(**call, status=CallStatus.OK, detail=str(value))
        if value == self._task.extra["target"]:
            return Step(done=True, calls=(record,))
        return Step(observation=_told(f"That makes {value}.", action), calls=(record,))

    async def close(self) -> None: ...


def _told(text: str, action: Action) -> Observation:
    """Goes on inside the policy's turn, or as a user's message where the policy has closed it."""
    if action.stop_reason is StopReason.STOP_ID:
        return Observation(messages=({"role": "user", "content": text},))
    return Observation(text=f"\n{text}\n")


def reward(episode: Episode, task: Task, price: float = 0.25) -> Score:
    """1 for the target, less `price` for each earlier try; 0.1 for another expression of the right numbers; else 0."""
    said = tagged_answer(episode).text
    try:
        value = evaluate(said, task.extra["numbers"])
    except WrongExpression:
        return Score(0.0, {"right": 0.0, "valid": 0.0})
    right, tries = value == task.extra["target"], len(episode.policy_texts)
    worth = max(1.0 - price * (tries - 1), 0.1) if right else 0.1
    return Score(worth, {"right": float(right), "valid": 1.0}, prediction=str(value))


def rows(split: str = "train", *, seed: int = 0, count: int = 256, numbers: int = 2) -> list[dict[str, Any]]:
    """`count` tasks; the same numbers and target never stand in both splits."""
    made: dict[str, dict[str, Any]] = {}
    last = 0  # expression that made a new task: two numbers make some hundreds of tasks, however many are asked for
    for number, (given, written, target) in enumerate(_expressions(seed, numbers)):
        question = f"Make {target} from {', '.join(map(str, given))}."
        mine = (random.Random(question).randrange(EVAL_SHARE) == 0) == (split == "eval")
        if mine and question not in made:
            made[question] = {"question": question, "numbers": given, "target": target, "answer": written}
            last = number
        if len(made) == count or number - last > 100 * (1 + len(made)):
            break
    return [{"id": row["question"], **row} for row in made.values()]


def _expressions(seed: int, numbers: int) -> Iterator[tuple[list[int], str, int]]:
    """Numbers, an expression of them, and what it makes."""
    rng = random.Random(f"arithmetic/{seed}/{numbers}")
    while True:
        given = [rng.randint(1, 9) for _ in range(numbers)]
        written = str(given[0])
        for number in given[1:]:
            written = f"({written})" if written.isdigit() is False else written
            written += f" {rng.choice(SIGNS)} {number}"
        value = evaluate(written, given)
        if value > 0:
            yield given, written, int(value)
