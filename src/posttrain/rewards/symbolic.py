r"""Whether two mathematical answers mean the same, by math-verify. Runs in a worker process that can be killed:
`9^{9^{9^9}}` is a valid answer, and no thread or signal ends its evaluation.
"""

from __future__ import annotations

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from posttrain.rewards.maths import answer_of, golds_of
from posttrain.task import Task
from posttrain.trajectory import Episode

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns at each call that its own timers are off
_LATEX = (LatexExtractionConfig(), ExprExtractionConfig())
_ASSIGNED = re.compile(r"^\s*[A-Za-z](?:_\w+)?\s*=\s*(?=\S)")


def equal(episode: Episode, task: Task) -> float:
    """1 when the episode's answer means the same as an accepted one, else 0. See `maths.Maths`, its only caller."""
    answer = answer_of(episode).text
    return float(any(means_the_same(gold, answer) for gold in golds_of(task)))


def means_the_same(gold: str, answer: str) -> bool:
    """Compares values, sets, intervals, tuples, equations; `x = 5` equals 5. The process is the only time limit."""
    return any(
        verify(_parsed(gold), _parsed(variant), timeout_seconds=None, raise_on_error=False)
        for variant in dict.fromkeys((answer, _ASSIGNED.sub("", answer)))
    )


def _parsed(text: str) -> list:
    bare = text.strip().strip("$")
    return parse(f"${bare}$", extraction_config=_LATEX, parsing_timeout=None)  # type: ignore[arg-type]
