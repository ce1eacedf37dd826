"""Configured files -> a `TaskSet`.

Every row is checked before this returns, and nothing is dropped unless the config says so.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.data.config import DataConfig, SourceConfig, source_names, template_columns
from posttrain.data.fields import (
    MISSING,
    USUAL_COLUMNS,
    answers_of,
    columns_text,
    fill_template,
    is_null,
    lookup,
    messages_of,
    plain,
)
from posttrain.data.problems import DataError, FieldError, Problem, show, summarize
from posttrain.data.rows import Row, find_files, read_rows
from posttrain.data.taskset import Overlong, SourceReport, TaskSet, TaskSource
from posttrain.task import Message, Task

Measure = Callable[[Task], int]  # tokens of the prompt exactly as it will be sent, tool schemas included
CheckAnswer = Callable[[str], str | None]  # why an accepted answer cannot be scored against; None = it can
SNIFFED_ROWS = 100  # the usual columns are looked for in this many rows
LISTED_OVERLONG = 5


def load_tasks(
    config: DataConfig,
    part: Literal["train", "eval"] = "train",
    *,
    measure: Measure | None = None,
    check_ground_truth: CheckAnswer | None = None,
    root: Path = Path(),
) -> TaskSet:
    """Reads, checks and measures all tasks of one part of the data.

    Relative paths are taken from `root`. `measure` is needed when `max_prompt_tokens` is set. Raises DataError when
    files or columns are missing, rows cannot be used (all of them are counted, the first of each kind shown), prompts
    are over the limit, or nothing is left; with `invalid: drop` and `overlong: drop` such rows are counted instead.
    """
    configs: tuple[SourceConfig, ...] = getattr(config, part)
    if not configs:
        raise DataError(f"data.{part} names no files; write e.g. data.{part}: path/to/file.parquet")
    loaded = [
        _load_source(_file_rows(source, root), source, name, check_ground_truth)
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
        _judge_overlong(loaded, config)
    return _task_set(loaded)


def tasks_from_rows(
    rows: Iterable[Mapping[str, Any]], source: SourceConfig, *, check_ground_truth: CheckAnswer | None = None
) -> TaskSet:
    """The same checks for rows already in memory; `source.path` only names them. Raises DataError on any bad row."""
    numbered = _Rows(files=source.path, rows=(Row(f"row {i} (from 0)", dict(row)) for i, row in enumerate(rows)))
    loaded = _load_source(numbered, source, source.name or source.default_name, check_ground_truth)
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
    files = find_files(source.path, root)
    found = _Rows(files=tuple(str(file) for file in files), rows=iter(()))
    found.rows = (row for file in files for row in read_rows(file, found.problems.append))
    return found


def _load_source(found: _Rows, config: SourceConfig, name: str, check: CheckAnswer | None) -> _Loaded:
    rows, rows_read = _selected(found.rows, config, name)
    problems = found.problems  # filled while the rows were read
    if not rows and not problems:
        raise DataError(f"source '{name}' is empty: {', '.join(found.files)} has no rows")
    columns = _find_columns([row.values for row in rows[:SNIFFED_ROWS]], config, name) if rows else {}
    drafts: list[Task] = []
    places: list[str] = []
    for row in rows:
        try:
            drafts.append(_draft(row.values, columns, config, name, check))
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
    _note_oddities(loaded)
    return loaded


def _selected(rows: Iterator[Row], config: SourceConfig, name: str) -> tuple[list[Row], int]:
    """The rows that `where` and `limit` keep, and the number read. Raises DataError when `where` keeps none."""
    kept: list[Row] = []
    read = 0
    seen: dict[str, Counter[str]] = {column: Counter() for column in config.where}
    for row in rows:
        read += 1
        values = {column: plain(lookup(row.values, column)) for column in config.where}
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


def _find_columns(rows: Sequence[Mapping[str, Any]], config: SourceConfig, name: str) -> dict[str, tuple[str, ...]]:
    """Role -> columns: those named in the config, else the first usual one that some row has."""

    def present(column: str) -> bool:
        return any(lookup(row, column) is not MISSING for row in rows)

    columns: dict[str, tuple[str, ...]] = {}
    for role in type(config.columns).model_fields:
        named = getattr(config.columns, role)
        if named is not None:
            columns[role] = (named,) if isinstance(named, str) else named
        else:
            columns[role] = tuple(column for column in USUAL_COLUMNS.get(role, ()) if present(column))[:1]
    if config.prompt_template is not None:
        columns["prompt"] = template_columns(config.prompt_template)
    missing = [column for found in columns.values() for column in found if not present(column)]
    if missing:
        raise DataError(f"source '{name}': no row has column {missing}; the first has {columns_text(rows[0])}")
    wanted = {"prompt": True, "ground_truth": config.ground_truth_required}
    for role, needed in wanted.items():
        if needed and not columns[role]:
            usual = ", ".join(USUAL_COLUMNS[role])
            fix = f"name it under `columns: {{{role}: ...}}`"
            if role == "ground_truth":
                fix += ", or set ground_truth_required: false when the env scores by itself"
            raise DataError(f"source '{name}': no column for the {role} (looked for {usual}); rows have "
                            f"{columns_text(rows[0])}; {fix}")  # fmt: skip
    return {role: found for role, found in columns.items() if found}


def _draft(
    row: Mapping[str, Any],
    columns: Mapping[str, tuple[str, ...]],
    config: SourceConfig,
    name: str,
    check: CheckAnswer | None,
) -> Task:
    """A task whose id is still the bare value of the id column ('' without one). Raises FieldError."""
    answers = answers_of(row, columns.get("ground_truth", ()), config)
    if check is not None and config.ground_truth_format != "opaque":
        _check_answers(answers, columns["ground_truth"][0] if answers else "", check)
    # Everything else of the row goes to env, reward and log; the prompt column would only repeat the prompt.
    whole_prompt = columns["prompt"][0] if config.prompt_template is None else None
    return Task(
        id=_name_text(row, columns.get("id"), ""),
        prompt=_prompt(row, columns["prompt"][0], config),
        ground_truth=answers,
        source=_name_text(row, columns.get("source"), name),
        env=_name_text(row, columns.get("env"), "") or config.env,
        reward=_name_text(row, columns.get("reward"), "") or config.reward,
        extra=plain({column: value for column, value in row.items() if column != whole_prompt}),
    )


def _prompt(row: Mapping[str, Any], column: str, config: SourceConfig) -> tuple[Message, ...]:
    if config.prompt_template is not None:
        messages: tuple[Message, ...] = ({"role": "user", "content": fill_template(config.prompt_template, row)},)
    else:
        messages = messages_of(lookup(row, column), column)
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        seen = "already begins with a system message"
        raise FieldError(column, "bad prompt", seen, "remove system_prompt, or the message")
    return ({"role": "system", "content": config.system_prompt}, *messages)


def _check_answers(answers: Sequence[str], column: str, check: CheckAnswer) -> None:
    for answer in answers:
        reason = check(answer)
        if reason is not None:
            fix = "correct or remove that answer: any prediction, or none, would match it"
            raise FieldError(column, "unscorable ground truth", f"{show(answer)}: {reason}", fix)


def _name_text(row: Mapping[str, Any], columns: tuple[str, ...] | None, default: str) -> str:
    """A column that holds a name (id, source, env, reward) as text; several names are joined by commas."""
    if not columns:
        return default
    value = lookup(row, columns[0])
    if value is MISSING or is_null(value):
        return default
    value = plain(value)
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int) for item in names):
        raise FieldError(columns[0], "bad name", f"is {show(value)}", "a name is text or a whole number")
    return ",".join(str(item) for item in names)


# --- ids -----------------------------------------------------------------------------------------------------------


def _give_ids(loaded: _Loaded) -> None:
    """Makes ids unique: source name / id column; without a usable id column, source name / hash of the content.

    Content ids survive rows being added, removed or reordered; row numbers would not. Twins get -2, -3.
    """
    bare = [task.id for task in loaded.tasks]
    if loaded.config.columns.id is not None:
        _refuse_bad_ids(loaded, bare)
    elif "id" in loaded.columns and (len(set(bare)) < len(bare) or not all(bare)):
        (column,) = loaded.columns.pop("id")
        loaded.notes.append(f"column '{column}' does not name every row uniquely: ids are made from the rows' content")
    if "id" not in loaded.columns:
        bare = _content_ids(loaded.tasks)
    loaded.tasks = [replace(task, id=f"{loaded.name}/{id}") for task, id in zip(loaded.tasks, bare, strict=True)]


def _refuse_bad_ids(loaded: _Loaded, ids: Sequence[str]) -> None:
    column = str(loaded.config.columns.id)
    first: dict[str, str] = {}
    good: list[tuple[Task, str]] = []
    for task, id, where in zip(loaded.tasks, ids, loaded.places, strict=True):
        seen = "is missing or null" if not id else f"{id!r} is also the id of {first[id]}" if id in first else ""
        if seen:
            fix = "ids must be unique; correct it, or drop `columns.id` to have ids made from the content"
            loaded.problems.append(Problem(where=where, column=column, kind="bad id", seen=seen, fix=fix))
            continue
        first[id] = where
        good.append((task, where))
    loaded.tasks = [task for task, _ in good]
    loaded.places = [where for _, where in good]


def _content_ids(tasks: Iterable[Task]) -> list[str]:
    seen: Counter[str] = Counter()
    ids: list[str] = []
    for task in tasks:
        digest = content_digest(task)
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def content_digest(task: Task) -> str:
    """12 hex digits of prompt and ground truth."""
    content = json.dumps([task.prompt, task.ground_truth], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _note_oddities(loaded: _Loaded) -> None:
    """Things that are allowed but often not meant."""
    if loaded.config.ground_truth_format == "answers":
        listed = sum(_is_json_list(answer) for task in loaded.tasks for answer in task.ground_truth)
        if listed:
            fix = "if they are lists of answers, set ground_truth_format: json_answers"
            loaded.notes.append(f"{listed:,} answers are JSON text of lists of strings and stay text; {fix}")
    contents = Counter(content_digest(task) for task in loaded.tasks)
    twins = len(loaded.tasks) - len(contents)
    if twins:
        loaded.notes.append(f"{twins:,} tasks repeat another's prompt and answers")


def _is_json_list(text: str) -> bool:
    if not text.startswith('["'):
        return False
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


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


def _judge_overlong(loaded: Sequence[_Loaded], config: DataConfig) -> None:
    overlong = sorted((item for source in loaded for item in source.overlong), key=lambda item: -item.tokens)
    total = len(overlong) + sum(len(source.tasks) for source in loaded)
    if not overlong or (config.overlong == "drop" and len(overlong) < total):
        return
    listed = "\n".join(
        f"  {item.where} ({item.task_id}): {item.tokens:,} tokens" for item in overlong[:LISTED_OVERLONG]
    )
    fix = f"raise data.max_prompt_tokens (the longest prompt has {overlong[0].tokens:,})"
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
