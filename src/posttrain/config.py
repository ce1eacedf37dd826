"""What an RL run is made of: the sections that live beside their code, put together and checked against each other.

How a file is read is in `runs.config_file`, how a name becomes a function in `runs.plugins`; both are re-exported here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from posttrain.algorithms import GROUP_ADVANTAGES, VALUE_TARGETS
from posttrain.data.config import DataConfig
from posttrain.endpoint.agent import ExternalAgent
from posttrain.envs import ENVS, Env
from posttrain.location import at_home
from posttrain.retrieval.config import RetrievalConfig
from posttrain.rewards.config import RewardConfig
from posttrain.rollout import Limits
from posttrain.runs.algorithm import AlgorithmConfig, DynamicSamplingConfig, ShapingConfig
from posttrain.runs.cluster import ClusterConfig, check_apart, check_cluster
from posttrain.runs.config_file import (
    ConfigError,
    Section,
    config_yaml,
    key_error,
    key_names,
    load_config,
    nearest,
    parse_config,
    unknown_name,
)
from posttrain.runs.metrics import lookup
from posttrain.runs.plan import BatchConfig, Plan, make_plan
from posttrain.runs.plugins import check_options, options_for, resolve
from posttrain.runs.sinks import SINKS
from posttrain.sampler.config import PUBLISHED, SamplerConfig
from posttrain.sampler.protocol import MIN_TEMPERATURE
from posttrain.tools.config import ToolConfig
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.trainer.backends import RunNeeds, backend_problem
from posttrain.trainer.critic import CriticConfig
from posttrain.trainer.loading import ModelConfig
from posttrain.trainer.optimizer import OptimizerConfig, lr_at
from posttrain.trainer.ranks import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalRunConfig",
    "Limits",
    "ModelConfig",
    "OptimizerConfig",
    "Plan",
    "RLConfig",
    "RetrievalConfig",
    "RewardConfig",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "Section",
    "ShapingConfig",
    "TrainerConfig",
    "check_options",
    "config_yaml",
    "key_error",
    "key_names",
    "load_config",
    "nearest",
    "options_for",
    "parse_config",
    "plan_of",
    "resolve",
    "smoke_settings",
    "unknown_name",
]


WORLDS: dict[str, Callable[..., Env | ExternalAgent]] = {**ENVS, "external": ExternalAgent}  # what `env.name` may be
SAMPLING_RANKS = "ranks that sample themselves do not run ahead; set cluster.samplers, or leave one of them out"


class RunConfig(Section):
    """Name, place, length and seed of the run."""

    name: str = Field(
        default="run", pattern=r"^[\w.-]*[\w-][\w.-]*$", description="letters, digits, dot, dash and underscore"
    )  # not dots alone: runs/.. is the working folder
    dir: Annotated[Path, AfterValidator(at_home)] | None = Field(
        default=None, description="the run directory; default runs/NAME"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: PositiveInt = 100
    max_invalid_share: float = Field(
        default=0.5, ge=0, le=1, description="of a step's episodes; beyond it the run stops"
    )
    sinks: tuple[str, ...] = Field(
        default=("console",), description="console, tensorboard, wandb, or your own by its location"
    )

    @field_validator("sinks")
    @classmethod
    def _known(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        for sink in sinks:
            resolve(SINKS, sink, "sink")
        return sinks

    @property
    def directory(self) -> Path:
        return self.dir if self.dir is not None else Path("runs") / self.name


class EnvConfig(Section):
    """The world of the episodes: a name, "pkg.mod:Class" or "path.py:Class", and what its constructor takes."""

    name: str = "single_turn"
    options: dict[str, Any] = Field(default={})

    @property
    def factory(self) -> Callable[..., Env | ExternalAgent]:
        """Makes the env of one episode from `options`, and from `retriever` where `takes_retriever`."""
        return resolve(WORLDS, self.name, "env")

    @property
    def takes_retriever(self) -> bool:
        return "retriever" in options_for(self.factory, {"retriever": None})

    @property
    def takes_tools(self) -> bool:
        return "tools" in options_for(self.factory, {"tools": None})

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            factory = self.factory
        except ConfigError as error:
            raise key_error("name", str(error)) from None
        if isinstance(factory, type):
            needed = () if issubclass(factory, ExternalAgent) else ("reset", "step", "close")
            missing = [method for method in needed if not hasattr(factory, method)]
            if missing:
                raise key_error("name", f"{self.name} lacks {', '.join(missing)}; see posttrain.envs.protocol.Env")
        try:
            check_options(factory, self.options, self.name)
        except ConfigError as error:
            raise key_error("options", str(error)) from None
        return self


class NamedEnvConfig(EnvConfig):
    """A further env, for the rows that name it."""

    limits: dict[str, Any] = Field(default={}, description="what differs from `limits` in this env")

    @model_validator(mode="after")
    def _limits_differ_in_known_ways(self) -> Self:
        if "max_prompt_tokens" in self.limits:
            raise key_error(
                "limits.max_prompt_tokens", "prompts have one limit for all envs: set limits.max_prompt_tokens"
            )
        try:
            self.limits_over(Limits())
        except ValueError as error:
            raise key_error("limits", str(error)) from None
        return self

    def limits_over(self, common: Limits) -> Limits:
        return Limits.model_validate(common.model_dump() | self.limits)


class SamplingConfig(Section):
    """How training episodes are sampled."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, allow_inf_nan=False)
    top_p: float = 1.0
    top_k: NonNegativeInt = 0
    engines: PositiveInt | None = Field(
        default=None,
        description="forwards side by side; null = by the cores on a CPU, 1 on a GPU. Another number rounds otherwise",
    )
    max_staleness: NonNegativeInt | None = Field(
        default=None,
        description="training steps that rollouts may run ahead, on a copy of the weights; null = they take turns",
    )

    @model_validator(mode="after")
    def _trains(self) -> Self:
        """With a truncated distribution the sampler's log-probs are not the trainer's, and ratios would be wrong."""
        for key, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0)):
            if value != off:
                raise key_error(
                    key, f"{value} would train on other probabilities than it sampled with; set it to {off}"
                )
        return self


