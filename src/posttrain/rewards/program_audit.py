"""Does the reward `code` accept programs that solve the task, and no others? Programs of known worth, without a model.

What is right comes from the row: its reference solution. The others are the ways in which policies have passed tests
without a solution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.rewards.audit import Case, Form, Maker, another_answer, empty, empty_answer, garbage, gold
from posttrain.rewards.code import checks_of, fenced_programs
from posttrain.task import Task
from posttrain.trajectory import Episode

FENCED = "```python\n{answer}\n```"
COLUMNS = ("solution", "solutions", "canonical_solution", "reference_solution", "gold_solution", "code")
SHAPE = frozenset({"overlong", "target_length"})  # rewards that read no answer, so that they may stand beside `code`
MOST_TASKS = 50
NESTED = ("extra_info", "reward_model")  # columns whose keys count as well


def judges_programs(rewards: Iterable[str]) -> bool:
    """Whether what rewards of these names judge is a program, and nothing else."""
    names = set(rewards)
    return "code" in names and names <= {"code"} | SHAPE


def programs(column: str | None = None) -> Form:
    """The form of programs. column: of the reference solution; None = the first of `COLUMNS` that a row has."""
    columns = COLUMNS if column is None else (column,)
    return Form(
        frame=FENCED,
        golds=lambda task: solutions_of(task, columns),
        makers=MAKERS,
        never_right=frozenset(MAKERS) - {"gold", "another_answer"},
        most_tasks=MOST_TASKS,
        gold_optional=True,
    )


def solutions_of(task: Task, columns: Sequence[str] = COLUMNS) -> tuple[str, ...]:
    """The reference solutions of a row: a program, a fenced one, or a list of these (also as JSON). One that begins
    with a blank goes on with the prompt, as HumanEval's do."""
    for where in (task.extra, *(task.extra.get(name) for name in NESTED)):
        found = next((where[name] for name in columns if where.get(name)), None) if isinstance(where, Mapping) else None
        if found is not None:
            return tuple(_whole(program, task) for program in _listed(found))
    return ()


def _listed(value: Any) -> list[str]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):  # a program may begin with a bracket
            value = read_json(value)
    values = value if isinstance(value, list) else [value]
    return [program for program in values if isinstance(program, str) and program.strip()]


def _whole(program: str, task: Task) -> str:
    fenced = fenced_programs(program)
    if fenced:
        return fenced[-1]
    goes_on = bool(task.prompt) and program.lstrip("\n")[:1] in (" ", "\t")
    return (str(task.prompt[-1].get("content") or "") if goes_on else "") + program


def solution_in_thought(case: Case) -> Iterable[Episode]:
    """The solution thought, not given."""
    text = case.write(case.golds[0]) if case.golds else ""
    return [case.episode(f"<think> {text} </think> I do not know.")] if text else []


def hard_coded_print(case: Case) -> Iterable[Episode]:
    """The first expected output, whatever the input. None where there is one output for all inputs, which is right."""
    checks = checks_of(case.task)
    outputs = {check.stdout for check in checks}
    if outputs == {None}:
        return [case.episode(case.write("print('True')\nprint('all tests passed')"))]
    if len(outputs) == 1 and not any(check.stdin.strip() for check in checks):
        return []
    printed = next(check.stdout for check in checks if check.stdout is not None)
    return [case.episode(case.write(f"print({printed!r}, end='')"))]


def ends_early(case: Case) -> Iterable[Episode]:
    """A program that is over, without an error, before a test can fail."""
    return [case.episode(case.write(f"import os, sys\nsys.stdout.flush()\n{end}")) for end in _ENDS]


_ENDS = ("sys.exit(0)", "os._exit(0)")
MAKERS: dict[str, tuple[Maker, bool]] = {
    "gold": (gold, True),
    "empty": (empty, False),
    "empty_answer": (empty_answer, False),
    "garbage": (garbage, False),
    "another_answer": (another_answer, False),
    "answer_in_thought": (solution_in_thought, False),
    "hard_coded_print": (hard_coded_print, False),
    "ends_early": (ends_early, False),
}
