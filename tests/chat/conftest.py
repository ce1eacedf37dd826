"""Real and toy tokenizers for the chat tests."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# The tokens of each template that the Qwen3 tokenizer lacks. Special, as they are in the models' own tokenizers.
TEMPLATE_TOKENS: dict[str, tuple[str, ...]] = {
    "cohere": (
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "glm4moe": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "llama3": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
    ),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "smolvlm": ("<end_of_utterance>",),
}  # fmt: skip
BOS_EOS: dict[str, tuple[str | None, str]] = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("<bos>", "<eos>"),
    "glm4moe": (None, "<|endoftext|>"),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>"),
    "phi3": (None, "<|endoftext|>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}


@pytest.fixture(scope="session")
def templates(shared_data: Path) -> Path:
    return shared_data / "chat_templates"


@pytest.fixture(scope="session")
def qwen3_json(shared_data: Path) -> str:
    with lzma.open(shared_data / "tokenizers" / "qwen3.tokenizer.json.xz") as file:
        return file.read().decode()


@pytest.fixture(scope="session")
def qwen3_with(qwen3_json: str, templates: Path) -> Callable[[str], PreTrainedTokenizerFast]:
    """The real Qwen3 tokenizer with the named template and that template's own tokens."""
    made: dict[str, PreTrainedTokenizerFast] = {}

    def make(name: str) -> PreTrainedTokenizerFast:
        if name not in made:
            family = next((family for family in TEMPLATE_TOKENS if name.startswith(family)), None)
            backend = Tokenizer.from_str(qwen3_json)
            bos, eos = BOS_EOS[family] if family else (None, "<|im_end|>")
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>"
            )
            if family:
                tokenizer.add_special_tokens({"additional_special_tokens": list(TEMPLATE_TOKENS[family])})
            tokenizer.chat_template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
            made[name] = tokenizer
        return made[name]

    return make


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
