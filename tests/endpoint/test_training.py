"""An unmodified agent, trained through the endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loops.toy import metric_rows, toy_config, trained
from posttrain.config import ConfigError, RLConfig, load_config, parse_config
from posttrain.loops import rl
from posttrain.loops.build import load_parts

ROOT = Path(__file__).resolve().parents[2]
AGENT = """
import httpx

async def agent(task, base_url, api_key):
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, verify=False) as client:
        messages = [*task.prompt]
        for _ in range(2):
            got = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
            messages += [got.json()["choices"][0]["message"], {"role": "user", "content": "Where was it?"}]
    return len(set(messages[1]["content"])) / 100

async def broken(task, base_url, api_key):
    raise ValueError("no weather today")
"""


def config_of(folder: Path, name: str = "agent", **sections: Any) -> RLConfig:
    (folder / "agent.py").write_text(AGENT)
    env = {"name": "external", "options": {"agent": f"{folder / 'agent.py'}:{name}"}}
    made = toy_config(folder, env=env, **sections).model_dump(mode="json")
    return parse_config(RLConfig, made | {"reward": {"name": "env"}})


def test_a_run_with_an_external_agent_trains_on_what_the_endpoint_recorded(tmp_path: Path):
    run = trained(config_of(tmp_path))
    assert run.learner.policy.version == 2
    for row in list(metric_rows(run).values())[-2:]:
        assert row["rollout/scored"] == 8
        assert row["rollout/turns"] == 2
        assert row["rollout/trajectories"] == 1
        assert row["gap/max"] < 1e-4, "the log-probs are those of the policy at these very tokens"


def test_the_same_seeds_give_the_same_episodes(tmp_path: Path):
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run = trained(config_of(tmp_path / name, run={"steps": 1}))
        rows = metric_rows(run)[1]
        texts.append((rows["reward/mean"], rows["rollout/policy_tokens"], rows["rollout/total_tokens"]))
    assert texts[0] == texts[1]


def test_a_run_whose_agent_always_fails_stops_and_says_why(tmp_path: Path):
    run = rl.start(config_of(tmp_path, "broken"))
    try:
        with pytest.raises(RuntimeError, match="no weather today"):
            rl.train(run)
    finally:
        run.close()


def test_wrong_options_are_found_before_the_model_loads(tmp_path: Path):
    config = config_of(tmp_path, "agnt")
    with pytest.raises(ConfigError, match="Did you mean 'agent'"):
        load_parts(config)
    with pytest.raises(ConfigError, match="syntax"):
        parse_config(RLConfig, config.model_dump(mode="json") | {"env": {"name": "external", "options": {"sintax": 1}}})


@pytest.mark.slow
def test_an_agent_of_the_openai_agents_sdk_learns_to_search(tmp_path: Path):
    pytest.importorskip("agents")
    overrides = [
        "run.steps=6",
        f"run.dir={tmp_path / 'run'}",
        "run.sinks=[]",
        "eval.max_tasks=32",
        f"env.options.agent={json.dumps(str(ROOT / 'recipes' / 'openai_agents.py') + ':agent')}",
    ]
    run = trained(load_config(RLConfig, ROOT / "recipes" / "openai_agents.yaml", overrides))
    rewards = [row["reward/mean"] for row in metric_rows(run).values() if "reward/mean" in row]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.6
    assert run.measured["eval/reward"] > 0.8
