"""The `data` section of a run: which files, which rows of them, and how a row becomes a task."""

from __future__ import annotations

import string
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from posttrain.location import is_location

Scalar = str | int | float | bool
GLOB_CHARACTERS = frozenset("*?[")


class Columns(BaseModel):
    """Which column holds what; a dotted name reaches into nested values (`reward_model.ground_truth`).

    A name left out is looked for among the usual ones (`posttrain.data.fields.USUAL_COLUMNS`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | None = None  # text, or a list of chat messages; not needed with a prompt_template
    ground_truth: str | tuple[str, ...] | None = None  # several columns: the answers of all of them are accepted
    id: str | None = None  # unique in the source; without one, ids are made from the row's content
    source: str | None = None  # what results are grouped by, and what verl routes its rewards by
    env: str | None = None
    reward: str | None = None


def _one_as_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SourceConfig(BaseModel):
    """One part of the data: files of one shape. A bare path stands for `{path: ...}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[tuple[str, ...], BeforeValidator(_one_as_many), Field(min_length=1)]
    # files, globs, or the location of a function that returns rows ("pkg.mod:function", "path.py:function")
    options: dict[str, Any] = {}  # keyword arguments of such a function
    name: str = ""  # default: the file's name without extensions; with a glob, its folder's name
    weight: float | None = Field(
        default=None, gt=0, allow_inf_nan=False
    )  # share of the tasks drawn; all sources or none
    where: dict[str, Scalar | tuple[Scalar, ...]] = {}  # keep rows whose column equals this (or one of these)
    limit: int | None = Field(default=None, ge=1)  # keep the first rows that `where` lets through
    columns: Columns = Columns()
    prompt_template: str | None = None  # e.g. "Question: {question}\n": one user message, made from columns
    system_prompt: str | None = None
    ground_truth_format: Literal["answers", "json_answers", "opaque"] = "answers"
    # answers: text, number, list of these or {"target": ...}; json_answers: JSON text of one of these;
    # opaque: any value, kept as one string (rubrics)
    ground_truth_required: bool = True  # false: a row may lack it, the env scores by itself
    answer_after: str | None = Field(default=None, min_length=1)  # keep what follows the last of these, e.g. "####"
    bool_answers: tuple[str, str] | None = None  # what true and false stand for, e.g. [yes, no]
    env: str | None = None
    reward: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("prompt_template")
    @classmethod
    def _template_names_columns(cls, template: str | None) -> str | None:
        if template is not None and not template_columns(template):
            raise ValueError(f"prompt_template {template!r} names no column, so that every prompt would be the same")
        return template

    @model_validator(mode="after")
    def _options_have_a_function(self) -> SourceConfig:
        if self.options and not any(is_location(path) for path in self.path):
            raise ValueError(f"options are arguments of a function, but path {list(self.path)} names files only")
        return self

    @property
    def default_name(self) -> str:
        if is_location(self.path[0]):
            return self.path[0].rpartition(":")[2]
        first = PurePath(self.path[0])
        globbed = next((i for i, part in enumerate(first.parts) if GLOB_CHARACTERS & set(part)), None)
        if globbed is not None:
            folders = [part for part in first.parts[:globbed] if part not in ("/", "..", ".")]
            return folders[-1] if folders else "data"
        return first.name.split(".")[0] or first.name


def _sources(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_sources)]


class CurriculumConfig(BaseModel):
    """Tasks that taught nothing rest for a while: the mean score of their group was at or beyond an end of the range.

    Their turn comes again, since what is too hard now may not stay so. low, high: scores, as the reward gives them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: float | None = 0.0  # a mean of this or less: too hard just now; null: hard tasks never rest
    high: float | None = 1.0  # a mean of this or more: too easy; null: easy tasks never rest
    rest_epochs: int = Field(default=2, ge=1)  # passes over the source that such a task sits out

    @model_validator(mode="after")
    def _has_a_range(self) -> CurriculumConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if self.low is None and self.high is None:
            raise ValueError("without low and high no task would ever rest; leave `curriculum` out")
        return self

    def teaches(self, mean: float) -> bool:
        """Whether a group with this mean score lies inside the range."""
        return (self.low is None or mean > self.low) and (self.high is None or mean < self.high)


class DataConfig(BaseModel):
    """Training and evaluation tasks. The short form is `train: path/to/file`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: Sources = ()
    eval: Sources = ()
    max_prompt_tokens: int | None = Field(
        default=None, ge=1
    )  # counted on the very ids that will be sent; None = no limit
    overlong: Literal["error", "drop"] = "error"  # what becomes of tasks over that limit
    invalid: Literal["error", "drop"] = "error"  # what becomes of rows that cannot be used
    changed: Literal["error", "continue"] = "error"  # on resume, when rows were added, removed or edited
    shuffle: bool = True
    curriculum: CurriculumConfig | None = None  # training tasks rest by their accept rate
    seed: int | None = None  # of the order of tasks; None = the seed of the run

    @model_validator(mode="after")
    def _check_sources(self) -> DataConfig:
        for part, sources in (("train", self.train), ("eval", self.eval)):
            weighted = sum(source.weight is not None for source in sources)
            if weighted not in (0, len(sources)):
                raise ValueError(
                    f"data.{part}: {weighted} of {len(sources)} sources have a weight; give it to all or none"
                )
            source_names(sources, part)
        return self


def source_names(sources: tuple[SourceConfig, ...], part: str) -> tuple[str, ...]:
    """One distinct name per source; task ids begin with it. Raises ValueError when two sources share one."""
    names = tuple(source.name or source.default_name for source in sources)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"data.{part}: {names.count(name)} sources are named '{name}'; give each its own `name`")
    return names


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a prompt template names. Raises ValueError on a malformed template."""
    names: list[str] = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt_template {template!r}: {error}; write {{{{ and }}}} for literal braces") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion:
            raise ValueError(f"prompt_template {template!r}: write {{column}}, without format specification")
        names.append(name)
    return tuple(names)
