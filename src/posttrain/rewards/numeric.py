r"""Final numbers: `#### 12` (GSM8K) and `\boxed{12}` (MATH), compared as numbers. Nothing is ever evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards.answers import Answer, no_gold, scored, tagged_answer
from posttrain.task import Invalid, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{?(\d+)\}?\{?(\d+)\}?|([+-]?)(\d+)/(\d+)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_DECORATION = re.compile(r"\\left|\\right|\\[,;:! ]|\\text\{\s*\}|\\\$|\\%|[$€£%\s]")
_STATED = re.compile(r"(?:[Aa]nswer\s*\**\s*:|####)([^\n]*)")
_ANY_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MAX_CHARACTERS = 200  # of a number: longer ones are no answers but attacks on the comparison


def gsm8k(episode: Episode, task: Task, *, mark: str = "####", last_number: bool = False) -> Score | Invalid:
    """1 when the number behind the last `mark` of the policy's last turn equals an accepted answer, else 0.

    The number is the rest of the line or its first word. Currency signs, thousands separators, a trailing full stop and
    white space do not matter; `-5.0` equals `-5`. last_number: where the mark is missing, the last number of the turn
    counts (open-instruct's rule; a text that ends in any number then has an answer).
    """
    golds = [number for gold in task.ground_truth if (number := parse_number(gold.rpartition(mark)[2])) is not None]
    if not golds:
        return no_gold(task)
    text = outside_thoughts(episode.final_text)
    _, found, tail = text.rpartition(mark)
    if not found and last_number:
        tail = final_number(text) or ""
        found = tail
    if not found:
        return scored("gsm8k", Answer(problem="no_answer"), 0.0, None)
    if not tail.strip():
        return scored("gsm8k", Answer(problem="empty_answer"), 0.0, None)
    number = leading_number(tail)
    if number is None:
        return scored("gsm8k", Answer(problem="malformed_answer"), 0.0, None)
    return scored("gsm8k", Answer(tail), float(number in golds), str(number))


def number(episode: Episode, task: Task) -> Score | Invalid:
    r"""1 when the final number equals an accepted answer by value (AIME, AMC: 25, "025" and 25.0 are one), else 0.

    The number stands, in this order, in the last `\boxed{}`, in one `<answer>` tag, behind the last `Answer:`, behind
    the last `####`.
    """
    golds = [value for gold in task.ground_truth if (value := parse_number(boxed_content(gold).text or gold))]
    golds += [Fraction(0)] if any(parse_number(gold) == 0 for gold in task.ground_truth) else []
    if not golds:
        return no_gold(task)
    answer = stated_answer(episode)
    if answer.problem is not None:
        return scored("number", answer, 0.0, None)
    value = leading_number(answer.text)
    if value is None:
        return scored("number", Answer(problem="malformed_answer"), 0.0, None)
    return scored("number", answer, float(value in golds), str(value))


def stated_answer(episode: Episode) -> Answer:
    r"""What the policy's last turn states as its answer: `\boxed{}`, one `<answer>` tag, `Answer: ...`, `#### ...`."""
    text = outside_thoughts(episode.final_text)
    box = boxed_content(text)
    if box.problem != "no_answer":
        return box
    tagged = tagged_answer(episode)
    if tagged.problem != "no_answer":
        return tagged
    found = _STATED.findall(text)
    if not found:
        return Answer(problem="no_answer")
    content = found[-1].strip().strip("*$ ")
    return Answer(content) if content else Answer(problem="empty_answer")


def leading_number(text: str) -> Fraction | None:
    """The number that the first line is or begins with."""
    lines = text.strip().splitlines()
    line = lines[0].strip("*$ ") if lines else ""
    value = parse_number(line)
    return parse_number(line.split()[0]) if value is None and line else value


def final_number(text: str) -> str | None:
    """The last number in a text, as it is written."""
    found = _ANY_NUMBER.findall(text)
    return found[-1] if found else None


def boxed(episode: Episode, task: Task) -> Score | Invalid:
    r"""1 when the content of the last `\boxed{...}` of the policy's last turn equals an accepted answer, else 0.

    Numbers and fractions are compared by value; anything else as LaTeX text without spacing and size commands. A box
    that is not closed is malformed.
    """
    golds = [key for gold in task.ground_truth if (key := comparable(boxed_content(gold).text or gold))]
    if not golds:
        return no_gold(task)
    answer = boxed_content(outside_thoughts(episode.final_text))
    if answer.problem is not None:
        return scored("boxed", answer, 0.0, None)
    prediction = comparable(answer.text)
    return scored("boxed", answer, float(prediction in golds), prediction)


def parse_number(text: str) -> Fraction | None:
    r"""A number with optional sign, thousands separators, currency or percent sign, or a fraction; else None.

    `$1,000` -> 1000, `-5.0` -> -5, `\frac{1}{2}` -> 1/2, `50\%` -> 50, `1,00` -> None.
    """
    if len(text.strip()) > _MAX_CHARACTERS:
        return None
    bare = _DECORATION.sub("", text.replace("−", "-").replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    bare = _WRAPPED.sub(r"\1", bare).removesuffix(".")
    if fraction := _FRACTION.fullmatch(bare):
        sign = fraction[1] or fraction[4] or ""
        top, bottom = fraction[2] or fraction[5], fraction[3] or fraction[6]
        return Fraction(int(sign + top), int(bottom)) if int(bottom) else None
    if not any(char.isdigit() for char in bare) or not bare.isascii() or not _NUMBER.fullmatch(bare):
        return None
    return Fraction(bare.replace(",", ""))


def boxed_content(text: str) -> Answer:
    r"""What stands between the braces of the last `\boxed`."""
    _, mark, tail = text.rpartition(r"\boxed{")
    if not mark:
        return Answer(problem="no_answer")
    depth = 1
    for position, char in enumerate(tail):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            content = tail[:position].strip()
            return Answer(content) if content else Answer(problem="empty_answer")
    return Answer(problem="malformed_answer")


def comparable(text: str) -> str:
    number = parse_number(text)
    if number is not None:
        return str(number)
    plain = _WRAPPED.sub(r"\1", text).replace(r"\dfrac", r"\frac")
    return _DECORATION.sub("", plain).removesuffix(".")
