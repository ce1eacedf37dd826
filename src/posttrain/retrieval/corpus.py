"""Reads corpora: rows of jsonl, json or parquet -> `Passage`.

A row is {"id", "contents"} (Search-R1: the first line is the title in quotes) or {"id", "title", "text"}; where both
are there, `contents` wins. `_id` (BEIR) is read as `id`. A corpus of which no row has an id is numbered from 0. Files
may be gzipped (.gz). Every error names the file and the row.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.boundary.foreign_json import read_json
from posttrain.location import is_location, rows_from
from posttrain.retrieval.protocol import Passage, quoted

Row = tuple[int, Mapping[str, Any]]  # row number as people count (line of a jsonl file, else from 1), and its columns
EmptyPolicy = Literal["error", "drop"]


class CorpusError(ValueError):
    """A corpus cannot be read as it is; says where and what to do."""


@dataclass(slots=True)
class CorpusCounts:
    """What was read so far."""

    rows: int = 0
    passages: int = 0
    empty_dropped: int = 0


def read_corpus(
    path: str | Path, *, empty: EmptyPolicy = "error", options: Mapping[str, Any] | None = None
) -> list[Passage]:
    """The whole corpus in memory; see `iter_corpus`."""
    return list(iter_corpus(path, empty=empty, options=options))


def iter_corpus(
    path: str | Path,
    *,
    empty: EmptyPolicy = "error",
    counts: CorpusCounts | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Passage]:
    """Yields the passages in file order, counting into `counts`.

    path: a file, or the location of a function ("pkg.mod:function") that takes `options` and returns the rows.

    Raises `CorpusError` for a missing, damaged or empty file, a row without the columns above, a repeated id, and
    (unless `empty` is "drop") a passage without a word.
    """
    if empty not in get_args(EmptyPolicy):
        raise CorpusError(f"empty must be one of {', '.join(get_args(EmptyPolicy))}, got {empty!r}")
    path = Path(path)
    counts = CorpusCounts() if counts is None else counts
    seen: dict[str, int] = {}
    numbered: bool | None = None  # are ids row numbers? decided by the first row
    for number, row in _rows(path, options or {}):
        counts.rows += 1
        where = f"{path}, row {number}"
        raw_id = row.get("id", row.get("_id"))
        numbered = raw_id is None if numbered is None else numbered
        if numbered != (raw_id is None):
            raise CorpusError(f"{where}: some rows have an `id` and some do not; give every row one, or none")
        passage = Passage(str(counts.rows - 1) if raw_id is None else _id(raw_id, where), _contents(row, where))
        if passage.id in seen:
            raise CorpusError(
                f"{where}: id {passage.id!r} was used by row {seen[passage.id]} already; ids must be unique"
            )
        seen[passage.id] = number
        if not _has_words(row, passage):
            if empty == "error":
                raise CorpusError(
                    f"{where}: passage {passage.id!r} is empty; remove it, or drop empty passages (counted)"
                )
            counts.empty_dropped += 1
            continue
        counts.passages += 1
        yield passage
    if counts.passages == 0:
        raise CorpusError(f"{path} holds no passage ({counts.rows} rows, {counts.empty_dropped} of them empty)")


def _id(value: object, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value.strip():
        return _encodable(value, "id", where)
    raise CorpusError(f"{where}: `id` must be a non-empty string or an integer, got {value!r:.80}")


def _contents(row: Mapping[str, Any], where: str) -> str:
    if row.get("contents") is not None:
        return _text(row, "contents", where)
    if row.get("text") is None:
        raise CorpusError(
            f"{where}: expected `contents`, or `title` and `text`; the columns here are {sorted(map(str, row))}"
        )
    title = _text(row, "title", where) if row.get("title") is not None else ""
    return quoted(title, _text(row, "text", where))


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise CorpusError(f"{where}: `{column}` must be a string, got {type(value).__name__}: {value!r:.80}")
    return _encodable(value, column, where)


def _encodable(value: str, column: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: `{column}` holds half a surrogate pair at character {error.start}") from None
    return value


def _has_words(row: Mapping[str, Any], passage: Passage) -> bool:
    """A title alone is no passage where title and text are told apart by column."""
    body = passage.contents if row.get("contents") is not None else passage.text
    return any(char.isalnum() for char in body)


def _rows(path: Path, options: Mapping[str, Any]) -> Iterator[Row]:
    if is_location(str(path)):
        return enumerate(rows_from(str(path), options), start=1)
    name = path.name.removesuffix(".gz")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    reader = readers.get(Path(name).suffix)
    if reader is None or (name != path.name and reader is _parquet_rows):
        raise CorpusError(f"{path}: cannot tell the format; expected .jsonl, .jsonl.gz, .json, .json.gz or .parquet")
    if not path.is_file():
        raise CorpusError(f"{path}: no such file")
    return reader(path)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Opens plain or gzipped bytes; damage found while reading becomes a `CorpusError`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: damaged gzip file ({error}); copy it again") from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _object(_parse(line, f"{path}, row {number}"), f"{path}, row {number}")


def _json_rows(path: Path) -> Iterator[Row]:
    with _open(path) as stream:
        rows = _parse(stream.read(), str(path))
    if not isinstance(rows, list):
        raise CorpusError(f"{path}: expected a list of objects, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield number, _object(row, f"{path}, row {number}")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in {"id", "_id", "title", "text", "contents"}]
            if not columns:
                raise CorpusError(
                    f"{path}: expected `contents`, or `title` and `text`; the columns are {file.schema_arrow.names}"
                )
            number = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowInvalid as error:
        raise CorpusError(f"{path}: not a readable parquet file ({error})") from error


def _parse(data: bytes, where: str) -> Any:
    try:
        return read_json(data)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON: {error}") from error


def _object(row: object, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: expected an object, got {type(row).__name__}: {row!r:.80}")
    return row
