"""Files -> rows with their place in the file: parquet, jsonl, json, each also gzipped (parquet aside)."""

from __future__ import annotations

import difflib
import glob
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.boundary.foreign_json import read_json
from posttrain.data.config import GLOB_CHARACTERS
from posttrain.data.problems import DataError, Problem, show
from posttrain.location import LocationError, at_home, rows_from

READ_ROWS = 2048  # rows decoded at a time
LFS_HEAD = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Row:
    """`where` names file and row in words: "data/train.jsonl line 18", "data/train.parquet row 17 (from 0)"."""

    where: str
    values: dict[str, Any]


def call_for_rows(location: str, options: Mapping[str, Any]) -> list[Row]:
    """The rows that the user's function returns. Raises DataError when it is not there or returns other things."""
    try:
        listed = list(rows_from(location, options))
    except LocationError as error:
        raise DataError(f"data path {location!r}: {error}") from error
    for number, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise DataError(f"{location} returned {show(row)} as row {number} (from 0); expected a dict of columns")
    return [Row(f"{location} row {number} (from 0)", dict(row)) for number, row in enumerate(listed)]


def find_files(patterns: Sequence[str], root: Path) -> list[Path]:
    """The files behind paths and globs, each once, globs sorted. Raises DataError when one matches nothing."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = root / at_home(Path(pattern))
        matches = [path] if path.is_file() else []
        if not matches and GLOB_CHARACTERS & set(pattern):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            matches = [match for match in matches if match.is_file()]
        if not matches:
            raise DataError(_not_found(path, pattern))
        files.update(dict.fromkeys(matches))
    for file in files:
        reader_for(file)
    return list(files)


def _not_found(path: Path, pattern: str) -> str:
    if path.is_dir():
        return f"data path {pattern!r} is a folder; name files or write {pattern.rstrip('/')}/*.parquet"
    if path.exists():
        return f"data path {pattern!r} is no regular file (a pipe, or a device); rows are read from files"
    if GLOB_CHARACTERS & set(pattern):
        return f"no file matches {pattern!r} (looked at {path})"
    if not path.parent.is_dir():
        return f"data file {pattern!r} does not exist: there is no folder {path.parent.resolve()}"
    names = sorted(entry.name for entry in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:3]
    hint = f"; that folder has {', '.join(near)}" if near else ""
    return f"data file {pattern!r} does not exist (looked at {path.resolve()}){hint}"


OnProblem = Callable[[Problem], None]
Reader = Callable[[Path, OnProblem], Iterator[Row]]


def read_rows(path: Path, on_problem: OnProblem) -> Iterator[Row]:
    """The rows of one file in order. Unreadable rows go to `on_problem`; an unreadable file raises DataError."""
    try:
        yield from reader_for(path)(path, on_problem)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}{_pointer_hint(path)}") from error


def reader_for(path: Path) -> Reader:
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    if kind not in READERS or (kind == "parquet" and path.suffix == ".gz"):
        raise DataError(f"{path}: unknown kind of file; readable are .parquet, .jsonl, .json, .jsonl.gz and .json.gz")
    return READERS[kind]


def _read_parquet(path: Path, on_problem: OnProblem) -> Iterator[Row]:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=READ_ROWS):
            for values in batch.to_pylist():
                yield Row(f"{path} row {number} (from 0)", values)
                number += 1


def _read_jsonl(path: Path, on_problem: OnProblem) -> Iterator[Row]:
    # Bytes are split at \n only: U+2028 and the like are legal inside JSON text.
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _parsed_line(line, f"{path} line {number}", on_problem)
            if number == 1 and row is None and line.startswith(LFS_HEAD):
                raise DataError(f"cannot read {path}{_pointer_hint(path)}")
            if row is not None:
                yield row


def _parsed_line(line: bytes, where: str, on_problem: OnProblem) -> Row | None:
    try:
        values = read_json(line.decode("utf-8-sig"))
    except ValueError as error:  # also UnicodeDecodeError
        seen = f"is no JSON: {error}"
        on_problem(Problem(where=where, column="", kind="unreadable row", seen=seen, fix="correct or remove the line"))
        return None
    return _object_row(values, where, on_problem)


def _object_row(values: Any, where: str, on_problem: OnProblem) -> Row | None:
    if isinstance(values, dict):
        return Row(where, values)
    fix = "a row is a JSON object of columns"
    on_problem(Problem(where=where, column="", kind="unreadable row", seen=f"is {show(values)}", fix=fix))
    return None


def _read_json(path: Path, on_problem: OnProblem) -> Iterator[Row]:
    """A list of objects, or, as often met under this extension, one object per line."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read()
    try:
        values = read_json(text.decode("utf-8-sig"))
    except ValueError as error:
        if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            raise DataError(f"cannot read {path}: {error}") from error
        yield from _read_jsonl(path, on_problem)
        return
    if isinstance(values, dict) and any(isinstance(value, list) and value for value in values.values()):
        lists = [key for key, value in values.items() if isinstance(value, list) and value]
        if all(isinstance(item, dict) for key in lists for item in values[key]):
            raise DataError(f"{path} is one object; rows are wanted: a list of objects (its {lists} may be such lists)")
    for number, item in enumerate(values if isinstance(values, list) else [values]):
        row = _object_row(item, f"{path} item {number} (from 0)", on_problem)
        if row is not None:
            yield row


READERS: dict[str, Reader] = {"parquet": _read_parquet, "jsonl": _read_jsonl, "json": _read_json}


def _pointer_hint(path: Path) -> str:
    """Git LFS leaves small text files where data should be; the error they cause says nothing of it."""
    try:
        with path.open("rb") as file:
            head = file.read(len(LFS_HEAD))
    except OSError:
        return ""
    return ": it is a Git LFS pointer, not the data; run `git lfs pull`" if head == LFS_HEAD else ""
