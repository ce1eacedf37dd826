"""A distributed optimizer, as in ZeRO-1 (Rajbhandari et al. 2020) and Megatron: every rank steps a part of the weights.

Masters and moments are divided: each rank owns one stretch of the flattened parameters. Once per update, and for many
parameters at a time, gradients are reduce-scattered to stretches, each rank steps its own, and the new weights are
all-gathered. Where every rank has all weights this is data parallel training (`trainer.backend: ddp`); with
Megatron-core a rank has parts of the layers, as some of the others have.

The rules of a step are those of every other backend: gradients are summed and not averaged, the norm is taken over all
ranks, an update with non-finite gradients is skipped, and state has the names of Hugging Face layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.trainer.optimizer import (
    MASTER,
    STEPS_DONE,
    OptimizerConfig,
    Stepper,
    StepReport,
    adamw,
    by_parameter,
    is_wide,
)
from posttrain.trainer.ranks import all_gather_single, reduce_scatter_single

STEP = "step"
BUCKET_ELEMENTS = 1 << 26  # that are summed, or gathered, at once
ROW = 4096  # numbers whose squares may be summed in float32, on a CPU one after another


@dataclass(frozen=True, slots=True)
class Shared:
    """The ranks that hold a parameter with the same values as this one, and so have to agree on its update."""

    group: Any  # their gradients are summands of one
    copies: int = 1  # of the group, with the very same gradients: ranks that compute alike what was not divided


View = Callable[[Tensor], Tensor]


def as_it_is(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a weight in Hugging Face layout lies: on this rank in views of parameters, concatenated in order."""

    shape: torch.Size  # of the whole
    views: tuple[tuple[nn.Parameter, View], ...]
    group: Any = None  # ranks with the other parts, in order; None: it is whole here
    dim: int = 0  # along which it is cut

    def read(self, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """The whole tensor, gathered from what `of` gives for each parameter (its weight, or a moment).

        A collective: every rank of the group has to call it.
        """
        parts = [view(of(parameter)) for parameter, view in self.views]
        local = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self._own_shape).contiguous()
        if self._size == 1:
            return local
        gathered = [torch.empty_like(local) for _ in range(self._size)]
        dist.all_gather(gathered, local, group=self.group)
        return torch.cat(gathered, self.dim)

    def write(self, whole: Tensor, into: Callable[[nn.Parameter], Tensor]) -> None:
        """The inverse: this rank's part of `whole`, to where `into` says for each parameter."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        own = whole.chunk(self._size, self.dim)[rank]
        for (parameter, view), part in zip(self.views, own.chunk(len(self.views)), strict=True):
            place = view(into(parameter))
            place.copy_(part.reshape(place.shape))

    @property
    def _size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def _own_shape(self) -> list[int]:
        return [size // self._size if d == self.dim else size for d, size in enumerate(self.shape)]


class DistributedOptimizer(Stepper):
    """Steps parameters that every rank of a group holds alike. Every rank makes one and calls the same methods.

    A parameter that no loss has reached counts as one with gradients of 0.0: it is stepped, and so decays.

    named: the weights in Hugging Face layout. shared: for every parameter that this rank holds, the ranks that share
    it. pieces: where a named weight lies, by the id of its parameter; without an entry it is whole on this rank.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        total_steps: int | None,
        *,
        shared: Mapping[nn.Parameter, Shared],
        pieces: Mapping[int, Piece],
    ) -> None:
        super().__init__(named, config, total_steps)
        self._pieces = pieces
        self._buckets = _buckets({p: shared_by for p, shared_by in shared.items() if p.requires_grad})
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.starts}
        self._adamw = adamw(self.masters, config)

    @classmethod
    def of_whole(
        cls, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int | None
    ) -> DistributedOptimizer:
        """Every rank has every weight."""
        named, everyone = list(named), Shared(dist.group.WORLD)
        return cls(named, config, total_steps, shared={p: everyone for _, p in named}, pieces={})

    @property
    def masters(self) -> list[nn.Parameter]:
        """This rank's stretches, of many parameters each."""
        return [bucket.master for bucket in self._buckets]

    def step(self) -> StepReport:
        lr = self.lr
        for bucket in self._buckets:
            bucket.take_gradient()
        norm = self._norm()
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            for bucket in self._buckets:
                bucket.give_weights()
        for bucket in self._buckets:
            bucket.master.grad = None
        self.pass_over()
        return StepReport(norm, lr, skipped)

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        tensors = {STEPS_DONE: torch.tensor(self.steps_done)}
        began = next((found[STEP] for found in self._adamw.state.values()), None)
        moments = ["exp_avg", "exp_avg_sq"] * (began is not None)
        for key in (MASTER, *moments):
            buckets = [bucket for bucket in self._buckets if bucket.mastered or key != MASTER]
            whole = {bucket.master: bucket.whole(self._state_of(bucket, key)) for bucket in buckets}
            for name, parameter in self.named.items():
                if key == MASTER and is_wide(parameter.dtype):
                    continue
                value = self._piece(parameter).read(
                    lambda held, whole=whole: self._bucket_of[held].in_room(held, whole)
                )
                if keep:
                    tensors[f"{name}/{key}"] = value.to("cpu", copy=True).contiguous()
        if began is not None and keep:
            tensors |= {f"{name}/{STEP}": began.to("cpu", copy=True) for name in self.named}
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
            for bucket in self._buckets:
                self._adamw.state[bucket.master][STEP] = step.to(bucket.master.device, copy=True)
            return
        found = {parameter: torch.zeros(parameter.shape) for parameter in self._bucket_of}
        for name, value in values.items():
            self._piece(self.named[name]).write(value, found.__getitem__)
        for bucket in self._buckets:
            if key != MASTER:  # of what never had a gradient there are none: 0.0
                self._adamw.state[bucket.master][key] = bucket.stretch_of(found)
            elif bucket.mastered:
                bucket.master.data.copy_(bucket.stretch_of(found))
                bucket.give_weights()

    def _piece(self, named: nn.Parameter) -> Piece:
        return self._pieces.get(id(named)) or Piece(named.shape, ((named, as_it_is),))

    def _state_of(self, bucket: _Bucket, key: str) -> Tensor:
        return bucket.master if key == MASTER else self._adamw.state[bucket.master][key]

    def _norm(self) -> float:
        """2-norm of all gradients over all ranks; stretches do not overlap, so each number counts once."""
        squares = torch.stack([bucket.squares / bucket.shared.copies for bucket in self._buckets]).sum()
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _clip(self, norm: float) -> None:
        most = self.config.max_grad_norm
        if most is not None and norm > most:
            gradients = [bucket.gradient for bucket in self._buckets]
            torch._foreach_mul_(gradients, most / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]


