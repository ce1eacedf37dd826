"""What an RL run is made of: the sections that live beside their code, put together and checked against each other.

How a file is read is in `runs.config_file`, how a name becomes a function in `runs.plugins`; both are re-exported here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from posttrain.config.checks import CHECKS, SAMPLING_RANKS, check_env, check_tools
from posttrain.config.sections import (
    WORLDS,
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    NamedEnvConfig,
    RunConfig,
    SamplingConfig,
)
from posttrain.data.config import DataConfig
from posttrain.retrieval.config import RetrievalConfig
from posttrain.rewards.config import RewardConfig
from posttrain.rollout import Limits
from posttrain.runs.algorithm import AlgorithmConfig, DynamicSamplingConfig, ShapingConfig
from posttrain.runs.cluster import ClusterConfig
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
from posttrain.runs.plan import BatchConfig, Plan, make_plan
from posttrain.runs.plugins import check_options, options_for, resolve
from posttrain.sampler.config import SamplerConfig
from posttrain.tools.config import ToolConfig
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.trainer.critic import CriticConfig
from posttrain.trainer.loading import ModelConfig
from posttrain.trainer.optimizer import OptimizerConfig, lr_at
from posttrain.trainer.ranks import TrainerConfig

__all__ = [
    "SAMPLING_RANKS",
    "WORLDS",
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
        for check in CHECKS:
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
        check_env(self)
        check_tools(self)
        return self


def plan_of(config: RLConfig, train_tasks: int) -> Plan:
    """The batch arithmetic of the run; what the loop executes is asserted to be this."""
    total = config.run.steps * config.batch.optimizer_steps_per_step
    return make_plan(
        config.batch,
        steps=config.run.steps,
        train_tasks=train_tasks,
        lr_at=lambda update: lr_at(config.optimizer, update, total),
        warmup=config.optimizer.warmup_optimizer_steps,
        checkpoint_every=config.checkpoint.every,
        eval_every=config.eval.every if config.evaluates else None,
        eval_at_start=config.eval.at_start,
    )


def smoke_settings(config: RLConfig, file: Path) -> list[str]:
    """The overrides of `--smoke`. Raises ConfigError when there are none: the whole run would start."""
    if not config.smoke:
        example = "smoke: {run.steps: 2, batch.prompts_per_step: 2}"
        raise ConfigError([f"{file}: --smoke takes its small numbers from the section `smoke`; add one: {example}"])
    return [f"{key}={json.dumps(value)}" for key, value in config.smoke.items()]
