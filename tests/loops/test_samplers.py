"""Runs with samplers that have weights of their own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from loops.toy import metric_rows, rows, toy_config, trained, write_rows
from posttrain.cluster import worker_group
from posttrain.config import ConfigError, EvalRunConfig, RLConfig, load_config, parse_config
from posttrain.endpoint.app import App
from posttrain.loops import rl
from posttrain.loops.eval_run import evaluate_target
from posttrain.loops.generate import generate
from posttrain.loops.learner import Learner
from posttrain.loops.samplers import Sampling, ready_sampler
from posttrain.loops.serve import open_desk, served_target
from posttrain.loops.target import find_target
from posttrain.runs.metrics import Metrics
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.requests import SamplerError
from posttrain.trainer.policy import Policy
from posttrain.weights.publish import Publisher, WeightError
from sampler.listening import listening
from weights.own_copy import OwnCopy

SERVED = ["sampler.engine=vllm_server", "sampler.url=http://127.0.0.1:1/v1"]
COLOCATED = ["cluster.samplers=1", "cluster.colocated=true"]
SLEEPY = [*COLOCATED, "sampler.engine=vllm", "sampler.options.gpu_memory_utilization=0.3", "sampler.sleep=2"]
RECIPE = Path(__file__).resolve().parents[2] / "recipes/tiny_search.yaml"


def _own_copy(learner: Learner, tokenizer: Any, spread: Any) -> Sampling:
    config, policy = learner.config, learner.policy
    sampler = OwnCopy(Policy.from_config(config.model, version=10**9), tokenizer)
    return Sampling(sampler=sampler, publisher=Publisher(policy, sampler))


def test_weights_are_published_before_every_rollout_and_old_logprobs_are_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    shared = trained(toy_config(tmp_path / "shared"))
    monkeypatch.setattr(worker_group, "open_sampling", _own_copy)
    own = trained(toy_config(tmp_path / "own", sampler={"engine": "vllm"}))  # by name: it rounds otherwise
    assert not own.learner.sampler_shares_weights
    assert shared.learner.sampler_shares_weights
    for step, row in metric_rows(own).items():
        if step:
            assert row["weights/probe_gap"] < 1e-4
            assert row["gap/max"] < 1e-3
            assert row["gap/staleness"] == 0
            assert row["reward/mean"] == pytest.approx(metric_rows(shared)[step]["reward/mean"], abs=1e-6)
    assert own.sampling.sampler.version == own.learner.policy.version - 1, "the last update is not sampled from"


def test_weights_that_do_not_arrive_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(learner: Learner, tokenizer: Any, spread: Any) -> Sampling:
        sampling = _own_copy(learner, tokenizer, spread)
        first = sampling.sampler.load

        def load(tensors: Any, version: int) -> None:
            first(tensors if version == 0 else (), version)

        monkeypatch.setattr(sampling.sampler, "load", load)
        return sampling

    monkeypatch.setattr(worker_group, "open_sampling", deaf)
    run = rl.start(toy_config(tmp_path, optimizer={"lr": 1e-2}))
    try:
        with pytest.raises(WeightError, match="after giving version 1 to the sampler"):
            rl.train(run)
    finally:
        run.close()
    assert run.step == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampler.engine=server", "sampler.url=http://127.0.0.1:1/v1"], "a server's weights are its own"),
        (["sampler.engine=server"], "sampler.url goes with sampler.engine: vllm_server or server"),
        (["sampler.engine=vllm_server"], "sampler.url goes with sampler.engine: vllm_server or server"),
        (["sampler.engine=vllm", "sampling.engines=2"], "forwards side by side are the native engine's"),
        (["sampler.engine=vllm", "sampler.sleep=1", "sampling.max_staleness=1"], "samples while the trainer works"),
        (["sampler.engine=vllm", "trainer.ranks=2"], "vllm samples for a run on one rank"),
        (["sampler.options.max_bath=3"], r"no option of the engine native; did you mean max_batch\?"),
        (["sampler.options.kv_gib=-1"], r"sampler.options.kv_gib: Input should be greater than 0 \(got -1\)"),
        (["sampler.options.kv_gib='2 GB'"], r"sampler.options.kv_gib: Input should be a valid number \(got '2 GB'\)"),
        (["sampler.options.max_batch=0"], r"sampler.options.max_batch: .* greater than 0"),
        (["sampler.options.max_batch=null"], r"sampler.options.max_batch: .* valid integer"),
        ([*SERVED, "sampler.options.concurrency=many"], r"sampler.options.concurrency: .* valid integer"),
        (["sampler.transport=disk"], "go with sampler.engine: vllm or vllm_server, or with cluster.samplers"),
        (["cluster.samplers=1", "sampler.transport=memory"], "processes of their own; use shared, broadcast"),
        (
            ["cluster.samplers=1", "sampler.engine=vllm", "sampler.sleep=1"],
            "whose memory nobody else wants; leave it out",
        ),
        ([*SLEEPY, "sampling.max_staleness=0"], "samples while the trainer works"),
        ([*SLEEPY, "model.lora.rank=4"], "2 gives up all weights.*set 1, which keeps them"),
        ([*COLOCATED, "sampler.sleep=1"], "sampler.sleep goes with sampler.engine: vllm"),
        (["sampler.transport=shared"], "shared is for cluster.samplers, and there are none"),
        (["sampler.engine=vllm", "sampler.transport=shared"], "shared is for cluster.samplers, and there are none"),
        ([*SERVED, "sampler.transport=shared"], "shared does not reach a server"),
        (["cluster.colocated=true"], "cluster.colocated: it is for cluster.samplers, and there are none"),
        ([*COLOCATED, "sampler.transport=broadcast"], "NCCL joins no two processes of one GPU"),
        ([*COLOCATED, "sampler.engine=vllm"], "set gpu_memory_utilization or kv_cache_memory_bytes"),
        (
            [*COLOCATED, "sampler.engine=vllm", "sampler.options.kv_cache_memory_bytes=null"],
            "set gpu_memory_utilization or kv_cache_memory_bytes",
        ),
        ([*SERVED, "cluster.samplers=1"], "vllm_server samples elsewhere already"),
        (["cluster.sampler_restarts=1"], "it is for cluster.samplers, and there are none"),
        (["cluster.timeline=x.json"], "it is Ray's, and no cluster.ray is set"),
        (["sampler.folder=x"], "folder and max_probe_gap go with sampler.engine: vllm or vllm_server"),
        (["sampler.engine=vllm", "sampler.folder=x", "sampler.transport=memory"], "goes with sampler.transport: disk"),
        ([*SERVED, "sampler.transport=memory"], "memory does not reach a server"),
        ([*SERVED, "sampler.options.kv_gib=1"], "no option of the engine vllm_server"),
        ([*SERVED, "trainer.ranks=2"], "vllm_server samples for a run on one rank"),
        ([*SERVED, "sampler.sleep=1"], "sampler.sleep goes with sampler.engine: vllm"),
    ],
)
def test_sections_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RLConfig, RECIPE, overrides)


def test_the_options_of_the_native_engine_reach_it() -> None:
    config = load_config(RLConfig, RECIPE, ["sampler.options.max_batch=6", "sampling.engines=2"])
    sampler: Any = ready_sampler(config, None, lambda: Policy.from_config(config.model))
    assert [engine.limits.max_batch for engine in sampler.engines] == [3, 3]
    config = load_config(RLConfig, RECIPE, ["sampler.options.tokens_per_step=20"])
    with pytest.raises(ConfigError, match=r"sampler.options: need 1 <= max_batch \(256\) <= tokens_per_step \(20\)"):
        ready_sampler(config, None, lambda: Policy.from_config(config.model))


def test_a_missing_key_of_a_server_is_named() -> None:
    server = {"engine": "server", "url": "http://127.0.0.1:1/v1", "token_env": "NO_SUCH_KEY"}
    config = parse_config(EvalRunConfig, {"model": {"path": "m"}, "data": {}, "sampler": server})
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        ready_sampler(config, None, lambda: pytest.fail("no policy is needed"))


def test_an_evaluation_by_a_server_is_the_evaluation_in_this_process(tmp_path: Path) -> None:
    """Over HTTP, from `posttrain serve`: the same episodes, token by token, and no model is loaded here."""
    pytest.importorskip("uvicorn")
    settings = ["eval.max_tasks=6", "eval.temperature=0.8", "eval.samples_per_prompt=2"]
    near = evaluate_target(find_target(str(RECIPE), settings))
    desk = open_desk(served_target("tiny_search_base"))
    with listening(lambda: App(lambda key: desk)) as url:
        far = evaluate_target(find_target(str(RECIPE), [*settings, "sampler.engine=server", f"sampler.url={url}"]))
        answered = generate(
            find_target(str(RECIPE), ["sampler.engine=server", f"sampler.url={url}"]),
            str(write_rows(tmp_path / "asked.jsonl", rows())),
            tmp_path / "out.jsonl",
        )
    assert [t.token_ids for t in far.evaluation.trajectories] == [t.token_ids for t in near.evaluation.trajectories]
    assert far.as_dict() == near.as_dict()
    assert (answered.written, answered.invalid) == (4, 0)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="install it"):
        rl.start(toy_config(tmp_path, sampler={"engine": "vllm"}))


TWO_TURNS = """
from posttrain.envs import Observation, SingleTurnEnv, Step

