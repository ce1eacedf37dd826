"""The `algorithm:` section of a config: which rows of `posttrain.algorithms`, with which options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from posttrain.algorithms import ADVANTAGES, AGGREGATES, CHOICES, CORRECTIONS, KL_ESTIMATORS, LOSSES
from posttrain.algorithms.shaping import Normalisation
from posttrain.runs.config_file import Section, key_error
from posttrain.runs.plugins import check_positional, options_for, resolve


class ShapingConfig(Section):
    """What happens to rewards before credit is assigned, in this order: cut-off episodes, length, clip, normalise."""

    truncated_factor: float | None = Field(default=None, ge=0, le=1, description="times the reward of cut-off episodes")
    truncated_reward: float | None = Field(default=None, description="instead of the reward of a cut-off episode")
    mask_truncated: bool = Field(default=False, description="cut-off episodes count in the baseline, but do not train")
    overlong_length: PositiveInt | None = Field(default=None, description="policy tokens at which the penalty is whole")
    overlong_buffer: PositiveInt = Field(default=64, description="policy tokens before that in which it grows")
    overlong_factor: NonNegativeFloat = 1.0
    clip_low: float | None = None
    clip_high: float | None = None
    normalise: Normalisation = "none"
    centre: bool = Field(default=True, description="with normalise: subtract the mean, too")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.truncated_factor is not None and self.truncated_reward is not None:
            raise key_error("truncated_reward", "truncated_factor is set as well; choose one of them")
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise key_error("overlong_buffer", f"{self.overlong_buffer} is longer than {self.overlong_length=}")
        if (self.clip_low is None) != (self.clip_high is None):
            raise key_error("clip_low", "rewards are clipped on both sides: set clip_low and clip_high")
        if self.clip_low is not None and self.clip_high is not None and self.clip_low >= self.clip_high:
            raise key_error("clip_low", f"{self.clip_low} does not lie below clip_high = {self.clip_high}")
        return self


class DynamicSamplingConfig(Section):
    """Groups are drawn until a step is full of those with a mean score strictly between `low` and `high`.

    Each round draws as many tasks as are missing. After `max_rounds` the step goes on with the groups it has, however
    few, and says so.
    """

    low: float = 0.0
    high: float = 1.0
    max_rounds: PositiveInt = 4


class AlgorithmConfig(Section):
    """Names of `posttrain.algorithms` (or your own "pkg.mod:fn"), and their options.

    An option left out has the default of its function; one that none of the chosen functions takes is an error.
    """

    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregate: str = "token_mean"
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="times the entropy, subtracted from the loss")
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: str = "k3"
    kl_gradient: str | None = Field(default=None, description="estimator whose gradient is used; None = the same")
    kl_limit: PositiveFloat | None = Field(default=None, description="bound of every estimate; the peers take 10")
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: PositiveFloat | None = Field(default=None, description="kl_coef follows the measured KL; None = fixed")
    kl_horizon: PositiveFloat = Field(default=10_000, description="with kl_target: episodes for a change by a fifth")
    measure_kl: bool = Field(default=False, description="record the KL from the start policy also where kl_coef is 0")
    kl_on_silent_groups: bool = Field(
        default=True, description="with kl_in: loss, whether groups of equal rewards are pulled to the reference, too"
    )
    old_logprobs: Literal["trainer", "sampler"] = Field(
        default="trainer", description="whose log-probs the ratio is taken to; sampler = bypass, nothing is recomputed"
    )
    correction: str | None = Field(default=None, description="weights for what another policy sampled")
    staleness_decay: float = Field(default=1.0, gt=0, le=1, description="factor per optimizer step of age")
    max_staleness: NonNegativeInt | None = Field(default=None, description="older tokens do not train")
    outcome_reward_coef: float = Field(default=1.0, description="times the reward function's value")
    turn_reward_coef: float = Field(
        default=0.0,
        description="times the rewards of turns, of the reward function or else the env; 0 = the outcome only",
    )
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    whiten: bool = Field(default=False, description="advantages with mean 0, variance 1 over the tokens of the step")
    dynamic_sampling: DynamicSamplingConfig | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    clip_dual: PositiveFloat | None = None
    gamma: float | None = Field(default=None, ge=0, le=1)
    lam: float | None = Field(default=None, ge=0, le=1)
    std: Literal["sample", "population", "none"] | None = None
    length: PositiveInt | None = None
    options: dict[str, Any] = Field(default={}, description="further options of the chosen functions, yours included")

    @field_validator("advantage", "loss", "aggregate", "kl_estimator", "kl_gradient", "correction")
    @classmethod
    def _known(cls, name: str | None, info: ValidationInfo) -> str | None:
        key = str(info.field_name)
        if name is not None:
            check_positional(resolve(_TABLES[key], name, key), _GIVEN[key], f"{key} {name}")
        return name

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The chosen rows by the key that names them, and as "choice" what the loss has chosen before it is split."""
        chosen = {key: getattr(self, key) for key in _TABLES}
        found = {key: resolve(_TABLES[key], name, key) for key, name in chosen.items() if name is not None}
        return found | ({"choice": CHOICES[self.loss]} if self.loss in CHOICES else {})

    def options_of(self, key: str) -> dict[str, Any]:
        """The keyword arguments for the function chosen by `key` ("advantage", "loss", "aggregate", "correction")."""
        return options_for(self.functions[key], self._given)

    def options_with(self, key: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """`options_of`, and of what the loop knows (values, group_index, ..) what the function asks for by name."""
        return options_for(self.functions[key], known) | self.options_of(key)

    @property
    def _given(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OPTION_KEYS}
        return {name: value for name, value in named.items() if value is not None} | self.options

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage compares with a greedy episode of the same prompt."""
        return "greedy_returns" in options_for(self.functions["advantage"], {"greedy_returns": None})

    @model_validator(mode="after")
    def _all_used(self) -> Self:
        functions = self.functions
        used = {name for function in functions.values() for name in options_for(function, self._given)}
        for name in self._given:
            if name not in used:
                chosen = ", ".join(getattr(self, key) for key in functions if key != "choice")
                key = name if name in _OPTION_KEYS else f"options.{name}"
                raise key_error(key, f"no chosen function takes it ({chosen}); remove it or choose another function")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.kl_target is not None and self.kl_coef == 0:
            raise key_error("kl_target", "there is no KL term to control: set kl_coef to where it starts")
        if self.correction is not None and self.old_logprobs == "sampler":
            raise key_error("correction", "old_logprobs: sampler leaves nothing to correct; remove one of them")
        if self.turn_reward_coef == 0 and self.advantage == "mt_grpo":
            raise key_error("turn_reward_coef", "mt_grpo adds the rewards of turns to the outcome; set this above 0")
        return self


_TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "aggregate": AGGREGATES,
    "kl_estimator": KL_ESTIMATORS,
    "kl_gradient": KL_ESTIMATORS,
    "correction": CORRECTIONS,
}
_GIVEN: dict[str, tuple[str, ...]] = {  # what each function is called with; options follow by name
    "advantage": ("rewards", "mask", "episode_index", "group_index"),
    "loss": ("logprobs", "old_logprobs", "advantages", "mask", "segment_ids"),
    "aggregate": ("mask", "episode_index"),
    "kl_estimator": ("logprobs", "ref_logprobs", "mask"),
    "kl_gradient": ("logprobs", "ref_logprobs", "mask"),
    "correction": ("old_logprobs", "rollout_logprobs", "mask", "episode_index"),
}
_OPTION_KEYS = ("clip_low", "clip_high", "clip_dual", "gamma", "lam", "std", "length")
