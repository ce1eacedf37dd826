"""Unique, lasting task ids."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from posttrain.data.problems import Problem
from posttrain.task import Task


def content_digest(task: Task) -> str:
    """12 hex digits of prompt and ground truth."""
    content = json.dumps([task.prompt, task.ground_truth], ensure_ascii=False, sort_keys=True, default=str)
    return digest_of(content, 6)


def digest_of(text: str, size: int) -> str:
    """Hex digest of `size` bytes; the same on every machine and Python."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def content_ids(tasks: Iterable[Task]) -> list[str]:
    """Ids made from what is asked. They survive rows being added, removed or reordered, which row numbers would not.

    Rows that ask the same and expect the same get -2, -3.
    """
    seen: Counter[str] = Counter()
    ids: list[str] = []
    for task in tasks:
        digest = content_digest(task)
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def bad_ids(ids: Sequence[str], places: Sequence[str], column: str) -> dict[int, Problem]:
    """Index -> what is wrong with the id there: missing, or already taken by an earlier row."""
    first: dict[str, str] = {}
    problems: dict[int, Problem] = {}
    for index, (task_id, where) in enumerate(zip(ids, places, strict=True)):
        seen = "is missing or null" if not task_id else ""
        if task_id in first:
            seen = f"{task_id!r} is also the id of {first[task_id]}"
        first.setdefault(task_id, where)
        if seen:
            fix = "ids must be unique; correct it, or drop `columns.id` to have ids made from the content"
            problems[index] = Problem(where=where, column=column, kind="bad id", seen=seen, fix=fix)
    return problems
