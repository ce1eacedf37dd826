"""`posttrain export`: the model of a run as a directory that any program loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from posttrain.config import ConfigError
from posttrain.loops.build import load_tokenizer
from posttrain.loops.target import Target, check_place


def export_target(target: Target, out: Path) -> int:
    """Hugging Face layout with its tokenizer, adapters merged and, as they are, in `adapter/`; returns the bytes.

    What is at `out` is whole or not there. Raises ConfigError where something is there already, and ModelError as
    `Policy.from_config` does.
    """
    if out.exists():
        raise ConfigError([f"{out} is there already; name a directory that is not"])
    check_place(out.parent, "OUT")
    tokenizer, policy = load_tokenizer(target.config.model.path), target.load_policy()
    draft = out.with_name(f".draft-{out.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        policy.save(draft, tokenizer)
        os.rename(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