class EvalConfig(Section):
    """When `data.eval` is answered, and how; sampling of its own, greedy by default."""

    every: NonNegativeInt = Field(
        default=0, description="steps between evaluations; 0 = only before the first and after the last"
    )
    at_start: bool = True
    samples_per_prompt: PositiveInt = 1
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="0 = greedy")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: NonNegativeInt = 0
    max_tasks: PositiveInt | None = Field(default=None, description="the first of the set; None = all")
    right_from: float = Field(
        default=1.0, allow_inf_nan=False, description="a sample is right from this reward on (pass@k, maj@k)"
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise key_error("temperature", f"{self.temperature} is as good as 0; set 0, or {MIN_TEMPERATURE} or more")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise key_error(
                "temperature",
                f"0 gives the same answer {self.samples_per_prompt} times; set eval.temperature above 0, "
                "or eval.samples_per_prompt to 1",
            )
        return self


class CheckpointConfig(Section):
    """When checkpoints are written (always after the last step) and which are kept."""

    every: NonNegativeInt = Field(default=10, description="steps; 0 = only after the last")
    keep: PositiveInt = 2
    keep_best: str | None = Field(default=None, description="metric whose best checkpoint is kept besides")
    mode: Literal["max", "min"] = "max"
    background: bool = Field(
        default=False,
        description="train on while it is written from a copy in host memory; it counts once it is whole",
    )
    sharded: bool = Field(
        default=False, description="every rank writes its own shards of masters and moments, on a disk that all share"
    )

    @field_validator("keep_best")
    @classmethod
    def _known(cls, metric: str | None) -> str | None:
        if metric is not None:
            lookup(metric)
        return metric


class RLConfig(Section):
    """A whole RL run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    env: EnvConfig = Field(default_factory=EnvConfig)
    envs: dict[str, NamedEnvConfig] = Field(default={}, description="further envs by the names that rows give")
    retrieval: RetrievalConfig | None = None
    tools: tuple[ToolConfig, ...] = Field(default=(), description="what the policy may call")
    mcp: tuple[McpServerConfig, ...] = Field(
        default=(), description="MCP servers whose tools it may call: url or command"
    )
    reward: RewardConfig = Field(default_factory=RewardConfig)
    limits: Limits = Field(default_factory=Limits)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = OptimizerConfig.model_validate({})
    critic: CriticConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    smoke: dict[str, Any] = Field(default={}, description="dotted keys that `--smoke` sets, for a first small try")

    @model_validator(mode="before")
    @classmethod
    def _corrects_what_is_stale(cls, data: Any) -> Any:
        """An asynchronous run weighs what older weights have sampled, unless the config says how else, or not to."""
        sections = data if isinstance(data, dict) else {}
        sampling, algorithm = sections.get("sampling") or {}, sections.get("algorithm") or {}
        if not (isinstance(sampling, dict) and isinstance(algorithm, dict) and sampling.get("max_staleness")):
            return data
        if "correction" in algorithm or algorithm.get("old_logprobs") == "sampler":
            return data
        return data | {"algorithm": algorithm | {"correction": "truncated_is"}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for check in (
            _check_group,
            _check_pass_at_k,
            _check_critic,
            _check_data,
            _check_env,
            _check_tools,
            _check_best,
            _check_memory,
            _check_asynchronous,
            _check_trainer,
            _check_layout,
            _check_lora,
            _check_sampler,
            lambda config: check_cluster(config.cluster),
        ):
            check(self)
        return self

    @property
    def evaluates(self) -> bool:
        return bool(self.data.eval)

    def env_called(self, name: str) -> EnvConfig:
        """The env of rows that name `name`: one of `envs`, the usual one, or a shipped one without options."""
        if name in self.envs:
            return self.envs[name]
        return self.env if name == self.env.name else EnvConfig(name=name)

    @property
    def env_limits(self) -> dict[str, Limits]:
        """By the names that rows give; for the others `limits` holds."""
        return {name: env.limits_over(self.limits) for name, env in self.envs.items() if env.limits}


class EvalRunConfig(RLConfig):
    """The same file read for evaluation or chat: what only training needs may be missing from it or not fit."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_env(self)
        _check_tools(self)
        return self


def plan_of(config: RLConfig, train_tasks: int) -> Plan:
    """The batch arithmetic of the run; what the loop executes is asserted to be this."""
    total = config.run.steps * config.batch.optimizer_steps_per_step
    return make_plan(
        config.batch,
        steps=config.run.steps,
        train_tasks=train_tasks,
        lr_at=lambda update: lr_at(config.optimizer, update, total),
        checkpoint_every=config.checkpoint.every,
        eval_every=config.eval.every if config.evaluates else None,
        eval_at_start=config.eval.at_start,
    )


def _check_group(config: RLConfig) -> None:
    estimator, size = config.algorithm.advantage, config.batch.samples_per_prompt
    if estimator in GROUP_ADVANTAGES and size < 2:
        raise key_error(
            "batch.samples_per_prompt",
            f"{estimator} compares the episodes of one prompt with each other and learns nothing from {size}; "
            "use at least 2, or an advantage that needs no group (gae, reinforce, remax)",
        )


def _check_pass_at_k(config: RLConfig) -> None:
    if config.algorithm.advantage != "pass_at_k":
        return
    k, size = config.algorithm.options.get("k", 4), config.batch.samples_per_prompt
    if k >= size > 1:
        raise key_error(
            "batch.samples_per_prompt",
            f"{size}, but pass_at_k needs groups of more than k = {k}: of subsets of all there is only one; "
            "raise it, or lower algorithm.options.k",
        )


def _check_critic(config: RLConfig) -> None:
    advantage = config.algorithm.advantage
    if advantage in VALUE_TARGETS and config.critic is None:
        raise key_error(
            "algorithm.advantage",
            f"{advantage} needs values: add a `critic:` section (`critic: {{}}` for its defaults)",
        )
    if config.critic is not None and advantage in GROUP_ADVANTAGES:
        raise key_error("critic", f"{advantage} uses no critic; remove the section or choose gae")


def _check_data(config: RLConfig) -> None:
    if not config.data.train:
        raise key_error("data", "data.train names no files; there is nothing to train on")
    if config.eval != EvalConfig() and not config.data.eval:
        raise key_error("eval", "there is nothing to evaluate on: set data.eval, or remove this section")


def _check_env(config: RLConfig) -> None:
    searching = False
    for place, env in (("env", config.env), *((f"envs.{name}", env) for name, env in config.envs.items())):
        if not env.takes_retriever:
            continue
        searching = True
        if config.retrieval is None:
            raise key_error(place, f"{env.name} searches: add a `retrieval:` section with an index, a corpus or a url")
        if "top_k" in env.options:
            raise key_error(
                f"{place}.options.top_k", "how many passages a search returns is retrieval.top_k; set it there"
            )
    if config.retrieval is not None and not searching:
        raise key_error(
            "retrieval", f"the env {config.env.name} takes no retriever; remove this section or choose another env"
        )


def _check_tools(config: RLConfig) -> None:
    given = bool(config.tools or config.mcp)
    places = {"env": config.env, **{f"envs.{name}": env for name, env in config.envs.items()}}
    calling = [(place, env) for place, env in places.items() if env.takes_tools]
    for place, env in calling:
        if not given:
            raise key_error(place, f"{env.name} calls tools: add a `tools:` or `mcp:` section")
        if not isinstance(env.options.get("tools", []), list | tuple):
            raise key_error(f"{place}.options.tools", "a list of names of the `tools` section")
    if given and not calling:
        key = "tools" if config.tools else "mcp"
        raise key_error(key, f"the env {config.env.name} calls no tools; remove this section or choose another env")


def _check_best(config: RLConfig) -> None:
    if config.checkpoint.keep_best is None:
        return
    if not config.checkpoint.keep_best.startswith("eval/"):
        raise key_error("checkpoint.keep_best", "choose a metric of the evaluation (eval/...), such as eval/reward")
    if not config.evaluates:
        raise key_error("checkpoint.keep_best", "nothing measures it: set data.eval")
    if config.eval.every == 0 or config.checkpoint.every % config.eval.every:
        raise key_error(
            "checkpoint.every",
            f"{config.checkpoint.every} is no multiple of eval.every = {config.eval.every}, so that checkpoints would "
            "lack the metric that keep_best compares",
        )


def _check_asynchronous(config: RLConfig) -> None:
    if config.sampling.max_staleness is not None and config.trainer.ranks > 1 and not config.cluster.samplers:
        raise key_error(
            "sampling.max_staleness",
            f"trainer.ranks is {config.trainer.ranks}; {SAMPLING_RANKS}",
        )


def _check_trainer(config: RLConfig) -> None:
    needs = RunNeeds(
        samplers_apart=config.cluster.samplers > 0,
        shards_on_disk=config.checkpoint.sharded,
        compiles=config.model.compile is True,
        adapters=config.model.lora is not None,
        critic=config.critic is not None,
    )
    problem = backend_problem(config.trainer, needs)
    if problem is not None:
        raise key_error(*problem)


def _check_layout(config: RLConfig) -> None:
    trainer = config.trainer
    if trainer.tensor_parallel > 1 and config.model.compile is True:
        raise key_error(
            "model.compile",
            f"layers that trainer.tensor_parallel = {trainer.tensor_parallel} divides are not compiled; leave it out",
        )
    if trainer.sequence_parallel == 1 and trainer.sequence_parallel_kind != "auto":
        raise key_error(
            "trainer.sequence_parallel_kind",
            f"{trainer.sequence_parallel_kind} is a way to share micro-batches, and trainer.sequence_parallel is 1; "
            "raise that, or leave this out",
        )


def _check_lora(config: RLConfig) -> None:
    if config.model.lora is None:
        return
    if config.trainer.tensor_parallel > 1:
        raise key_error(
            "trainer.tensor_parallel",
            "layers with adapters are not divided; leave it out (trainer.ranks shards them), or leave model.lora out",
        )
    apart = config.sampler.engine == "vllm" and config.cluster.samplers > 0
    if apart and config.sampler.options.get("enable_lora", True) is not True:
        raise key_error(
            "sampler.options.enable_lora",
            "cluster.samplers are given the adapters alone, and never merged ones; leave it out",
        )
    if apart and config.sampler.sleep == 2:
        raise key_error(
            "sampler.sleep",
            "2 gives up all weights, and cluster.samplers are given adapters alone; set 1, which keeps them",
        )


def _check_memory(config: RLConfig) -> None:
    longest, room = config.limits.max_episode_tokens, config.batch.tokens_per_micro_batch
    if longest > room:
        raise key_error(
            "batch.tokens_per_micro_batch",
            f"{room} tokens cannot hold an episode of limits.max_episode_tokens = {longest}; set {longest} or more",
        )


def _check_sampler(config: RLConfig) -> None:
    if config.sampler.engine == "server":
        raise key_error(
            "sampler.engine",
            "a server's weights are its own: it answers for eval, generate and chat; train with native, vllm or "
            "vllm_server, which gives a vLLM server the policy's weights",
        )
    engine = config.sampler.engine
    if config.sampler.sleep and config.sampling.max_staleness is not None:
        raise key_error(
            "sampler.sleep", "with sampling.max_staleness the engine samples while the trainer works; leave it out"
        )
    apart = config.cluster.samplers > 0
    if engine != "native" and config.trainer.ranks > 1 and not apart:
        fix = "use native" + ("" if engine == "vllm_server" else ", or set cluster.samplers")
        raise key_error("sampler.engine", f"{engine} samples for a run on one rank; on several, {fix}")
    if apart:
        check_apart(config.sampler, config.cluster)
    elif config.sampler.transport == "shared":
        raise key_error("sampler.transport", "shared is for cluster.samplers, and there are none; leave it out")
    elif engine not in PUBLISHED and config.sampler.moves_weights:
        fix = "vllm or vllm_server, or with cluster.samplers"
        raise key_error("sampler", f"transport, folder and max_probe_gap go with sampler.engine: {fix}")
    if config.sampler.engine != "native" and config.sampling.engines is not None:
        raise key_error("sampling.engines", "forwards side by side are the native engine's; leave it out")


def smoke_settings(config: RLConfig, file: Path) -> list[str]:
    """The overrides of `--smoke`. Raises ConfigError when there are none: the whole run would start."""
    if not config.smoke:
        example = "smoke: {run.steps: 2, batch.prompts_per_step: 2}"
        raise ConfigError([f"{file}: --smoke takes its small numbers from the section `smoke`; add one: {example}"])
    return [f"{key}={json.dumps(value)}" for key, value in config.smoke.items()]
