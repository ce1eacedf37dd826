"""Toy tokenizers, the Mistral one rebuilt from its file, and readers of golden rows."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.chat import Renderer
from posttrain.task import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def appended(renderer: Renderer, messages: list[Message]) -> list[int]:
    """The ids of a delta in one list."""
    return [token for ids, _ in renderer.delta(messages) for token in ids]


def toy_tokenizer(
    vocabulary: list[str],
    merges: tuple[tuple[str, str], ...] = (),
    *,
    special: tuple[str, ...] = (),
    **names: str,
) -> PreTrainedTokenizerFast:
    """A BPE tokenizer over whole strings, without pre-tokenizer: pieces are what the merges make."""
    model = models.BPE(vocab={piece: number for number, piece in enumerate(vocabulary)}, merges=list(merges))
    backend = Tokenizer(model)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def word_tokenizer(words: list[str], *, special: tuple[str, ...], **names: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose special tokens lie in the model's own vocabulary."""
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **names)


def jsonl_gz(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def character_tokenizer(special: tuple[str, ...], template: str | None = None, **names: str) -> PreTrainedTokenizerFast:
    """One id per byte: any template can be tried with any special tokens."""
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The Mistral v3 tokenizer from its SentencePiece file: BPE with byte fallback and a leading-space marker."""
    pieces = list(_pieces(path.read_bytes()))
    vocabulary = {text: number for number, (text, _, _) in enumerate(pieces)}
    merges: list[tuple[float, str, str]] = []
    for text, score, kind in pieces:
        if kind != 1:  # 1 = normal
            continue
        for cut in range(1, len(text)):
            if text[:cut] in vocabulary and text[cut:] in vocabulary:
                merges.append((-score, text[:cut], text[cut:]))
    merges.sort(key=lambda merge: (merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    model = models.BPE(
        vocab=vocabulary, merges=[(a, b) for _, a, b in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = [text for text, _, kind in pieces if kind in (2, 3)]  # 2 = unknown, 3 = control
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _pieces(data: bytes) -> Iterator[tuple[str, float, int]]:
    """(piece, score, type) of a SentencePiece model file; type 1 where the file leaves it out."""
    for number, value in _fields(data):
        if number != 1:
            continue
        piece = dict(_fields(value))
        yield piece[1].decode(), struct.unpack("<f", piece[2])[0], piece.get(3, 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message: varints as int, the others as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}[wire]
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
