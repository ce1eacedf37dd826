"""`posttrain serve` as people start it, asked by the openai SDK."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from forked import COMMAND, Program
from posttrain.loops.serve import served_target
from posttrain.runs.config_file import ConfigError
from posttrain.runs.trajectories import read_trajectories
from posttrain.trajectory import Source

openai = pytest.importorskip("openai")
SERVE = ("serve", "tiny_search_base", "--port", "0")
SECONDS = 120
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def address_of(process: Program, said: Path) -> str:
    ends = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < ends:
        found = re.search(r"serving at .*?(\S+)\n", said.read_text() if said.is_file() else "")
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"it does not serve: {process.ended(0)}")


def test_a_model_is_served_with_a_key_and_recorded(tmp_path: Path):
    options = ["--syntax", "search_r1", "--record", str(tmp_path / "seen"), "--token-env", "SERVE_KEY"]
    key = "import os; os.environ['SERVE_KEY'] = 'open sesame'"
    process = Program(tmp_path, *SERVE, *options, code=f"{key}; {COMMAND}")
    url = address_of(process, tmp_path / "stderr")
    try:
        with openai.OpenAI(base_url=url, api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=url, api_key="open sesame") as client:
            messages = [{"role": "user", "content": "Where was Bafi Gole born?"}]
            asked = {"model": "m", "max_tokens": 16, "tools": [SEARCH], "temperature": 0}
            texts = [client.chat.completions.create(messages=messages, **asked).choices[0].message for _ in range(2)]
            assert texts[0].content == texts[1].content, "temperature 0 is honoured"
            with pytest.raises(openai.BadRequestError, match="max_episode_tokens=1024") as caught:
                client.chat.completions.create(messages=[{"role": "user", "content": "x " * 2000}], **asked)
            assert caught.value.code == "context_length_exceeded"
    finally:
        os.kill(process.pid, signal.SIGTERM)
        status, _, said = process.ended(SECONDS)
    assert status == 0, said
    first, second = read_trajectories(tmp_path / "seen" / "step-000001.parquet")
    assert first.token_ids == second.token_ids
    assert Source.POLICY not in first.source, "another temperature than the training's: recorded, but no policy token"


def test_a_model_needs_no_config_and_settings_need_one():
    assert served_target("tiny_search_base").config.model.path == "tiny_search_base"
    with pytest.raises(ConfigError, match="--config"):
        served_target("tiny_search_base", ["limits.max_turns=3"])
