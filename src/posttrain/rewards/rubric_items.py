"""Rubrics: weighted statements about a good (with a negative weight: a bad) answer, read from the field's shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.task import Task

IMPORTANCE = {"Answer Critical": 1.0, "Valuable": 0.5, "Context": 0.25}  # of the unweighted shapes


class RubricError(ValueError):
    """A value that holds no rubrics."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """One item. weight < 0: true of bad answers. kind: "persistent" came with the data, "adaptive" was made here."""

    description: str
    weight: float = 1.0
    title: str = ""
    kind: str = "persistent"

    @property
    def key(self) -> str:
        """The same wherever the same words stand."""
        return hashlib.sha256(f"{self.description}||{self.title}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RubricSet:
    """The items of one question."""

    question: str
    items: tuple[Rubric, ...]


def rubrics_of_task(task: Task) -> RubricSet:
    """From the accepted answer (JSON text, `ground_truth_format: opaque`), else from a column `rubrics` or `rubric`."""
    given: list[Any] = [*task.ground_truth[:1], *(task.extra[c] for c in ("rubrics", "rubric") if c in task.extra)]
    problems = []
    for value in given:
        try:
            return rubrics_of(value)
        except RubricError as error:
            problems.append(str(error))
    raise RubricError("; ".join(problems) or "there is no ground truth and no column rubrics")


def rubrics_of(value: Any) -> RubricSet:
    """Items of any of these shapes, as JSON text or value. Raises RubricError.

    DR-Tulu's `{"query", "rubrics": [{"description", "weight", "title"?}], "rubrics_types"?}` and its older
    `{"Question", "Answer Critical": [{"Ingredient"}], "Valuable": ...}` and `{"rubric": [{"type", "rubric_item"}]}`;
    ScholarQA's `{"question", "other_properties": [{"criterion", "weight"}]}` (also inside metric_config);
    DeepResearch Bench's `{"prompt", "dimension_weight", "criterions"}`; a bare list of items.
    """
    value = _decoded(value)
    if isinstance(value, list):
        value = {"rubrics": value}
    if not isinstance(value, Mapping):
        raise RubricError(f"rubrics are a JSON object or list, got {value!r:.100}")
    if "metric_config" in value:
        value = value["metric_config"].get("config", {})
    question = next((str(value[k]) for k in ("query", "question", "Question", "prompt") if value.get(k)), "")
    items = _items(value)
    if not items:
        raise RubricError(f"no rubric items under the keys {sorted(map(str, value))}")
    if not any(item.weight for item in items):
        raise RubricError("the weights of all rubric items are 0")
    return RubricSet(question, tuple(items))


def _items(value: Mapping[str, Any]) -> list[Rubric]:
    if "criterions" in value:
        weights = value.get("dimension_weight", {})
        return [
            _item(entry, scale=float(weights.get(dimension, 1.0)), title=dimension)
            for dimension, entries in value["criterions"].items()
            for entry in entries
        ]
    if any(kind in value for kind in IMPORTANCE):
        return [_item(entry, scale=weight) for kind, weight in IMPORTANCE.items() for entry in value.get(kind) or ()]
    entries = next((value[k] for k in ("rubrics", "other_properties", "rubric") if value.get(k)), [])
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise RubricError(f"rubric items are a list, got {entries!r:.100}")
    kinds = value.get("rubrics_types") or ["persistent"] * len(entries)
    if len(kinds) != len(entries):
        raise RubricError(f"{len(kinds)} rubrics_types for {len(entries)} rubrics")
    return [_item(entry, kind=str(kind)) for entry, kind in zip(entries, kinds, strict=True)]


def _item(entry: Any, *, scale: float = 1.0, title: str = "", kind: str = "persistent") -> Rubric:
    if isinstance(entry, str):
        entry = {"description": entry}
    if not isinstance(entry, Mapping):
        raise RubricError(f"a rubric item is text or an object, got {entry!r:.100}")
    names = ("description", "criterion", "Ingredient", "rubric_item", "criteria_description")
    text = next((str(entry[name]).strip() for name in names if entry.get(name)), "")
    if not text:
        raise RubricError(f"a rubric item without a description: {entry!r:.200}")
    if explanation := entry.get("explanation"):
        text = f"{text}: {explanation}"
    weight = entry.get("weight", IMPORTANCE.get(str(entry.get("type", "")), 1.0))
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RubricError(f"a rubric's weight is a number, got {weight!r}")
    return Rubric(text, scale * float(weight), str(entry.get("title") or entry.get("name") or title), kind)


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise RubricError(f"rubrics must be JSON: {error}: {value[:100]!r}") from error


def rubric_value(judged: Mapping[Rubric, float], min_total_weight: float = 0.0) -> float:
    """sum of weight * share / sum of positive weights: 1 when all good items hold and no bad one.

    judged: item -> how far it holds, 0..1. min_total_weight: the divisor is at least this (DR-Tulu's is 1.0, so weights
    that sum to 0.6 reach 0.6). With bad items only: 0 when none holds, down to -1.
    """
    positive = math.fsum(item.weight for item in judged if item.weight > 0)
    total = positive or math.fsum(-item.weight for item in judged)
    total = max(total, min_total_weight)
    return math.fsum(item.weight * share for item, share in judged.items()) / total if total else 0.0
