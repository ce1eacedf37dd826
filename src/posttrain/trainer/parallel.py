"""Micro-batches on several Python threads, gradients summed in order.

On a CPU with few cores this is worth what torch's own intra-op threads are worth, without their barriers, which stall
when a neighbour takes a core. Set `torch.set_num_threads(1)` beside it. The result does not depend on `workers`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

Item = TypeVar("Item")
Result = TypeVar("Result")


def accumulate_gradients(
    loss_of: Callable[[Item], Tensor],
    items: Sequence[Item],
    parameters: Iterable[nn.Parameter],
    *,
    workers: int = 1,
    into: Iterable[nn.Parameter] | None = None,
) -> list[float]:
    """Adds d sum(loss_of(item)) / d parameter to every `.grad`, in the order of `items`; returns the losses.

    `loss_of` runs forward and returns a scalar; with `workers > 1` it runs on other threads, several at a time, and
    must not write to anything shared. Bit-identical for every number of workers. Gradients of half-precision parameters
    are summed in float32, so that many micro-batches cost no precision.
    into: parameters whose `.grad` gets the sums instead, in the same order: float32 masters, to avoid rounding them.
    """
    trainable = list(parameters)
    targets = trainable if into is None else list(into)

    def work(item: Item) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        loss = loss_of(item)
        return loss.detach(), torch.autograd.grad(loss, trainable, allow_unused=True)

    losses: list[Tensor] = []
    sums: list[Tensor | None] = [None if p.grad is None else _wide(p.grad) for p in targets]
    for loss, grads in in_threads(work, items, workers=workers):
        losses.append(loss)
        _add(sums, grads)
        del grads  # or they would be held until the next ones are there
    for target, total in zip(targets, sums, strict=True):
        target.grad = None if total is None else total.to(target.dtype)
    return [float(loss) for loss in losses]  # only now, for it waits for a GPU


def _add(sums: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """In place, all at once: one by one, a GPU would be done with one before the next is launched."""
    both = [(total, grad) for total, grad in zip(sums, grads, strict=True) if total is not None and grad is not None]
    if both:
        torch._foreach_add_(*map(list, zip(*both, strict=True)))  # pyright: ignore[reportPrivateImportUsage]
    for index, grad in enumerate(grads):
        if sums[index] is None and grad is not None:
            sums[index] = _wide(grad)


def threads(workers: int, name: str = "") -> ThreadPoolExecutor:
    """A pool whose threads use as many torch threads as the caller: a new thread would start with one per core, and
    matrix products on several such threads wait for each other's barriers (seen: 0.26 ms become 3 ms)."""
    return ThreadPoolExecutor(workers, name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees for the next step; elsewhere does nothing.

    Else every step's activations come back from the kernel as fresh pages, zeroed one fault at a time: 75,000 faults
    and 7 % of the time of an update. The process stays as large as its largest step.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        for option, value in _MALLOPT.values():
            libc.mallopt(option, value)


_MALLOPT = {  # name: (number in malloc.h, value)
    "M_MMAP_THRESHOLD": (-3, 32 << 20),  # the most that is taken
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 128 << 20),  # twice the size of a thread's heap: none of them is unmapped
}


def _wide(grad: Tensor) -> Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], *, workers: int = 1) -> Iterable[Result]:
    """Results in the order of `items`; at most `workers` at a time, and at most that many finished ones held."""
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if workers == 1 or len(items) < 2:
        yield from map(work, items)
        return
    grad_mode = torch.is_grad_enabled()  # a thread starts with its own

    def task(item: Item) -> Result:
        with torch.set_grad_enabled(grad_mode):
            return work(item)

    with threads(workers) as pool:
        for start in range(0, len(items), workers):
            yield from pool.map(task, items[start : start + workers])
