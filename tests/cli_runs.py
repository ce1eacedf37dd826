"""Runs the command line as people do, in this process: what it printed, its exit code, and no traceback."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main

SMALL_RUN: dict[str, Any] = {
    "run": {"name": "small", "steps": 1},
    "model": {"path": "tiny_search_base"},
    "data": {
        "train": [{"path": "posttrain.envs.tiny_world:train_rows", "options": {"seed": 0}, "limit": 32}],
        "eval": [{"path": "posttrain.envs.tiny_world:eval_rows", "options": {"seed": 0}, "limit": 32}],
    },
    "env": {"name": "search", "options": {"max_turns": 3}},
    "retrieval": {"corpus": "posttrain.envs.tiny_world:passages", "corpus_options": {"seed": 0}, "top_k": 2},
    "reward": {"name": "em"},
    "limits": {"max_turn_tokens": 48, "max_observation_tokens": 128, "max_episode_tokens": 448},
    "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "optimizer": {"lr": 3e-4},
    "eval": {"every": 1, "max_tasks": 2},
}


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """What it said; it must have failed as a program fails that knows what is wrong."""
        assert self.code == 1, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert len(re.findall("^error: ", self.err, flags=re.MULTILINE)) == 1
        return self.err


Command = Callable[..., Ran]


def command_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(folder)
    capfd.readouterr()

    def run(*arguments: str | Path, typed: bytes = b"") -> Ran:
        """typed: what stands on the standard input."""
        monkeypatch.setattr(sys, "argv", ["posttrain", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8", "surrogateescape"))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capfd.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


def write_config(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A run of seconds with `changes` (section -> its new content; None removes the section)."""
    config = {**SMALL_RUN, **(changes or {})}
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path
