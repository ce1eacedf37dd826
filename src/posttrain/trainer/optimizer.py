"""AdamW with a learning-rate schedule, gradient clipping and a guard against non-finite gradients.

Every count here is in optimizer steps (updates). A skipped step changes no weight and no moment; the schedule moves on.
Not here: the loss, and when to step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn

from posttrain.trainer.sharding import like, norm, of_own_part, own_part, whole

STEPS_DONE = "steps_done"
MASTER = "master"


class OptimizerConfig(BaseModel):
    """AdamW (Loshchilov & Hutter 2019) and its schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="each >= 0 and < 1")
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="not applied to norms and biases")
    warmup_optimizer_steps: int = Field(default=0, ge=0, description="linear from lr / warmup to lr")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="end of linear and cosine, as a share of lr")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="global norm; None = no clipping")

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"both must be >= 0 and < 1, got {betas}")
        return betas


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Optimizer.step` did."""

    grad_norm: float  # before clipping; may be non-finite when skipped
    lr: float  # the rate used (that would have been used, when skipped)
    skipped: bool  # non-finite gradients: weights and moments unchanged


def lr_at(config: OptimizerConfig, step: int, total_steps: int | None = None) -> float:
    """Learning rate of optimizer step `step` (0-based), of `total_steps` in all.

    Warm-up: lr * (step + 1) / warmup while step < warmup. Then constant, or linear / half a cosine from lr at the first
    step after warm-up to lr * min_lr_ratio at step total_steps - 1; beyond that the last value is kept.
    Raises ValueError when a decaying schedule is not told `total_steps`.
    """
    if step < config.warmup_optimizer_steps:
        return config.lr * (step + 1) / config.warmup_optimizer_steps
    if config.schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(f"schedule {config.schedule!r} decays over the run: it needs the number of optimizer steps")
    span = max(1, total_steps - 1 - config.warmup_optimizer_steps)
    done = min(1.0, (step - config.warmup_optimizer_steps) / span)
    remaining = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


class Stepper(ABC):
    """What the loop asks of an optimizer. `steps_done` counts planned updates, also those that were passed over."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int | None
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self.named = dict(parameters)
        if not self.named:
            raise ValueError("nothing to optimize: no parameter requires a gradient")
        lr_at(config, config.warmup_optimizer_steps, total_steps)  # a schedule that cannot be computed fails at once

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return lr_at(self.config, self.steps_done, self.total_steps)

    def pass_over(self, count: int = 1) -> None:
        """Skips planned updates that have nothing to learn from: the schedule moves on, weights and moments stay."""
        self.steps_done += count

    @abstractmethod
    def step(self) -> StepReport:
        """Clips, updates, clears the gradients. Skips the update when the gradient norm is not finite."""

    @abstractmethod
    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """All that a bit-exact resume needs, flat, for safetensors: `NAME/exp_avg`, `NAME/master`, .., `steps_done`.

        Copies in host memory. Shards are gathered by collectives, so every rank has to call it; keep=False: this rank
        takes part in them and gets an empty result.
        """

    @abstractmethod
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; the parameters of float32 models are loaded by `Policy.load`, not here.

        Raises ValueError, naming tensors, when the state is of another model.
        """


class Optimizer(Stepper):
    """Steps named parameters.

    Half-precision parameters get float32 master copies: at the learning rates of RL an update is smaller than the
    spacing of bfloat16 and would round to nothing. The moments are float32 then, too. The parameters of a sharded model
    are float32 and so their own masters; forwards gather them in half precision where the model computes in it.

    mastered: names of these, whose values are saved as masters, because the weight files have them rounded.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        total_steps: int | None = None,
        *,
        mastered: Collection[str] = (),
    ) -> None:
        super().__init__(parameters, config, total_steps)
        self._mastered = mastered
        self._masters = {
            name: p if is_wide(p.dtype) else nn.Parameter(p.detach().float()) for name, p in self.named.items()
        }
        self._parts = {  # what this rank holds of each master: all of it, or its shard; AdamW sees only these
            name: nn.Parameter(own_part(master)) if own_part(master) is not master else master
            for name, master in self._masters.items()
        }
        self._adamw = adamw(self._parts.values(), config)

    @property
    def masters(self) -> list[nn.Parameter]:
        """For every parameter, in the order of `named`, its float32 copy, or itself; `step` reads their gradients."""
        return list(self._masters.values())

    def zero_grad(self) -> None:
        for parameter in (*self.named.values(), *self._masters.values(), *self._parts.values()):
            parameter.grad = None

    def step(self) -> StepReport:
        lr = self.lr
        self._hand_over_gradients()
        norm = clip_grad_norm([p.grad for p in self._masters.values() if p.grad is not None], self.config.max_grad_norm)
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._step_masters()
        self.zero_grad()
        self.pass_over()
        return StepReport(norm, lr, skipped)

    def state_tensors(self, *, keep: bool = True, gather: bool = True) -> dict[str, Tensor]:
        """See `Stepper`. gather=False: shards as they are."""
        tensors = {STEPS_DONE: torch.tensor(self.steps_done)}
        for name, master in self._masters.items():
            held = self._adamw.state.get(self._parts[name], {})
            state = {key: of_own_part(torch.as_tensor(value), master) for key, value in held.items()}
            if master is not self.named[name] or name in self._mastered:
                state = {MASTER: master, **state}
            for key, value in state.items():
                found = whole(value.detach()) if gather else value.detach()
                if keep:
                    tensors[f"{name}/{key}"] = found.to("cpu", copy=True).contiguous()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        states = by_parameter(tensors, {name: p.shape for name, p in self.named.items()})
        for name, master in self._masters.items():
            state = {key: like(value, master) for key, value in states[name].items()}
            saved_master = state.pop(MASTER, None)
            if saved_master is not None:
                with torch.no_grad():
                    master.copy_(saved_master)
                    self.named[name].copy_(saved_master)
            self._adamw.state[self._parts[name]] = {key: own_part(value) for key, value in state.items()}
        self.steps_done = int(tensors[STEPS_DONE].item())

    def _hand_over_gradients(self) -> None:
        """Moves gradients that a backward pass left on half-precision parameters to their masters."""
        for name, master in self._masters.items():
            parameter = self.named[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()

    def _step_masters(self) -> None:
        for name, part in self._parts.items():
            master = self._masters[name]
            if part is not master:  # torch may have moved the shards since
                part.data = own_part(master)
                part.grad = None if master.grad is None else own_part(master.grad)
        self._adamw.step()
        halves = [(self.named[name], master) for name, master in self._masters.items()]
        halves = [(parameter, master) for parameter, master in halves if master is not parameter]
        if halves:
            with torch.no_grad():
                rounded: list[torch.Tensor] = [parameter for parameter, _ in halves]
                masters: list[torch.Tensor] = [master for _, master in halves]
                torch._foreach_copy_(rounded, masters)  # pyright: ignore[reportPrivateImportUsage]


def is_wide(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype need no float32 masters."""
    return dtype in {torch.float32, torch.float64}


def by_parameter(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, Tensor]]:
    """{parameter: {state key: tensor}} for every parameter. Raises ValueError when the state is of another model."""
    if STEPS_DONE not in tensors:
        raise ValueError(f"the optimizer state has no {STEPS_DONE}; it holds {sorted(tensors)[:5]}")
    states: dict[str, dict[str, Tensor]] = {name: {} for name in shapes}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        if full_name == STEPS_DONE:
            continue
        if name not in shapes:
            raise ValueError(f"optimizer state {full_name!r} belongs to no trainable parameter of this model")
        if value.dim() and value.shape != shapes[name]:
            both = f"{tuple(value.shape)}, the parameter {tuple(shapes[name])}"
            raise ValueError(f"optimizer state {full_name} has shape {both}")
        states[name][key] = value
    missing = [name for name, state in states.items() if not state]
    if missing and len(missing) < len(shapes):
        raise ValueError(f"the optimizer state lacks {missing[:5]}; was it saved with other trainable parameters?")
    return states


def clip_grad_norm(grads: list[Tensor], max_norm: float | None) -> float:
    """Global 2-norm of the gradients (before clipping); scales them in place when it is finite and above `max_norm`."""
    value = norm(grads)
    if max_norm is not None and math.isfinite(value) and value > max_norm:
        own = [own_part(grad) for grad in grads]
        torch._foreach_mul_(own, max_norm / (value + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
    return value


def non_finite_segments(segment_ids: Tensor, mask: Tensor, *values: Tensor) -> list[int]:
    """Segments of a micro-batch with NaN or infinity at a masked-in token of any of `values` ([T] each).

    For the dump that goes with a non-finite loss: pass log-probs, per-token losses, advantages, old log-probs.
    """
    bad = torch.zeros_like(mask)
    for value in values:
        bad |= ~torch.isfinite(value.detach())
    return sorted(set(segment_ids[bad & mask].tolist()))


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """The update rule itself; who calls it sets the rate before each step."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        _groups(parameters, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(p.device.type in {"cpu", "cuda"} for p in parameters),
    )


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, list[nn.Parameter] | float]]:
    """Matrices decay; vectors (norms, biases) do not."""
    parameters = list(parameters)
    matrices = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]
