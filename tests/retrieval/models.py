"""Small encoders and rerankers with random weights, written as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:;'\"?!-"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def write_tokenizer(folder: Path) -> None:
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=1000))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)


def write_encoder(folder: Path, *, seed: int = 0, hidden_size: int = 16) -> Path:
    """A BERT without anything of sentence-transformers."""
    torch.manual_seed(seed)
    BertModel(BertConfig(**(SIZES | {"hidden_size": hidden_size}))).eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_t5(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(VOCABULARY), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5EncoderModel(T5Config(**sizes, pad_token_id=0)).eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_reranker(folder: Path, *, labels: int = 1) -> Path:
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels)).eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def describe(folder: Path, modules: list[tuple[str, dict[str, Any]]], **files: dict[str, Any]) -> Path:
    """Adds sentence-transformers' files: (kind, config) of each module, and further files by stem."""
    listed = []
    for number, (kind, config) in enumerate(modules):
        path = "" if kind == "Transformer" else f"{number}_{kind}"
        listed.append({"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"})
        if path:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder
