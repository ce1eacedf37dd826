r"""Final numbers: `#### 12` (GSM8K) and `\boxed{12}` (MATH), compared as numbers. Nothing is ever evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards.answers import Answer, no_gold, outside_thoughts, scored
from posttrain.task import Invalid, Score, Task
from posttrain.trajectory import Episode

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{?(\d+)\}?\{?(\d+)\}?|([+-]?)(\d+)/(\d+)")
_DECORATION = re.compile(r"\\left|\\right|\\[,;:! ]|\\text\{\s*\}|\\\$|\\%|[$€£%\s]")
_MAX_CHARACTERS = 200  # of a number: longer ones are no answers but attacks on the comparison


def gsm8k(episode: Episode, task: Task) -> Score | Invalid:
    """1 when the number behind the last `####` of the policy's last turn equals an accepted answer, else 0.

    The number is the rest of the line or its first word. Currency signs, thousands separators, a trailing full stop and
    white space do not matter; `-5.0` equals `-5`.
    """
    golds = [number for gold in task.ground_truth if (number := parse_number(gold.rpartition("####")[2])) is not None]
    if not golds:
        return no_gold(task)
    _, mark, tail = outside_thoughts(episode.final_text).rpartition("####")
    if not mark:
        return scored("gsm8k", Answer(problem="no_answer"), 0.0, None)
    if not tail.strip():
        return scored("gsm8k", Answer(problem="empty_answer"), 0.0, None)
    line = tail.strip().splitlines()[0].strip("* ")
    number = parse_number(line)
    if number is None and line:
        number = parse_number(line.split()[0])
    if number is None:
        return scored("gsm8k", Answer(problem="malformed_answer"), 0.0, None)
    return scored("gsm8k", Answer(tail), float(number in golds), str(number))


def boxed(episode: Episode, task: Task) -> Score | Invalid:
    r"""1 when the content of the last `\boxed{...}` of the policy's last turn equals an accepted answer, else 0.

    Numbers and fractions are compared by value; anything else as LaTeX text without spacing and size commands. A box
    that is not closed is malformed.
    """
    golds = [key for gold in task.ground_truth if (key := _comparable(_content(gold).text or gold))]
    if not golds:
        return no_gold(task)
    answer = _content(outside_thoughts(episode.final_text))
    if answer.problem is not None:
        return scored("boxed", answer, 0.0, None)
    prediction = _comparable(answer.text)
    return scored("boxed", answer, float(prediction in golds), prediction)


def parse_number(text: str) -> Fraction | None:
    r"""A number with optional sign, thousands separators, currency or percent sign, or a fraction; else None.

    `$1,000` -> 1000, `-5.0` -> -5, `\frac{1}{2}` -> 1/2, `50\%` -> 50, `1,00` -> None.
    """
    if len(text.strip()) > _MAX_CHARACTERS:
        return None
    bare = _DECORATION.sub("", text.replace("−", "-").replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    bare = bare.removesuffix(".")
    if fraction := _FRACTION.fullmatch(bare):
        sign = fraction[1] or fraction[4] or ""
        top, bottom = fraction[2] or fraction[5], fraction[3] or fraction[6]
        return Fraction(int(sign + top), int(bottom)) if int(bottom) else None
    if not any(char.isdigit() for char in bare) or not bare.isascii() or not _NUMBER.fullmatch(bare):
        return None
    return Fraction(bare.replace(",", ""))


def _content(text: str) -> Answer:
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


def _comparable(text: str) -> str:
    number = parse_number(text)
    if number is not None:
        return str(number)
    plain = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", text).replace(r"\dfrac", r"\frac")
    return _DECORATION.sub("", plain).removesuffix(".")
