"""The update of a model that Megatron-core has divided; masters and moments are divided once more.

Ranks that hold the same part of a parameter each have a stretch of its masters and moments, as in Megatron's
distributed optimizer and ZeRO-1 (Rajbhandari et al. 2020): gradients are summed into stretches, these are stepped, and
the parameter is gathered from them. Not Megatron's own optimizer, so that a step is that of every other backend to the
last rule: sums and no means, the norm over all ranks, an update that is skipped, and state by the names of Hugging Face
layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.trainer.megatron import MegatronDecoder
from posttrain.trainer.megatron_layout import Piece, Shared
from posttrain.trainer.optimizer import (
    MASTER,
    STEPS_DONE,
    OptimizerConfig,
    Stepper,
    StepReport,
    adamw,
    by_parameter,
)
from posttrain.trainer.policy import Policy

STEP = "step"


class MegatronOptimizer(Stepper):
    """Steps a policy that `Policy.shard` has divided; every rank has to make one, and to call whatever it calls."""

    def __init__(self, policy: Policy, config: OptimizerConfig, total_steps: int | None) -> None:
        super().__init__(policy.parameters(), config, total_steps)
        assert policy.megatron is not None
        self._decoder: MegatronDecoder = policy.megatron
        self._mastered = policy.dtype is not torch.float32
        self._stretches = {
            parameter: _Stretch.of(parameter, shared)
            for parameter, shared in self._decoder.shared.items()
            if parameter.requires_grad
        }
        self._adamw = adamw([stretch.master for stretch in self._stretches.values()], config)

    def step(self) -> StepReport:
        lr = self.lr
        for parameter, stretch in self._stretches.items():
            stretch.take_gradient(parameter)
        norm = self._norm()
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            for parameter, stretch in self._stretches.items():
                parameter.data.copy_(stretch.whole(stretch.master))
        for stretch in self._stretches.values():
            stretch.master.grad = None
        self.pass_over()
        return StepReport(norm, lr, skipped)

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        tensors = {STEPS_DONE: torch.tensor(self.steps_done)}
        state = self._adamw.state
        began = next((found[STEP] for found in state.values()), None)
        keys = [MASTER] * self._mastered + ["exp_avg", "exp_avg_sq"] * (began is not None)
        for name, parameter in self.named.items():
            for key in keys:
                value = self._piece(parameter).read(lambda held, key=key: self._whole(held, key))
                if keep:
                    tensors[f"{name}/{key}"] = value.to("cpu", copy=True).contiguous()
            if began is not None and keep:
                tensors[f"{name}/{STEP}"] = began.to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        states = by_parameter(tensors, {name: p.shape for name, p in self.named.items()})
        for key in sorted({key for state in states.values() for key in state}):
            self._load(key, {name: state[key] for name, state in states.items() if key in state})
        self.steps_done = int(tensors[STEPS_DONE].item())

    def _load(self, key: str, values: Mapping[str, Tensor]) -> None:
        if key == STEP:
            step = next(iter(values.values())).float()
            for stretch in self._stretches.values():
                self._adamw.state[stretch.master][STEP] = step.to(stretch.master.device, copy=True)
            return
        room = {parameter: torch.empty(parameter.shape) for parameter in self._stretches}
        for name, value in values.items():
            self._piece(self.named[name]).write(value, room.__getitem__)
        for parameter, stretch in self._stretches.items():
            own = stretch.cut(room.pop(parameter).to(parameter.device))
            if key == MASTER:
                stretch.master.data.copy_(own)
                parameter.data.copy_(stretch.whole(stretch.master))
            else:
                self._adamw.state[stretch.master][key] = own.clone()

    def _piece(self, parameter: nn.Parameter) -> Piece:
        return self._decoder.pieces[id(parameter)]

    def _whole(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Of the part that this rank holds: masters or moments, from the ranks that hold it, too."""
        stretch = self._stretches[parameter]
        return stretch.whole(stretch.master if key == MASTER else self._adamw.state[stretch.master][key])

    def _norm(self) -> float:
        """Of all gradients: stretches do not overlap, so that each number counts once."""
        found = list(self._stretches.values())
        norms = torch.stack([torch.linalg.vector_norm(stretch.gradient) for stretch in found]).double()
        copies = torch.tensor([stretch.shared.copies for stretch in found], dtype=norms.dtype, device=norms.device)
        squares = (norms.square() / copies).sum()
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _clip(self, norm: float) -> None:
        most = self.config.max_grad_norm
        if most is not None and norm > most:
            gradients = [stretch.gradient for stretch in self._stretches.values()]
            torch._foreach_mul_(gradients, most / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """This rank's stretch of a parameter's numbers, one after another, 0.0 behind the last of them."""

    master: nn.Parameter  # [n] float32; [1, n] of what decays: AdamW tells matrices from vectors by their dimensions
    shape: torch.Size  # of the parameter
    shared: Shared

    @classmethod
    def of(cls, parameter: nn.Parameter, shared: Shared) -> _Stretch:
        size = -(-parameter.numel() // dist.get_world_size(shared.group))
        room = parameter.new_empty((1, size) if parameter.dim() > 1 else (size,), dtype=torch.float32)
        stretch = cls(nn.Parameter(room), parameter.shape, shared)
        stretch.master.data.copy_(stretch.cut(parameter.detach()))
        if parameter.dtype is not torch.float32:
            parameter.register_post_accumulate_grad_hook(_widen)
        return stretch

    @property
    def gradient(self) -> Tensor:
        assert self.master.grad is not None
        return self.master.grad

    def cut(self, value: Tensor) -> Tensor:
        """Of a tensor like the parameter."""
        rank, size = dist.get_rank(self.shared.group), self.master.numel()
        return self._padded(value.float())[rank * size :][:size].view(self.master.shape)

    def whole(self, own: Tensor) -> Tensor:
        """What the ranks have of it, together, in the shape of the parameter."""
        stretches = own.new_empty(dist.get_world_size(self.shared.group), own.numel())
        dist.all_gather(list(stretches), own.detach().flatten(), group=self.shared.group)
        return stretches.view(-1)[: self.shape.numel()].view(self.shape)

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """The sum over the ranks of what the backward passes left with the parameter, which then has none."""
        held = getattr(parameter, SUM, parameter.grad)
        parameter.grad = None
        if hasattr(parameter, SUM):
            delattr(parameter, SUM)
        held = torch.zeros_like(parameter, dtype=torch.float32) if held is None else held
        out = torch.empty_like(self.master)
        dist.reduce_scatter(out.view(-1), list(self._padded(held).view(-1, out.numel())), group=self.shared.group)
        self.master.grad = out

    def _padded(self, value: Tensor) -> Tensor:
        count = dist.get_world_size(self.shared.group) * self.master.numel()
        return nn.functional.pad(value.flatten(), (0, count - value.numel()))


SUM = "posttrain_sum"  # of a half-precision parameter: its gradients so far, in float32


def _widen(parameter: Tensor) -> None:
    """Gradients of several micro-batches are summed in float32."""
    assert parameter.grad is not None
    before: Tensor | None = getattr(parameter, SUM, None)
    wide = parameter.grad.float()
    setattr(parameter, SUM, wide if before is None else before.add_(wide))
    parameter.grad = None
