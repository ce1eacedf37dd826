"""The sections of a config that have no code of their own to live beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from posttrain.endpoint.agent import ExternalAgent
from posttrain.envs import ENVS, Env
from posttrain.location import at_home
from posttrain.rollout import Limits
from posttrain.runs.config_file import ConfigError, Section, key_error
from posttrain.runs.metrics import lookup
from posttrain.runs.plugins import check_options, options_for, resolve
from posttrain.runs.sinks import SINKS
from posttrain.sampler.protocol import MIN_TEMPERATURE

WORLDS: dict[str, Callable[..., Env | ExternalAgent]] = {**ENVS, "external": ExternalAgent}  # what `env.name` may be


class RunConfig(Section):
    """Name, place, length and seed of the run."""

    name: str = Field(
        default="run", pattern=r"^[\w.-]*[\w-][\w.-]*$", description="letters, digits, dot, dash and underscore"
    )  # not dots alone: runs/.. is the working folder
    dir: Annotated[Path, AfterValidator(at_home)] | None = Field(
        default=None, description="the run directory; default runs/NAME"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(default=100, gt=0, le=10**7)
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
