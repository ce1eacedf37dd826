"""Real and toy tokenizers for the chat tests."""

from __future__ import annotations

import copy
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
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
    """The real Qwen3 tokenizer with the named template; templates of other models get their own tokens added."""
    pure = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(qwen3_json), pad_token="<|endoftext|>")
    extended = copy.deepcopy(pure)
    extra = dict.fromkeys(text for tokens in TEMPLATE_TOKENS.values() for text in tokens)
    extended.add_special_tokens({"additional_special_tokens": list(extra)})

    def make(name: str) -> PreTrainedTokenizerFast:
        family = next((family for family in TEMPLATE_TOKENS if name.startswith(family)), None)
        bos, eos = BOS_EOS[family] if family else (None, "<|im_end|>")
        tokenizer = copy.copy(extended if family else pure)  # shares the backend: loading it takes a second
        tokenizer._special_tokens_map = dict(tokenizer._special_tokens_map)
        tokenizer.bos_token, tokenizer.eos_token = bos, eos
        tokenizer.chat_template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
        return tokenizer

    return make
