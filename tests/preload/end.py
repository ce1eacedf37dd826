"""Imported last: a child need not work out again what is the same in all, nor look for garbage in it, nor copy it."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # of the names of all models there are: seconds of regular expressions
gc.freeze()
gc.enable()
