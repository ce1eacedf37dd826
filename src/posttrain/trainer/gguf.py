"""A GGUF file -> a model directory that can be trained: weights unpacked to safetensors, tokenizer beside them.

Transformers reads the weights and the tokenizer (extra `gguf`). What is here: where the file comes from, what is in it
(its header is read without the extra, so that mistakes show in a second), room on the disk, an atomic result, and a
check that what was written, loaded the way a run loads it, is the function that the file holds.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer

from posttrain.trainer.checks import plain_logprobs, probe_batch
from posttrain.trainer.loading import DTYPES, no_progress_bars
from posttrain.trainer.policy import Policy

transformers: Any = importlib.import_module("transformers")  # type checkers would read the thousands of files it names
MAGIC = b"GGUF"
VERSIONS = (2, 3)
TOKENIZER_SINCE = (5, 19)  # transformers that read the file's tokenizer right
TOKENIZER_BYTES = 64 << 20  # on disk, for the largest vocabularies
LOGPROB_TOLERANCE = 1e-3  # packed against transformers' own forward, per token, in float32
CHECK_TEXT = (
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands which "
    "have connected them with another, and to assume among the powers of the earth, the separate and equal station."
)
# ggml's type numbers, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
TENSOR_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"}
TENSOR_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file cannot be imported; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a GGUF file says about itself. `fields` holds scalars and texts; of an array, its length."""

    fields: dict[str, Any]
    tensors: dict[str, int]  # type -> number of tensors
    parameters: int

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", "unknown"))

    @property
    def name(self) -> str:
        return str(self.fields.get("general.name", "unnamed"))

    @property
    def has_chat_template(self) -> bool:
        return "tokenizer.chat_template" in self.fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What `import_gguf` did."""

    directory: Path
    header: Header
    dtype: str
    bytes_written: int
    check_tokens: int
    max_gap: float  # log-probs of the check text: what was written against what was read
    perplexity: float  # of the check text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "directory": str(self.directory),
            "name": self.header.name,
            "architecture": self.header.architecture,
            "licence": self.header.fields.get("general.license"),
            "parameters": self.header.parameters,
            "tensors": self.header.tensors,
            "chat_template": self.header.has_chat_template,
            "dtype": self.dtype,
            "bytes_written": self.bytes_written,
            "check_tokens": self.check_tokens,
            "max_gap": self.max_gap,
            "perplexity": self.perplexity,
        }

    def render(self) -> str:
        header = self.header
        packed = ", ".join(f"{count} {kind}" for kind, count in header.tensors.items())
        lines = [
            f"{header.name} ({header.architecture}, {header.parameters:,} parameters) -> {self.directory}",
            f"  read     {sum(header.tensors.values())} tensors: {packed}",
            f"  written  {self.bytes_written / 1e6:,.0f} MB: {self.dtype} safetensors and tokenizer",
            f"  checked  loaded again; log-probs of {self.check_tokens} tokens differ by at most {self.max_gap:.1e}, "
            f"perplexity {self.perplexity:.2f}",
        ]
        if not header.has_chat_template:
            lines.append("  note     no chat template: a base model; prompts are sent as plain text")
        if licence := header.fields.get("general.license"):
            lines.append(f"  licence  {licence}")
        return "\n".join(lines)


def import_gguf(
    source: str,
    target: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: str | None = None,
) -> Imported:
    """Converts `source`, a .gguf file or an installed package that assembles one, into the new directory `target`.

    tokenizer: a directory that holds the model's tokenizer, to be taken instead of the one in the file.
    Raises GgufError; then nothing is left behind.
    """
    if dtype not in DTYPES:
        raise GgufError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if target.exists():
        raise GgufError(f"{target} exists already; remove it, or choose another directory")
    _need_extra()
    if tokenizer is None:
        _need_transformers()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        file = _find(source, Path(scratch))
        header = read_header(file)
        needed = header.parameters * DTYPES[dtype].itemsize + TOKENIZER_BYTES
        _need_room(needed, target.parent, "the unpacked model")
        done = Path(scratch) / "model"
        words = _file_tokenizer(file, header) if tokenizer is None else _given_tokenizer(tokenizer, header)
        expected, ids = _convert(file, done, dtype, words)
        max_gap, perplexity = _check(done, ids, expected)
        written = sum(path.stat().st_size for path in done.iterdir())
        done.rename(target)
    return Imported(
        directory=target,
        header=header,
        dtype=dtype,
        bytes_written=written,
        check_tokens=len(ids) - 1,
        max_gap=max_gap,
        perplexity=perplexity,
    )


# -- where the file is --------------------------------------------------------------------------------------------


def _need_extra() -> None:
    for name in ("gguf", "accelerate"):  # transformers wants both for this format
        if importlib.util.find_spec(name) is None:
            raise GgufError(f"reading GGUF files needs the package {name}: pip install 'posttrain[gguf]'")


def _need_transformers() -> None:
    """Older ones lose the order of merges: 'When' became four tokens with 5.17."""
    version = transformers.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TOKENIZER_SINCE:
        raise GgufError(
            f"transformers {version} misreads the tokenizers of GGUF files; pip install 'posttrain[gguf]' (which needs "
            f"{'.'.join(map(str, TOKENIZER_SINCE))}), or give the model's tokenizer as a directory"
        )


def _need_room(needed: int, place: Path, what: str) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise GgufError(
            f"{what} needs {needed / 1e6:,.0f} MB on the disk of {place}, and {free / 1e6:,.0f} MB are free"
        )


def _find(source: str, scratch: Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path.resolve()
    if path.suffix == ".gguf" or len(path.parts) != 1 or path.is_dir():
        raise GgufError(f"no file {source}; give a .gguf file, or the name of an installed package that holds one")
    return _assemble(source, scratch)


def _assemble(package: str, scratch: Path) -> Path:
    """Puts together the file whose parts a package and its companions hold; the package checks the sum."""
    name = re.sub(r"[-.]+", "_", package)
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
        raise GgufError(
            f"{package} is neither a file nor an installed package; to install the package: pip install {package}"
        )
    module = importlib.import_module(name)
    assemble: Callable[[Path], Any] | None = getattr(module, "assemble", None)
    if assemble is None:
        raise GgufError(f"the package {package} has no function `assemble`, so it holds no GGUF file in parts")
    parts = getattr(module, "chunk_paths", list)
    try:
        _need_room(sum(Path(part).stat().st_size for part in parts()), scratch, "putting the file together")
        return Path(assemble(scratch / "model.gguf"))
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(
            f"{package} is incomplete ({error}); install it again: pip install --force-reinstall {package}"
        ) from error


# -- what is in it ------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Everything before the weights. Raises GgufError for what is no GGUF file, or is cut short there."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise GgufError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
        try:
            return _header(_Reader(file), path)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise GgufError(f"{path} is cut short or damaged: its header cannot be read ({error})") from error


def _header(reader: _Reader, path: Path) -> Header:
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise GgufError(f"{path} has GGUF version {version}; {' and '.join(map(str, VERSIONS))} can be read")
    tensors, fields = reader.scalar("Q"), reader.scalar("Q")
    found: dict[str, Any] = {}
    for _ in range(fields):
        key = reader.text()
        found[key] = reader.value(reader.scalar("I"))
    kinds: Counter[str] = Counter()
    parameters = 0
    for _ in range(tensors):
        reader.text()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        kind = reader.scalar("I")
        reader.scalar("Q")  # where its bytes are
        kinds[TENSOR_TYPES.get(kind, f"type {kind}")] += 1
        parameters += math.prod(shape)
    return Header(fields=found, tensors=dict(kinds.most_common()), parameters=parameters)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Little-endian values, one after the other."""

    file: BinaryIO

    def scalar(self, code: str) -> Any:
        packed = struct.Struct("<" + code)
        return packed.unpack(self.file.read(packed.size))[0]

    def text(self) -> str:
        return self._bytes(self.scalar("Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        found = self.file.read(count)
        if len(found) != count:
            raise struct.error(f"{count} bytes wanted, {len(found)} left")
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, length = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            self._bytes(length * struct.calcsize("<" + _SCALARS[inner]))
        else:
            for _ in range(length):
                self.value(inner)
        return length


# -- conversion and check -----------------------------------------------------------------------------------------


def _file_tokenizer(file: Path, header: Header) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise _unread(file, error) from error
    if header.fields.get("tokenizer.ggml.add_bos_token"):
        _begin_with_bos(tokenizer)
    return tokenizer


def _given_tokenizer(place: str, header: Header) -> Any:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise GgufError(f"no tokenizer at {place}: {error}") from error
    size = header.fields.get("tokenizer.ggml.tokens", len(tokenizer))
    if len(tokenizer) > size:
        raise GgufError(
            f"the tokenizer at {place} has {len(tokenizer):,} tokens and the model {size:,}: another model's?"
        )
    return tokenizer


def _unread(file: Path, error: Exception) -> GgufError:
    return GgufError(f"transformers {transformers.__version__} cannot read {file.name}: {error}")


def _convert(file: Path, target: Path, dtype: str, tokenizer: Any) -> tuple[torch.Tensor, list[int]]:
    """Writes the directory; returns (log-probs [L] of the check text by transformers' own forward, its ids [L])."""
    ids = tokenizer.encode(CHECK_TEXT)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # newer transformers would keep the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    auto: Any = AutoModelForCausalLM
    try:
        with no_progress_bars():
            module, info = auto.from_pretrained(str(file.parent), gguf_file=file.name, **options)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise _unread(file, error) from error
    if info["missing_keys"]:
        raise GgufError(f"{file.name} lacks weights that its architecture needs: {sorted(info['missing_keys'])[:5]}")
    with torch.no_grad():  # of the weights as they will be written, in float32: bfloat16's own noise is 0.5
        for parameter in module.parameters():
            parameter.copy_(parameter.to(DTYPES[dtype]))
        expected = plain_logprobs(module.eval(), torch.tensor(ids))
    with no_progress_bars():
        module.to(DTYPES[dtype]).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return expected, ids


def _begin_with_bos(tokenizer: Any) -> None:
    """Transformers forgets that the file asks for it; without it Gemma's perplexity is 200 times as high."""
    if tokenizer.encode("a")[:1] != [tokenizer.bos_token_id]:
        tokenizer.add_bos_token = True
    if tokenizer.encode("a")[:1] != [tokenizer.bos_token_id]:
        raise GgufError(
            f"the file asks that every text begin with {tokenizer.bos_token!r}, which a {type(tokenizer).__name__} "
            "cannot be told; without it the model would not be the same"
        )


def _check(directory: Path, ids: list[int], expected: torch.Tensor) -> tuple[float, float]:
    """(largest difference of a log-prob, perplexity of the check text) of the directory, loaded in float32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    again = tokenizer.encode(CHECK_TEXT)
    if again != ids:
        raise GgufError(f"the tokenizer that was written splits a text otherwise than the file's: {again} and {ids}")
    policy = Policy.load(directory, "cpu", "float32")
    with torch.no_grad():
        logprobs = policy.logprobs(probe_batch([torch.tensor(ids)]))
    gap = float((logprobs - expected).abs().max())
    if not gap <= LOGPROB_TOLERANCE:
        raise GgufError(f"what was written is not what was read: log-probs of a text differ by {gap:.3g}")
    return gap, math.exp(-float(expected[1:].mean()))
