"""The `reward` section of a config, and how it becomes a `Reward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from posttrain.location import did_you_mean, is_location, locate
from posttrain.rewards import REWARDS
from posttrain.rewards.cited_claims import CitedClaims, CitedClaimsConfig
from posttrain.rewards.code import CodeConfig, CodeReward, Runner
from posttrain.rewards.evolving import EvolvingConfig, EvolvingRubricReward
from posttrain.rewards.functions import FunctionSpec, RewardError, RewardFunction
from posttrain.rewards.judge import JudgeConfig, JudgeReward
from posttrain.rewards.maths import Maths
from posttrain.rewards.model_options import ModelRewardConfig
from posttrain.rewards.remote import RemoteConfig, RemoteReward
from posttrain.rewards.routing import DATA_SETS, Routed
from posttrain.rewards.rubrics import RubricConfig, RubricReward
from posttrain.rewards.scoring import CustomReward, IsolatedReward, Mixture, Part, Reward, RuleReward

MODEL = "posttrain.rewards.model:ModelReward"  # loaded when asked for: it takes torch and transformers


@dataclass(frozen=True, slots=True)
class Service:
    """A reward with options of its own kind: servers, models, sandboxes."""

    config: type[BaseModel]
    make: Callable[[Any, str, Parts], Reward]


@dataclass(frozen=True, slots=True)
class Parts:
    """What rewards are given from outside, and what the section says for all of them."""

    section: RewardConfig
    runner: Runner | None = None


class _NoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")


SERVICES: dict[str, Service] = {
    "cited_claims": Service(CitedClaimsConfig, lambda config, name, parts: CitedClaims(config, name)),
    "code": Service(CodeConfig, lambda config, name, parts: CodeReward(config, parts.runner, name)),
    "evolving_rubric": Service(EvolvingConfig, lambda config, name, parts: EvolvingRubricReward(config, name)),
    "http": Service(RemoteConfig, lambda config, name, parts: RemoteReward(config, name)),
    "judge": Service(JudgeConfig, lambda config, name, parts: JudgeReward(config, name)),
    "math": Service(
        _NoOptions,
        lambda config, name, parts: Maths.start(seconds=parts.section.seconds, workers=parts.section.workers),
    ),
    "model": Service(ModelRewardConfig, lambda config, name, parts: locate(MODEL)(config, name)),
    "rubric": Service(RubricConfig, lambda config, name, parts: RubricReward(config, name)),
}


class PartConfig(BaseModel):
    """One part of a mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # as RewardConfig.name
    weight: float = Field(default=1.0, allow_inf_nan=False)  # may be negative: a penalty
    options: dict[str, Any] = {}


