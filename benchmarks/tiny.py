"""The model and tokenizer of the CPU benchmarks, written to a folder in Hugging Face layout. Any contender can run it.

python benchmarks/tiny.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.work import TINY, WORDS


def write_tiny(folder: Path) -> Path:
    """A random Qwen3 of 3.7 million parameters; one word is one token."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(folder)
    words = {word: i for i, word in enumerate(("<pad>", "<bos>", "<eos>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    write_tiny(Path(sys.argv[1]))