class _Bucket:
    """Parameters of one kind, flattened one after another into a buffer (the room) of which each rank owns a stretch.

    The room is padded with 0.0, so that every stretch has the same number of whole rows of ROW numbers.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shared: Shared) -> None:
        first, count = parameters[0], dist.get_world_size(shared.group)
        self.shared = shared
        self.starts: dict[nn.Parameter, int] = {}
        for parameter in parameters:
            self.starts[parameter] = self._numbers
        own = -(-self._numbers // (count * ROW)) * ROW
        self._room = count * own
        self._sums: Tensor | None = None
        # [1, n] of what decays: AdamW tells matrices from vectors by their dimensions
        shape = (1, own) if first.dim() > 1 else (own,)
        self.master = nn.Parameter(first.new_empty(shape, dtype=torch.promote_types(first.dtype, torch.float32)))
        with torch.no_grad():
            self.master.copy_(self.stretch_of({parameter: parameter.detach() for parameter in parameters}))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    @property
    def mastered(self) -> bool:
        """Whether weights are rounded, and masters so a part of the state."""
        return not is_wide(next(iter(self.starts)).dtype)

    @property
    def gradient(self) -> Tensor:
        assert self.master.grad is not None
        return self.master.grad

    @property
    def squares(self) -> Tensor:
        """The sum of squares of the gradient: rows of ROW numbers in float32, the sums of rows in float64."""
        return torch.linalg.vector_norm(self.gradient.view(-1, ROW), dim=1).double().square().sum()

    def stretch_of(self, values: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """This rank's stretch of tensors that are shaped like the parameters."""
        flat = torch.cat([values[parameter].flatten().to(self.master.dtype) for parameter in self.starts])
        flat = nn.functional.pad(flat, (0, self._room - len(flat)))
        start = dist.get_rank(self.shared.group) * self.master.numel()
        return flat[start : start + self.master.numel()].view(self.master.shape).to(self.master.device, copy=True)

    def whole(self, own: Tensor) -> Tensor:
        """The whole room, gathered from the stretches of all ranks."""
        room = own.new_empty(self._room)
        all_gather_single(room, own.detach().flatten(), group=self.shared.group)
        return room

    def in_room(self, parameter: nn.Parameter, rooms: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The view of a parameter's numbers in the room of its bucket, shaped like it."""
        return self._place(parameter, rooms[self.master])

    def take_gradient(self) -> None:
        """Reduces the gradients of all backward passes over the ranks, each to the rank that owns the stretch."""
        sums = self._taken()
        self.master.grad = torch.empty_like(self.master)
        reduce_scatter_single(self.master.grad.view(-1), sums, group=self.shared.group)
        self._sums = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Gathers the stepped stretches and writes them to the parameters of every rank."""
        parameters = list(self.starts)
        room = self.whole(self.master.to(parameters[0].dtype))
        weights = [self._place(parameter, room) for parameter in parameters]
        torch._foreach_copy_([p.data for p in parameters], weights)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def _numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.starts)

    def _place(self, parameter: nn.Parameter, room: Tensor) -> Tensor:
        start = self.starts[parameter]
        return room[start : start + parameter.numel()].view(parameter.shape)

    def _taken(self) -> Tensor:
        """The buffer in which gradients are summed in float32; held from the first backward pass to the update."""
        if self._sums is None:
            self._sums = self.master.new_zeros(self._room)
        return self._sums

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Adds a parameter's gradient to the room and frees it; a hook that runs after every backward pass."""
        assert isinstance(parameter, nn.Parameter)
        self._place(parameter, self._taken()).add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None


def _buckets(shared: Mapping[nn.Parameter, Shared]) -> list[_Bucket]:
    """Groups parameters of the same ranks, dtype and weight decay (on or off), up to BUCKET_ELEMENTS each."""
    kinds: dict[Any, list[list[nn.Parameter]]] = {}
    for parameter, by in shared.items():
        same = kinds.setdefault((id(by.group), by.copies, parameter.dim() > 1, parameter.dtype), [[]])
        if same[-1] and sum(p.numel() for p in same[-1]) + parameter.numel() > BUCKET_ELEMENTS:
            same.append([])
        same[-1].append(parameter)
    return [_Bucket(parameters, shared[parameters[0]]) for same in kinds.values() for parameters in same]