class RouteConfig(BaseModel):
    """Rewards chosen by a column of the row; a row may name several, which are summed by weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str = "source"  # a column of the row; "source" is what columns.source gave (data_source, dataset)
    rewards: dict[str, PartConfig] = {}  # name or pattern (searchR1_*) -> reward; the first that matches counts
    default: PartConfig | None = None  # for names that nothing matches; null = such a row is refused at the start
    known_data_sets: bool = True  # the field's names (openai/gsm8k, searchR1_*, ...) behind your own


class RewardConfig(BaseModel):
    """One reward by name, a mixture of named parts, or rewards chosen row by row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "em"  # of docs/rewards.md, "path.py:function" or "pkg.mod:function"; unused with parts or by
    options: dict[str, Any] = {}  # keyword arguments of the function
    parts: dict[str, PartConfig] = {}  # name in the log -> part; the reward is their weighted sum
    by: RouteConfig | None = None  # rewards chosen by a column of each row
    invalid_parts: Literal["invalid", "leave_out"] = "invalid"  # a sample one of whose parts could not be had
    seconds: PositiveFloat = Field(default=60.0, allow_inf_nan=False)  # deadline of one call of a custom function
    isolate: bool = True  # run custom sync functions in worker processes that can be killed at the deadline
    workers: PositiveInt = 2  # such processes, per function

    @model_validator(mode="after")
    def _is_one_or_many(self) -> Self:
        ways = (bool(self.options or "name" in self.model_fields_set), bool(self.parts), self.by is not None)
        if sum(ways) > 1:
            raise ValueError(
                "give either `name` with `options`, or `parts`, or `by`: each part has a name and options of its own"
            )
        if self.parts and not any(part.weight for part in self.parts.values()):
            raise ValueError("the weights of all parts are 0, so every reward would be 0")
        for name, options in self._functions():
            if name not in known_names() and not is_location(name):
                raise ValueError(_unknown(name))
            if name in SERVICES:
                _service_options(name, options)
        return self

    @model_serializer(mode="wrap")
    def _saved(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what a mixture does not read, so that it loads again."""
        unused = ("name", "options") if self.parts or self.by else ()
        return {key: value for key, value in plain(self).items() if key not in unused}

    def _functions(self) -> list[tuple[str, dict[str, Any]]]:
        parts = list(self.parts.values())
        if self.by is not None:
            parts += [*self.by.rewards.values(), *([self.by.default] if self.by.default else [])]
        return [(p.name, p.options) for p in parts] if parts or self.by else [(self.name, self.options)]


def known_names() -> list[str]:
    """The rewards of this package."""
    return sorted({**REWARDS, **SERVICES})


def load_reward(spec: RewardConfig | str | Callable[..., Any], *, runner: Runner | None = None) -> Reward:
    """A reward from a config, a name, a location ("path.py:function", "pkg.mod:function") or a function.

    A function given as an object runs in this process; one given by location in worker processes (see `isolate`).
    runner: instead of the sandbox for `code`. Raises RewardError when the reward is not found or does not take
    (episode, task) and its options.
    """
    if isinstance(spec, str):
        return _reward(spec, {}, Parts(RewardConfig(), runner))
    if not isinstance(spec, RewardConfig):
        if not callable(spec):
            raise RewardError(
                f"a reward is a name, a location, a function or a RewardConfig, got {type(spec).__name__}; "
                f"the section of a config becomes one by RewardConfig.model_validate(section)"
            )
        function = RewardFunction(spec)
        return CustomReward(function, name=function.name, seconds=RewardConfig().seconds)
    parts = Parts(spec, runner)
    if spec.by is not None:
        return _routed(spec.by, parts)
    if not spec.parts:
        return _reward(spec.name, spec.options, parts)
    mixed = {name: Part(_reward(part.name, part.options, parts), part.weight) for name, part in spec.parts.items()}
    return Mixture(mixed, leave_out_invalid=spec.invalid_parts == "leave_out")


def load_rewards(config: RewardConfig, names: Iterable[str | None]) -> dict[str | None, Reward]:
    """The reward of every task: the config's for None (a task that names none), and one for each name in the data.

    Called with the names of all rows before anything starts, so that an unknown one is found then. A name may be
    several, joined by commas: they are summed. Raises RewardError.
    """
    rewards: dict[str | None, Reward] = {None: load_reward(config)}
    parts = Parts(config)
    for name in sorted({name for name in names if name is not None}):
        single = [part.strip() for part in name.split(",")]
        if len(single) == 1:
            rewards[name] = _reward(name, {}, parts)
        else:
            rewards[name] = Routed("reward", {part: Part(_reward(part, {}, parts), 1.0) for part in single})
    return rewards


def _routed(config: RouteConfig, parts: Parts) -> Routed:
    chosen = {pattern: Part(_reward(p.name, p.options, parts), p.weight) for pattern, p in config.rewards.items()}
    if config.known_data_sets:
        shared = {name: Part(_reward(name, {}, parts), 1.0) for name in sorted(set(DATA_SETS.values()))}
        chosen |= {pattern: shared[n] for pattern, n in DATA_SETS.items() if pattern not in chosen}
    default = config.default
    fallback = None if default is None else Part(_reward(default.name, default.options, parts), default.weight)
    return Routed(config.column, chosen, fallback)


def _reward(name: str, options: Mapping[str, Any], parts: Parts) -> Reward:
    config = parts.section
    if name in REWARDS:
        return RuleReward(RewardFunction(REWARDS[name], options, name=name), name=name)
    if name in SERVICES:
        try:
            return SERVICES[name].make(_service_options(name, options), name, parts)
        except ValueError as error:
            raise RewardError(str(error)) from error
    if not is_location(name):
        raise RewardError(_unknown(name))
    spec = FunctionSpec(name, options)
    function = spec.load()  # here too, so that a wrong name or signature is found before anything starts
    if function.is_async or not config.isolate:
        return CustomReward(function, name=name, seconds=config.seconds)
    return IsolatedReward.start(
        spec, name=name, seconds=config.seconds, workers=config.workers, is_batch=function.is_batch
    )


def _service_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """Raises ValueError, in one line per option."""
    model = SERVICES[name].config
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        said = [f"options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        known = ", ".join(model.model_fields)
        raise ValueError(f"reward {name}: {'; '.join(said)}. Options: {known or 'none'}") from None


def _unknown(name: str) -> str:
    known = known_names()
    return (
        f"unknown reward {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}. "
        f"Your own: 'path.py:function' or 'pkg.mod:function'."
    )
