"""The `reward` section of a config, and how it becomes a `Reward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from posttrain.location import did_you_mean
from posttrain.rewards import REWARDS
from posttrain.rewards.functions import FunctionSpec, RewardError, RewardFunction
from posttrain.rewards.scoring import CustomReward, IsolatedReward, Mixture, Part, Reward, RuleReward


class PartConfig(BaseModel):
    """One part of a mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # as RewardConfig.name
    weight: float = Field(default=1.0, allow_inf_nan=False)  # may be negative: a penalty
    options: dict[str, Any] = {}


class RewardConfig(BaseModel):
    """One reward by name, or a mixture of named parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "em"  # a row of REWARDS, "path.py:function" or "pkg.mod:function"; unused when there are parts
    options: dict[str, Any] = {}  # keyword arguments of the function
    parts: dict[str, PartConfig] = {}  # name in the log -> part; the reward is their weighted sum
    seconds: PositiveFloat = Field(default=60.0, allow_inf_nan=False)  # deadline of one call of a custom function
    isolate: bool = True  # run custom sync functions in worker processes that can be killed at the deadline
    workers: PositiveInt = 2  # such processes, per function

    @model_validator(mode="after")
    def _is_one_or_many(self) -> Self:
        if self.parts and (self.options or "name" in self.model_fields_set):
            raise ValueError(
                "give either `name` with `options`, or `parts`: each part has a name and options of its own"
            )
        if self.parts and not any(part.weight for part in self.parts.values()):
            raise ValueError("the weights of all parts are 0, so every reward would be 0")
        for name in self._functions():
            if ":" not in name and name not in REWARDS:
                raise ValueError(_unknown(name))
        return self

    @model_serializer(mode="wrap")
    def _saved(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what a mixture does not read, so that it loads again."""
        unused = ("name", "options") if self.parts else ()
        return {key: value for key, value in plain(self).items() if key not in unused}

    def _functions(self) -> list[str]:
        return [part.name for part in self.parts.values()] if self.parts else [self.name]


def load_reward(spec: RewardConfig | str | Callable[..., Any]) -> Reward:
    """A reward from a config, a row of REWARDS, a location ("path.py:function", "pkg.mod:function") or a function.

    A function given as an object runs in this process; one given by location in worker processes (see `isolate`).
    Raises RewardError when it is not found or does not take (episode, task) and its options.
    """
    if isinstance(spec, str):
        return _reward(spec, {}, RewardConfig())
    if not isinstance(spec, RewardConfig):
        function = RewardFunction(spec)
        return CustomReward(function, name=function.name, seconds=RewardConfig().seconds)
    if not spec.parts:
        return _reward(spec.name, spec.options, spec)
    return Mixture(
        {log_name: Part(_reward(part.name, part.options, spec), part.weight) for log_name, part in spec.parts.items()}
    )


def load_rewards(config: RewardConfig, names: Iterable[str | None]) -> dict[str | None, Reward]:
    """The reward of every task: the config's for None (a task that names none), and one for each name in the data.

    Called with the names of all rows before anything starts, so that an unknown one is found then. Raises RewardError.
    """
    rewards: dict[str | None, Reward] = {None: load_reward(config)}
    for name in sorted({name for name in names if name is not None}):
        rewards[name] = _reward(name, {}, config)
    return rewards


def _reward(name: str, options: dict[str, Any], config: RewardConfig) -> Reward:
    if name in REWARDS:
        return RuleReward(RewardFunction(REWARDS[name], options, name=name), name=name)
    if ":" not in name:
        raise RewardError(_unknown(name))
    spec = FunctionSpec(name, options)
    function = spec.load()  # here too, so that a wrong name or signature is found before anything starts
    if function.is_async or not config.isolate:
        return CustomReward(function, name=name, seconds=config.seconds)
    return IsolatedReward.start(
        spec, name=name, seconds=config.seconds, workers=config.workers, is_batch=function.is_batch
    )


def _unknown(name: str) -> str:
    known = ", ".join(sorted(REWARDS))
    return (
        f"unknown reward {name!r}.{did_you_mean(name, REWARDS)} Known: {known}. "
        f"Your own: 'path.py:function' or 'pkg.mod:function'."
    )
