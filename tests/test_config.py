"""An RL config is complete and consistent before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.algorithms import ADVANTAGES, LOSSES
from posttrain.config import ConfigError, RLConfig, config_yaml, key_names, load_config, parse_config, plan_of

BASE = """
run: {name: tiny, seed: 3, steps: 10}
model: {path: models/tiny}
data: {train: train.parquet, eval: eval.jsonl}
"""


@pytest.fixture
def load(tmp_path: Path):
    def run(*overrides: str, text: str = BASE) -> RLConfig:
        path = tmp_path / "rl.yaml"
        path.write_text(text)
        return load_config(RLConfig, path, overrides)

    return run


def refused(load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_a_short_config_has_working_defaults(load):
    config = load()
    assert config.run.directory == Path("runs/tiny")
    assert (config.algorithm.advantage, config.algorithm.loss, config.env.name) == ("grpo", "ppo_clip", "single_turn")
    assert config.evaluates
    assert load("run.dir=/some/where").run.directory == Path("/some/where")


def test_a_resolved_config_loads_back_equal(load, tmp_path: Path):
    config = load(
        "env.name=search",
        "retrieval={corpus: c.jsonl, top_k: 2}",
        "algorithm={clip_high: 0.28, std: none, kl_coef: 1e-3}",
        "data.train=[{path: a.parquet, weight: 2, where: {level: [1, 2]}}, {path: b.jsonl, weight: 1.5}]",
        "checkpoint={keep_best: eval/reward, every: 4}",
        "eval.every=2",
    )
    (tmp_path / "saved.yaml").write_text(config_yaml(config))
    assert load_config(RLConfig, tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.sample_per_prompt=4", "Did you mean 'batch.samples_per_prompt'?"),
        ("optimizer.learning_rat=1", "Known here: betas, eps, lr"),
        ("algorithm.clip_hi=0.2", "Did you mean 'algorithm.clip_high'?"),
        ("limits.max_turn=4", "Did you mean 'limits.max_turns'?"),
        ("data.trian=x.parquet", "Did you mean 'data.train'?"),
        ("data.train=[{path: a, weigth: 1}]", "Did you mean 'data.train[0].weight'?"),
        ("model.pth=x", "Did you mean 'model.path'?"),
        ("critic.value_clp=0.1", "Did you mean 'critic.value_clip'?"),
        ("reward.optons={}", "Did you mean 'reward.options'?"),
        ("retrieval.topk=3", "Did you mean 'retrieval.top_k'?"),
        ("checkpoint.keep_bets=x", "Did you mean 'checkpoint.keep_best'?"),
        ("eval.evry=1", "Did you mean 'eval.every'?"),
        ("sampling.temprature=1", "Did you mean 'sampling.temperature'?"),
        ("env.nme=x", "Did you mean 'env.name'?"),
        ("envs.mine.nme=x", "Did you mean 'envs.mine.name'?"),
        ("run.step=1", "Did you mean 'run.steps'?"),
    ],
)
def test_p126_misspelt_keys_of_every_section(load, override: str, message: str):
    assert message in refused(load, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.betas=[1, 0.9]", "optimizer.betas: both must be >= 0 and < 1, got (1.0, 0.9)"),
        ("optimizer.betas=[0.9, -1]", "optimizer.betas: both must be >= 0 and < 1, got (0.9, -1.0)"),
        ("sampler.options={kv_gib: 1e300}", "sampler.options.kv_gib: Input should be less than or equal to 1000000000"),
        ("algorithm.advantage=gpro", "algorithm.advantage: unknown advantage 'gpro'. Did you mean 'grpo'?"),
        ("algorithm.loss=ppo_clp", "Did you mean 'ppo_clip'?"),
        ("algorithm.aggregate=tokenmean", "Did you mean 'token_mean'?"),
        ("algorithm.kl_estimator=k9", "algorithm.kl_estimator: unknown kl_estimator 'k9'"),
        ("env.name=serach", "env.name: unknown env 'serach'. Did you mean 'search'?"),
        ("reward.name=emm", "unknown reward 'emm'"),
        ("run.sinks=[wandd]", "Did you mean 'wandb'?"),
        ("checkpoint.keep_best=eval/rewrad", "did you mean 'eval/reward'"),
    ],
)
def test_wrong_values_and_misspelt_names_of_functions(load, override: str, message: str):
    assert message in refused(load, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env=search", 'env is a section of keys (got "search"); did you mean env.name=search?'),
        ("envs.mine=search", 'envs.mine is a section of keys (got "search"); did you mean envs.mine.name=search?'),
        ("reward.parts.mine=5", "reward.parts.mine is a section of keys (got 5); it has name, options, weight"),
        ("limits=300", "limits is a section of keys (got 300); it has call_seconds, cut_marker, episode_seconds"),
        ("run.sinks=console", 'run.sinks: Input should be a list, as in [a, b] (got "console")'),
    ],
)
def test_a_value_in_the_place_of_a_section_or_a_list(load, override: str, message: str):
    assert message in refused(load, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.samples_per_prompt=1"], "batch.samples_per_prompt: grpo compares the episodes of one prompt"),
        (["batch={prompts_per_step: 6, prompts_per_mini_batch: 4}"], "batch.prompts_per_mini_batch: 4 does not divide"),
        (["sampling.top_p=0.9"], "sampling.top_p: 0.9 would train on other probabilities"),
        (["sampling.top_k=20"], "sampling.top_k: 20 would train on other probabilities"),
        (["sampling.temperature=0"], "sampling.temperature: Input should be greater than or equal to 0.0001"),
        (["trainer.tensor_parallel=2", "model.compile=true"], "model.compile: layers that trainer.tensor_parallel = 2"),
        (["trainer.deepspeed.stage=2"], "trainer.deepspeed: trainer.backend is fsdp2, which has no use for it"),
        (["trainer.backend=deepspeed", "cluster.samplers=1"], "cluster.samplers: what DeepSpeed divides is not sent"),
        (
            ["trainer.backend=deepspeed", "checkpoint.sharded=true"],
            "checkpoint.sharded: DeepSpeed's parts are gathered",
        ),
        (
            ["trainer.backend=deepspeed", "trainer.reshard_after_forward=false"],
            "trainer.reshard_after_forward: with DeepSpeed that is trainer.deepspeed.stage: 2",
        ),
        (
            ["trainer.backend=deepspeed", "trainer.tensor_parallel=2"],
            "trainer.tensor_parallel: DeepSpeed divides no layers",
        ),
        (
            ["trainer.backend=deepspeed", "trainer.deepspeed.stage=2", "trainer.offload=true"],
            "trainer.offload: DeepSpeed's stage 2 takes no step after one that was skipped",
        ),
        (
            ["trainer.backend=deepspeed", "model.compile=true"],
            "model.compile: layers that ZeRO-3 gathers part by part are not compiled",
        ),
        (["trainer.backend=ddp", "trainer.tensor_parallel=2"], "trainer.tensor_parallel: ddp has every layer whole"),
        (["trainer.backend=ddp", "checkpoint.sharded=true"], "checkpoint.sharded: what ddp divides is gathered"),
        (["trainer.backend=ddp", "trainer.offload=true"], "trainer.offload: what ddp divides stays on the GPU"),
        (
            ["trainer.backend=ddp", "trainer.reshard_after_forward=false"],
            "trainer.reshard_after_forward: with ddp layers are always there",
        ),
        (["trainer.megatron.expert_parallel=2"], "trainer.megatron: trainer.backend is fsdp2, which has no use for it"),
        (["trainer.backend=megatron", "checkpoint.sharded=true"], "checkpoint.sharded: Megatron-core's parts are"),
        (["trainer.backend=megatron", "model.lora={}"], "model.lora: Megatron-core's layers take no adapters"),
        (
            ["trainer.backend=megatron", "trainer.offload=true"],
            "trainer.offload: Megatron-core's parts stay on the GPU",
        ),
        (["trainer.backend=megatron", "model.compile=true"], "model.compile: Megatron-core's layers are not compiled"),
        (
            ["trainer.backend=megatron", "trainer.sequence_parallel=2"],
            "trainer.sequence_parallel: Megatron-core's layers share no micro-batch",
        ),
        (
            ["trainer.backend=megatron", "trainer.reshard_after_forward=false"],
            "trainer.reshard_after_forward: Megatron-core's layers are never gathered",
        ),
        (
            ["trainer.sequence_parallel_kind=ring"],
            "trainer.sequence_parallel_kind: ring is a way to share micro-batches",
        ),
        (["batch.tokens_per_micro_batch=512"], "512 tokens cannot hold an episode of limits.max_episode_tokens = 4096"),
        (["algorithm.gamma=0.9"], "algorithm.gamma: no chosen function takes it (grpo, ppo_clip, token_mean, k3)"),
        (["algorithm.options={mine: 1}"], "algorithm.options.mine: no chosen function takes it"),
        (["algorithm.advantage=gae"], "gae needs values: add a `critic:` section"),
        (["critic={}"], "critic: grpo uses no critic"),
        (["env.name=search"], "env: search searches: add a `retrieval:` section"),
        (["retrieval.url=http://localhost:8000"], "retrieval: the env single_turn takes no retriever"),
        (["env={name: search, options: {top_k: 2}}", "retrieval.corpus=c"], "env.options.top_k"),
        (["env.options.max_trns=2", "env.name=search", "retrieval.corpus=c"], "Did you mean 'max_turns'?"),
        (["retrieval={corpus: a, index: b}"], "exactly one of corpus, index and url"),
        (["data.train=[]"], "data.train names no files"),
        (["data.eval=[]", "eval.every=2"], "eval: there is nothing to evaluate on"),
        (["data.eval=[]", "checkpoint.keep_best=eval/reward"], "checkpoint.keep_best: nothing measures it"),
        (["checkpoint={keep_best: eval/reward, every: 5}", "eval.every=2"], "5 is no multiple of eval.every = 2"),
        (["run.name=a/b"], "run.name: String should match pattern"),
        (["run.name=.."], "run.name: String should match pattern"),
    ],
)
def test_values_that_do_not_fit_together(load, overrides: list[str], message: str):
    assert message in refused(load, *overrides)


def test_comparisons_name_the_line_in_the_file(load):
    with pytest.raises(ConfigError, match=r"rl.yaml:6: batch.samples_per_prompt: grpo compares"):
        load(text=BASE + "batch:\n  samples_per_prompt: 1\n")
    with pytest.raises(ConfigError, match=r"rl.yaml:7: env.options: unknown option of search 'max_trns'"):
        load(text=BASE + "env:\n  name: search\n  options: {max_trns: 1}\n")


def test_p88_a_group_of_one_is_allowed_where_no_group_is_compared(load):
    config = load("batch.samples_per_prompt=1", "algorithm.advantage=gae", "critic={}")
    assert config.batch.samples_per_prompt == 1


def test_options_reach_the_functions_that_take_them(load):
    algorithm = load("algorithm={clip_low: 0.1, clip_high: 0.3, std: population}").algorithm
    assert algorithm.functions["advantage"] is ADVANTAGES["grpo"]
    assert algorithm.functions["loss"] is LOSSES["ppo_clip"]
    assert algorithm.options_of("advantage") == {"std": "population"}
    assert algorithm.options_of("loss") == {"clip_low": 0.1, "clip_high": 0.3}
    assert algorithm.options_of("aggregate") == {}


def test_own_functions_and_envs_by_file(load, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(logprobs, old_logprobs, advantages, mask, episode_index, *, sharpness=1.0): ...\n"
        "class World:\n    stop_strings = ()\n    max_turns = 1\n    def __init__(self, size=3): ...\n"
        "    async def reset(self, task): ...\n    async def step(self, action): ...\n    async def close(self): ...\n"
        "class Half:\n    async def reset(self, task): ...\n"
    )
    config = load(
        f"algorithm={{loss: '{path}:loss', options: {{sharpness: 2}}}}",
        f"env={{name: '{path}:World', options: {{size: 4}}}}",
    )
    assert config.algorithm.options_of("loss") == {"sharpness": 2}
    assert not config.env.takes_retriever
    assert config.env.factory(**config.env.options).max_turns == 1
    assert "lacks step, close" in refused(load, f"env.name={path}:Half")
    assert "Did you mean 'World'?" in refused(load, f"env.name={path}:Wrld")


def test_p128_plan_counts_optimizer_steps_and_moves_the_rate_by_them(load):
    config = load(
        "run.steps=10",
        "batch={prompts_per_step: 64, samples_per_prompt: 8, prompts_per_mini_batch: 16, epochs: 3}",
        "optimizer={lr: 1e-3, schedule: linear, warmup_optimizer_steps: 20}",
        "eval.every=5",
        "checkpoint.every=4",
    )
    plan = plan_of(config, train_tasks=320)
    assert plan.optimizer_steps == 10 * 3 * 4
    assert plan.lr_first == pytest.approx(1e-3 / 20)
    assert plan.lr_last == pytest.approx(0.0, abs=1e-12)
    assert plan.eval_steps == (0, 5, 10)
    assert plan.checkpoint_steps == (4, 8, 10)
    assert plan_of(load("data.eval=[]"), train_tasks=320).eval_steps == ()


def test_sections_are_closed_and_frozen():
    """Every model in the tree refuses unknown keys and later writes."""
    from posttrain.runs.config_file import _models_in

    seen = set()
    waiting = [RLConfig]
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        assert model.model_config.get("extra") == "forbid", f"{model.__name__} takes unknown keys"
        assert model.model_config.get("frozen") is True, f"{model.__name__} can be written to"
        for info in model.model_fields.values():
            waiting.extend(_models_in(info.annotation))
    assert len(seen) > 12


def test_key_names_are_what_a_user_can_set():
    names = key_names(RLConfig)
    for key in ("run.seed", "run.steps", "run.dir", "checkpoint.every", "batch.tokens_per_micro_batch", "optimizer.lr"):
        assert key in names


def test_configs_made_in_code_get_the_same_checks():
    with pytest.raises(ConfigError, match="config: section 'model' is missing"):
        parse_config(RLConfig, {"data": {"train": "a"}})


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.path=${oc.env:SOME_API_KEY}", "model.path"),
        ("run.name=s3cret-0123456789", "run.name"),
        ('mcp=["server --key ${oc.env:SOME_API_KEY}"]', "mcp[0]"),
        ('mcp=[{command: server, env: {KEY: "${oc.env:SOME_API_KEY}"}}]', "mcp[0].env.KEY"),
    ],
)
def test_a_secret_of_the_environment_in_a_config_is_refused(
    load, monkeypatch: pytest.MonkeyPatch, override: str, key: str
):
    """The config is stored with the run, printed by `plan` and shown by the viewer."""
    monkeypatch.setenv("SOME_API_KEY", "s3cret-0123456789")
    said = refused(load, override)
    assert f"{key}: holds the value of SOME_API_KEY" in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    "override",
    [
        "mcp=['http://user:s3cret-0123456789@host/mcp']",
        "mcp=['https://host/mcp?exaApiKey=s3cret-0123456789']",
        "mcp=[{url: 'http://host', token_env: 's3cret-0123456789'}]",
        "retrieval={url: 'http://user:s3cret-0123456789@host'}",
        "retrieval={url: 'http://host?key=s3cret-0123456789'}",
        "retrieval={url: 'http://host', http: {token_env: 's3cret-0123456789'}}",
        "retrieval={corpus: c.jsonl, rerank: {url: 'http://user:s3cret-0123456789@host'}}",
        "tools=[{name: massive_serve, options: {base_url: 'http://user:s3cret-0123456789@host'}}]",
        "tools=[{name: massive_serve, options: {base_url: 'http://host?token=s3cret-0123456789'}}]",
        "tools=[{name: google_search, options: {key_env: 's3cret-0123456789'}}]",
        "tools=[{name: google_search, options: {net: {proxy_env: 'http://user:s3cret-0123456789@proxy'}}}]",
    ],
)
def test_a_key_that_is_written_out_is_refused_and_not_repeated(load, override: str):
    said = refused(load, override)
    assert "must not hold a" in said or "not the key itself" in said
    assert "s3cret" not in said.replace(override, "")


def test_paths_of_a_config_may_begin_at_home(load, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load("run.dir=~/runs/a", "model.path=~/models/m", "env.name=search", "retrieval={index: ~/wiki}")
    assert (str(config.run.directory), config.model.path) == (f"{tmp_path}/runs/a", f"{tmp_path}/models/m")
    assert str(config.retrieval.index) == f"{tmp_path}/wiki"
