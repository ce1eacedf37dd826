"""Runs whose tools come from MCP servers in child processes: a public one from the registry, and ours."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.boundary.processes import living
from posttrain.envs.tiny_world import train_rows
from posttrain.loops import rl
from posttrain.runs.trajectories import read_trajectories
from posttrain.tools.guards import Guard
from posttrain.trajectory import CallStatus, Source, Trajectory

from .toy import toy_config

pytest.importorskip("fastmcp", reason="needs the extra `tools`")
ENV = '''
from posttrain.chat.calls import PlainTags
from posttrain.envs.tools import ToolEnv


class TaggedEnv(ToolEnv):
    """The packaged policy searches; here its searches are calls of the server's tool."""

    def __init__(self, *, tools, max_turns, describe):
        super().__init__(tools=tools, syntax="search_r1", max_turns=max_turns, describe=describe)
        self.syntax = PlainTags("times", {"search": "get_current_time"})
'''
# It writes a line when a call begins and when it ends; one call ends the server, another one takes too long.
SERVED = '''
import asyncio
import os
from pathlib import Path

LOG = Path(os.environ["CALLS"])


def note(*words):
    with LOG.open("a") as file:
        print(os.getpid(), *words, file=file)


async def search(query: str) -> str:
    """Finds what is written about a person, place or organisation.

    Args:
        query: its name, or a few words
    """
    number = LOG.read_text().count("begin") if LOG.exists() else 0
    note("begin", query)
    if number == 5:
        os._exit(9)
    await asyncio.sleep(30.0 if number == 10 else 0.1)
    note("end", query)
    return f"Nothing is known of {query}."
'''
TOOLS = {"max_turns": 2, "describe": "text"}
LIMITS = {"max_turn_tokens": 32, "max_prompt_tokens": 1536, "max_observation_tokens": 256, "max_episode_tokens": 2048}


def asks(count: int) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("id", "question", "answer")} for row in list(train_rows(seed=0))[:count]]


def run_with(folder: Path, **sections: Any) -> rl.Run:
    batch = {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 8192}
    # the packaged policy has never seen a description of tools, and is soon confused
    calm = {"sampling": {"temperature": 0.3}, "optimizer": {"lr": 1e-6}}
    return rl.start(toy_config(folder, tasks=asks(4), limits=LIMITS, batch=batch, **calm, **sections))


def stored(run: rl.Run) -> list[Trajectory]:
    files = sorted(run.directory.trajectories.glob("*.parquet"))
    assert len(files) == 2
    return [trajectory for file in files for trajectory in read_trajectories(file)]


def prompt_of(run: rl.Run, trajectory: Trajectory) -> str:
    ids = [id_ for id_, source in zip(trajectory.token_ids, trajectory.source, strict=True) if source is Source.PROMPT]
    return run.parts.tokenizer.decode(ids)


def statuses(trajectories: Sequence[Trajectory]) -> list[CallStatus]:
    return [call.status for trajectory in trajectories for turn in trajectory.turns for call in turn.calls]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def rows_of(run: rl.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory.path / "metrics.jsonl").read_text().splitlines()]


def test_a_public_server_is_killed_between_steps_and_used_on(tmp_path: Path):
    """`mcp-server-time`; the policy's searches are its time zones, which it refuses, one by one."""
    pytest.importorskip("mcp_server_time")
    (tmp_path / "env.py").write_text(ENV)
    server = {"command": sys.executable, "args": ["-m", "mcp_server_time"], "tools": ["get_current_time"]}
    run = run_with(tmp_path, env={"name": f"{tmp_path}/env.py:TaggedEnv", "options": TOOLS}, mcp=[server])
    tool: Any = run.parts.tools["get_current_time"]
    while isinstance(tool, Guard):
        tool = tool.tool
    connection, alive = tool._shared.connection, list[set[int]]()

    def kill(step: int, row: object) -> None:
        alive.append(living(connection._open.link.token))
        if step == 1:
            for pid in alive[0]:
                os.kill(pid, signal.SIGKILL)
        else:
            assert connection.restarts == 1

    run.on_row = kill
    rl.train(run)
    before, after = alive
    assert before
    assert after
    assert not before & after
    assert not any(map(exists, after)), "the run ends what it started"
    for row in rows_of(run):
        assert row["tools/calls/get_current_time"] > 0
    trajectories = stored(run)
    assert set(statuses(trajectories)) <= {CallStatus.FAILED, CallStatus.EMPTY, CallStatus.OVER_BUDGET}
    shown = prompt_of(run, trajectories[0])
    assert "get_current_time" in shown
    assert "IANA timezone name" in shown
    said = "".join(run.parts.tokenizer.decode(trajectory.token_ids) for trajectory in trajectories)
    assert "Invalid timezone" in said
    run.close()


def test_our_server_dies_and_hangs_in_the_midst_of_a_step(tmp_path: Path):
    """The call during which the server dies is repeated and succeeds, however long the server takes to come back; the
    one that hangs is stopped at the deadline that the server has for it."""
    (tmp_path / "served.py").write_text(SERVED)
    offer = {"tools": [{"location": "served.py:search", "limits": {"seconds": 3, "retries": 0}}]}
    (tmp_path / "tools.yaml").write_text(json.dumps(offer))  # JSON is YAML
    log = tmp_path / "calls.txt"
    server = {
        "command": sys.executable,
        "args": ["-m", "posttrain", "serve-tools", "--config", "tools.yaml", "--stdio"],
        "cwd": str(tmp_path),
        "env": {"CALLS": str(log)},
        "limits": {"seconds": 60, "retries": 2, "backoff_seconds": 0},
    }
    run = run_with(tmp_path, env={"name": "tools", "options": TOOLS | {"syntax": "search_r1"}}, mcp=[server])
    rl.train(run)
    run.close()
    lines = [line.split(" ", 2)[:2] for line in log.read_text().splitlines()]
    assert len({pid for pid, _ in lines}) == 2, "one server, and the one after it"
    running, most = Counter[str](), Counter[str]()
    for pid, word in lines:
        running[pid] += 1 if word == "begin" else -1
        most[pid] = max(most[pid], running[pid])
    assert min(most.values()) > 1, "episodes call at the same time"
    trajectories = stored(run)
    outcomes = statuses(trajectories)
    assert outcomes.count(CallStatus.OK) >= 10
    assert outcomes.count(CallStatus.TIMEOUT) == 1
    assert CallStatus.FAILED not in outcomes
    shown = prompt_of(run, trajectories[0])
    assert "search" in shown
    assert "its name, or a few words" in shown
    assert sum(row["tools/calls/search"] for row in rows_of(run)) == outcomes.count(CallStatus.OK) + 1