class TwoTurns(SingleTurnEnv):
    max_turns, said = 2, 0

    async def step(self, action):
        self.said += 1
        return Step(observation=Observation(text=" more "), done=self.said == 2)
"""


@pytest.mark.parametrize("sampling", [{}, {"max_staleness": 1}])
@pytest.mark.parametrize("rows_of_128", [2, 64])
def test_a_step_says_what_the_kv_cache_did_for_it(tmp_path: Path, rows_of_128: int, sampling: dict[str, int]) -> None:
    """8 episodes that wait for a second turn do not fit into 2 rows, and fit into 64."""
    (tmp_path / "env.py").write_text(TWO_TURNS)
    policy = Policy.from_config(toy_config(tmp_path).model)
    kv_bytes = rows_of_128 * 128 * NativeSampler(policy).engines[0].cache.bytes_per_token
    options = {"kv_gib": kv_bytes / 2**30}
    env = {"name": f"{tmp_path}/env.py:TwoTurns"}
    engines = {"engines": 1} | sampling
    run = trained(toy_config(tmp_path, env=env, sampler={"options": options}, sampling=engines))
    timing = [json.loads(line) for line in (run.directory.path / "timing.jsonl").read_text().splitlines()]
    assert [row["step"] for row in timing] == [1, 2]
    for row in timing if not sampling else timing[:1]:  # step 2 may have been rolled out ahead, whole
        assert 0 < row["sampler/cache_hit_rate"] < 1
        assert 1 <= row["sampler/batch_size"] <= 16
    assert (sum(row["sampler/evictions"] for row in timing) > 0) == (rows_of_128 == 2)
    done = run.sampling.sampler.counters()
    for name in ("tokens_prefilled", "tokens_reused", "evictions"):
        assert sum(row[f"sampler/{name}"] for row in timing) == done[name]


def test_what_a_sampler_does_not_count_is_in_no_row() -> None:
    class Frugal:
        def counters(self) -> dict[str, int]:
            return {"tokens_prefilled": 30, "tokens_reused": 10}

    metrics = Metrics()
    Sampling(sampler=Frugal()).record(metrics)
    expected = {"sampler/cache_hit_rate": 0.25, "sampler/tokens_prefilled": 30.0, "sampler/tokens_reused": 10.0}
    assert metrics.reduce() == expected
