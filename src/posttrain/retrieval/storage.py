"""What every stored index is made of: passages in an Arrow file, a manifest that vouches for every byte, and a folder
that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.retrieval.protocol import Passage

FORMAT = 1
MANIFEST = "manifest.json"
_SCHEMA = pa.schema([("id", pa.string()), ("contents", pa.string())])
_ROWS_PER_BATCH = 16384
Progress = Callable[[int, int | None], None]  # passages done, and of how many where that is known


class StoredIndexError(ValueError):
    """A stored index is absent, incomplete, changed or of another format; says which file and what to do."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an index of any method; raises `StoredIndexError`."""
    path = folder / MANIFEST
    if not path.is_file():
        raise StoredIndexError(f"{folder} is no index: {MANIFEST} is missing; build it with `posttrain index`")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        kinds = {"format": int, "method": str, "parameters": dict, "files": dict, "counts": dict}
        complete = all(isinstance(manifest.get(key), kind) for key, kind in kinds.items())
    except (ValueError, AttributeError) as error:
        raise StoredIndexError(f"{path} is damaged ({error!r}); build the index again") from error
    if not complete:
        raise StoredIndexError(f"{path} is damaged (it has {sorted(manifest)}); build the index again")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def verify_files(folder: Path, manifest: dict[str, Any], *, check_hashes: bool) -> None:
    """Compares every file with the manifest: its size always, its sha256 unless `check_hashes` is off."""
    for name, expected in manifest["files"].items():
        _verify(folder / name, expected, check_hashes=check_hashes)


def refuse_to_replace(out: Path, *, overwrite: bool) -> None:
    """Raises FileExistsError when `out` is there and must stay, or a file is where its folder would be."""
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise FileExistsError(f"{out} cannot be written: {above} is no folder; choose another place")
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists already; choose another folder, or overwrite it (--overwrite)")
    if out.is_file():
        raise FileExistsError(f"{out} is a file, and an index is a folder, so it is not overwritten")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} is not an index (it has no {MANIFEST}), so it is not overwritten")


class StoredPassages(Sequence[Passage]):
    """Passages in an Arrow file, made into objects when asked for."""

    def __init__(self, path: Path, *, mmap: bool) -> None:
        source = pa.memory_map(str(path)) if mmap else pa.BufferReader(path.read_bytes())
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid as error:
            raise StoredIndexError(f"{path}: not an Arrow file ({error}); build the index again") from error
        self._ids, self._contents = table.column("id"), table.column("contents")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> Passage:  # type: ignore[override]  (no slices)
        return Passage(self._ids[row].as_py(), self._contents[row].as_py())


def write_passages(passages: Iterator[Passage], path: Path) -> Iterator[str]:
    """Writes the passages as they go by and hands their contents on: one pass over the corpus, one batch in memory."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        ids: list[str] = []
        contents: list[str] = []
        for passage in passages:
            ids.append(passage.id)
            contents.append(passage.contents)
            if len(ids) == _ROWS_PER_BATCH:
                writer.write_batch(pa.record_batch([ids, contents], schema=_SCHEMA))
                ids, contents = [], []
            yield passage.contents
        if ids:
            writer.write_batch(pa.record_batch([ids, contents], schema=_SCHEMA))


def put_in_place(folder: Path, out: Path) -> None:
    """Makes a finished folder the index `out`; what was there before goes."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    replaced = _move_away(out)
    folder.rename(out)
    sync(out.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


@contextmanager
def built_beside(out: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` when the block ends well, and goes when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        put_in_place(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _move_away(out: Path) -> Path | None:
    if not out.exists():
        return None
    replaced = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    out.rename(replaced)  # onto an empty folder: atomic
    return replaced


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verify(path: Path, expected: dict[str, Any], *, check_hashes: bool) -> None:
    if not path.is_file():
        raise StoredIndexError(f"{path} is missing; build the index again, or copy the whole folder")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise StoredIndexError(f"{path} has {size} bytes, the manifest says {expected['bytes']}; copy the folder again")
    if check_hashes and file_sha256(path) != expected["sha256"]:
        raise StoredIndexError(f"{path} was changed since it was built (sha256 differs); build the index again")
