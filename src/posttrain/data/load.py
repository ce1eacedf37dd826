"""Configured files -> a `TaskSet`.

Every row is checked before this returns, and nothing is dropped unless the config says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from posttrain.data.config import DataConfig, SourceConfig, source_names
from posttrain.data.draft import CheckAnswer, TaskMaker, find_columns
from posttrain.data.fields import MISSING, ends_in_reply, lookup, plain
from posttrain.data.ids import bad_ids, content_digest, content_ids
from posttrain.data.problems import DataError, FieldError, Problem, show, summarize
from posttrain.data.rows import Row, call_for_rows, find_files, read_rows
from posttrain.data.taskset import Overlong, SourceReport, TaskSet, TaskSource
from posttrain.location import is_location
from posttrain.task import Task

Measure = Callable[[Task], int]  # tokens of the prompt exactly as it will be sent, tool schemas included
CheckTask = Callable[[Task], None]
LISTED_OVERLONG = 5


def load_tasks(
    config: DataConfig,
    part: Literal["train", "eval"] = "train",
    *,
    measure: Measure | None = None,
    check_ground_truth: CheckAnswer | None = None,
    check_task: CheckTask | None = None,
    root: Path = Path(),
    limit_key: str = "data.max_prompt_tokens",
) -> TaskSet:
    """Reads, checks and measures all tasks of one part of the data.

    Relative paths are taken from `root`. `measure` is needed when `max_prompt_tokens` is set; `limit_key` names the
    setting it comes from. check_task: raises FieldError for a row that its env cannot play. Raises DataError when
    files or columns are missing, rows cannot be used (all of them are counted, the first of each kind shown), prompts
    are over the limit, or nothing is left; with `invalid: drop` and `overlong: drop` such rows are counted instead.
    """
    configs: tuple[SourceConfig, ...] = getattr(config, part)
    if not configs:
        raise DataError(f"data.{part} names no files; write e.g. data.{part}: path/to/file.parquet")
    loaded = [
        _load_source(_file_rows(source, root), source, name, check_ground_truth, check_task)
        for source, name in zip(configs, source_names(configs, part), strict=True)
    ]
    problems = [problem for source in loaded for problem in source.problems]
    if problems and config.invalid == "error":
        total = sum(source.rows_read for source in loaded)
        fix = f"correct them, or set data.invalid: drop to train without these {len(problems):,}"
        raise DataError(f"{len(problems):,} of {total:,} rows cannot be used; {fix}\n{summarize(problems)}", problems)
    if config.max_prompt_tokens is not None:
        if measure is None:
            raise TypeError("max_prompt_tokens is set: load_tasks needs `measure` to count prompt tokens")
        loaded = [_without_overlong(source, config.max_prompt_tokens, measure) for source in loaded]
        _judge_overlong(loaded, config, limit_key)
    return _task_set(loaded)


def tasks_from_rows(rows: Iterable[Mapping[str, Any]], source: SourceConfig) -> TaskSet:
    """The same checks for rows already in memory; `source.path` only names them. Raises DataError on any bad row."""
    numbered = _Rows(files=source.path, rows=(Row(f"row {i} (from 0)", dict(row)) for i, row in enumerate(rows)))
    loaded = _load_source(numbered, source, source.name or source.default_name, None)
    if loaded.problems:
        message = f"{len(loaded.problems):,} of {loaded.rows_read:,} rows cannot be used"
        raise DataError(f"{message}\n{summarize(loaded.problems)}", loaded.problems)
    return _task_set([loaded])


# --- one source ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    """Rows still to be read, and the unreadable ones met while reading."""

    files: tuple[str, ...]
    rows: Iterator[Row]
    problems: list[Problem] = field(default_factory=list[Problem])


@dataclass(slots=True, kw_only=True)
class _Loaded:
    """A source on its way to a TaskSource. `tasks` and `places` are aligned."""

    name: str
    files: tuple[str, ...]
    config: SourceConfig
    columns: dict[str, tuple[str, ...]]
    tasks: list[Task]
    places: list[str]
    problems: list[Problem]
    rows_read: int
    rows_filtered_out: int
    overlong: list[Overlong] = field(default_factory=list[Overlong])
    notes: list[str] = field(default_factory=list[str])


def _file_rows(source: SourceConfig, root: Path) -> _Rows:
    functions = [path for path in source.path if is_location(path)]
    files = find_files([path for path in source.path if path not in functions], root)
    found = _Rows(files=(*functions, *(str(file) for file in files)), rows=iter(()))
    made = (row for location in functions for row in call_for_rows(location, source.options))
    found.rows = chain(made, (row for file in files for row in read_rows(file, found.problems.append)))
    return found


def _load_source(
    found: _Rows,
    config: SourceConfig,
    name: str,
    check: CheckAnswer | None,
    check_task: CheckTask | None = None,
) -> _Loaded:
    rows, rows_read = _selected(found.rows, config, name)
    problems = found.problems  # filled while the rows were read
    if not rows and not problems:
        raise DataError(f"source '{name}' is empty: {', '.join(found.files)} has no rows")
    columns = find_columns([row.values for row in rows], config, name) if rows else {}
    maker = TaskMaker(name=name, config=config, columns=columns, check=check)
    drafts: list[Task] = []
    places: list[str] = []
    for row in rows:
        try:
            task = maker.make(row)
            if check_task is not None:
                check_task(task)
            drafts.append(task)
            places.append(row.where)
        except FieldError as error:
            problems.append(error.at(row.where))
    loaded = _Loaded(
        name=name,
        files=found.files,
        config=config,
        columns=columns,
        tasks=drafts,
        places=places,
        problems=problems,
        rows_read=rows_read + sum(problem.kind == "unreadable row" for problem in problems),
        rows_filtered_out=rows_read - len(rows),
    )
    _give_ids(loaded)
    replies = sum(ends_in_reply(lookup(row.values, columns["prompt"][0]), columns["prompt"][0]) for row in rows)
    if replies:
        loaded.notes.append(f"{replies:,} conversations end in the assistant's reply; the prompt is what comes before")
    if maker.left_out:
        count = f"{len(maker.left_out):,} answers that cannot be scored"
        loaded.notes.append(f"{count} were left out beside others of their row, e.g. {maker.left_out[0]}")
    _note_oddities(loaded)
    return loaded


def _selected(rows: Iterator[Row], config: SourceConfig, name: str) -> tuple[list[Row], int]:
    """The rows that `where` and `limit` keep, and the number read. Raises DataError when `where` keeps none."""
    kept: list[Row] = []
    read = 0
    seen: dict[str, Counter[str]] = {column: Counter() for column in config.where}
    for row in rows:
        read += 1
        try:
            values = {column: plain(lookup(row.values, column)) for column in config.where}
        except FieldError as error:
            raise DataError(f"source '{name}': where: {error.at(row.where)}") from error
        for column, value in values.items():
            seen[column]["(no such column)" if value is MISSING else show(value, 40)] += 1
        if all(_matches(values[column], wanted) for column, wanted in config.where.items()):
            kept.append(row)
        if config.limit is not None and len(kept) == config.limit:
            break
    if read and not kept:
        lines = [
            f"  where {column}: {wanted!r}; that column holds "
            + ", ".join(f"{value} ({count:,} rows)" for value, count in seen[column].most_common(8))
            for column, wanted in config.where.items()
        ]
        raise DataError(f"source '{name}': none of {read:,} rows passes the filter\n" + "\n".join(lines))
    return kept, read


def _matches(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def _give_ids(loaded: _Loaded) -> None:
    """Completes ids to source name / id column, or source name / hash of the content where no column will do.

    A named id column with repeats is an error of the rows; a found one is passed over with a note.
    """
    ids = [task.id for task in loaded.tasks]
    column = loaded.columns.get("id", ("",))[0]
    bad = bad_ids(ids, loaded.places, column) if column else {}
    if bad and loaded.config.columns.id is None:
        del loaded.columns["id"]
        loaded.notes.append(f"column '{column}' does not name every row uniquely: ids are made from the rows' content")
    elif bad:
        loaded.problems.extend(bad.values())
        good = [index for index in range(len(ids)) if index not in bad]
        loaded.tasks = [loaded.tasks[index] for index in good]
        loaded.places = [loaded.places[index] for index in good]
        ids = [ids[index] for index in good]
    if "id" not in loaded.columns:
        ids = content_ids(loaded.tasks)
    loaded.tasks = [replace(task, id=f"{loaded.name}/{id}") for task, id in zip(loaded.tasks, ids, strict=True)]


def _note_oddities(loaded: _Loaded) -> None:
    """Notes what is allowed but often not meant."""
    answers = [answer for task in loaded.tasks for answer in task.ground_truth]
    if loaded.config.ground_truth_format == "answers":
        listed = sum(answer.startswith('["') and answer.endswith('"]') for answer in answers)
        if listed:
            fix = "if they are lists of answers, set ground_truth_format: json_answers"
            loaded.notes.append(f"{listed:,} answers look like JSON lists and stay text; {fix}")
        marked = sum("\n#### " in answer for answer in answers)
        if marked:
            fix = 'to keep only the final answer, set answer_after: "####"'
            loaded.notes.append(f"{marked:,} answers are worked solutions ending in '#### ...'; {fix}")
    twins = len(loaded.tasks) - len({content_digest(task) for task in loaded.tasks})
    if twins:
        loaded.notes.append(f"{twins:,} tasks repeat another's prompt and answers")


# --- prompt length -------------------------------------------------------------------------------------------------


def _without_overlong(loaded: _Loaded, limit: int, measure: Measure) -> _Loaded:
    kept: list[tuple[Task, str]] = []
    overlong: list[Overlong] = []
    for task, where in zip(loaded.tasks, loaded.places, strict=True):
        try:
            tokens = measure(task)
        except Exception as error:
            raise DataError(f"{where}: the prompt cannot be rendered: {type(error).__name__}: {error}") from error
        if tokens > limit:
            overlong.append(Overlong(task_id=task.id, where=where, tokens=tokens))
        else:
            kept.append((task, where))
    return replace(loaded, tasks=[task for task, _ in kept], places=[where for _, where in kept], overlong=overlong)


def _judge_overlong(loaded: Sequence[_Loaded], config: DataConfig, limit_key: str) -> None:
    overlong = sorted((item for source in loaded for item in source.overlong), key=lambda item: -item.tokens)
    total = len(overlong) + sum(len(source.tasks) for source in loaded)
    if not overlong or (config.overlong == "drop" and len(overlong) < total):
        return
    listed = "\n".join(
        f"  {item.where} ({item.task_id}): {item.tokens:,} tokens" for item in overlong[:LISTED_OVERLONG]
    )
    fix = f"raise {limit_key} (the longest prompt has {overlong[0].tokens:,})"
    if len(overlong) < total:
        fix += f", or set data.overlong: drop to train on the other {total - len(overlong):,}"
    raise DataError(
        f"{len(overlong):,} of {total:,} prompts have more than {config.max_prompt_tokens:,} tokens; {fix}\n"
        f"the longest:\n{listed}"
    )


# --- the whole -----------------------------------------------------------------------------------------------------


def _task_set(loaded: Sequence[_Loaded]) -> TaskSet:
    for source in loaded:
        if not source.tasks:
            dropped = f"{len(source.problems):,} invalid and {len(source.overlong):,} over-long rows were dropped"
            raise DataError(
                f"source '{source.name}' has no tasks left: {dropped}\n{summarize(source.problems)}".rstrip()
            )
    return TaskSet(
        sources=tuple(
            TaskSource(name=source.name, tasks=tuple(source.tasks), weight=source.config.weight) for source in loaded
        ),
        origins={task.id: where for source in loaded for task, where in zip(source.tasks, source.places, strict=True)},
        reports=tuple(_report(source) for source in loaded),
    )


def _report(loaded: _Loaded) -> SourceReport:
    return SourceReport(
        name=loaded.name,
        files=loaded.files,
        columns={role: "+".join(columns) for role, columns in loaded.columns.items()},
        rows_read=loaded.rows_read,
        rows_filtered_out=loaded.rows_filtered_out,
        loaded=len(loaded.tasks),
        invalid=tuple(loaded.problems),
        overlong=tuple(loaded.overlong),
        notes=tuple(loaded.notes),
    )
