"""The models and the tokenizer of the benchmarks, written to a folder in Hugging Face layout for any contender.

python benchmarks/tiny.py FOLDER [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.work import MODELS, words


def write_tiny(folder: Path) -> Path:
    """A random Qwen3 of 3.7 million parameters."""
    return write_model(folder, "tiny")


def write_model(folder: Path, model: str | Mapping[str, Any], device: str = "cpu") -> Path:
    """A random model, by name or by its sizes, float32 on a CPU and bfloat16 elsewhere; one word is one token."""
    shape = MODELS[model] if isinstance(model, str) else model
    config = AutoConfig.for_model(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    if device != "cpu":
        torch.cuda.empty_cache()
    ids = {word: i for i, word in enumerate(("<pad>", "<bos>", "<eos>", *words(shape["vocab_size"])))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), *sys.argv[2:])
