"""Gradients of micro-batches on threads: the same to the bit, whatever the number of workers."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import Tensor

from posttrain.packing import Batch, micro_batches
from posttrain.trainer.parallel import accumulate_gradients, in_threads

from .batches import ragged_batch
from .models import tiny_policy


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_any_number_of_workers_gives_the_gradients_of_backward(name: str) -> None:
    parts = micro_batches(ragged_batch(), 32)
    assert len(parts) >= 4
    grads: list[list[Tensor]] = []
    for workers in (0, 1, 2, 3):
        policy = tiny_policy(name)
        parameters = [p for _, p in policy.parameters()]

        def loss_of(part: Batch, policy=policy) -> Tensor:
            return (policy.logprobs(part) * 0.1).sum()

        if workers == 0:
            losses = [loss_of(part) for part in parts]
            for loss in losses:
                loss.backward()
        else:
            assert accumulate_gradients(loss_of, parts, parameters, workers=workers) == [x.item() for x in losses]
        grads.append([p.grad for p in parameters if p.grad is not None])
    for other in grads[1:]:
        assert len(other) == len(grads[0])
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_results_keep_the_order_and_threads_inherit_no_grad() -> None:
    barrier = threading.Barrier(2, timeout=20)  # both workers must be at work at once

    def work(item: int) -> tuple[int, bool]:
        barrier.wait()
        return item * item, torch.is_grad_enabled()

    with torch.no_grad():
        assert list(in_threads(work, [1, 2, 3, 4], workers=2)) == [(1, False), (4, False), (9, False), (16, False)]


def test_an_error_on_a_thread_is_raised_here() -> None:
    def work(item: int) -> float:
        return 1 / item

    with pytest.raises(ZeroDivisionError):
        list(in_threads(work, [1, 0], workers=2))
    with pytest.raises(ValueError, match="workers must be >= 1"):
        list(in_threads(work, [1], workers=0))


def test_unused_parameters_keep_no_gradient() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    accumulate_gradients(lambda scale: (used * scale).sum(), [1.0, 2.0], [used, unused])
    assert unused.grad is None
    assert used.grad is not None
    assert used.grad.tolist() == [3.0, 3.0]


def test_half_precision_gradients_are_summed_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    accumulate_gradients(lambda scale: (weight.float() * scale).sum(), [256.0] + [0.5] * 8, [weight])
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.item() == 260.0  # one by one, 256 + 0.5 rounds back to 256


def test_masters_get_the_sum_unrounded() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    master = torch.nn.Parameter(torch.ones(1))
    for _ in range(2):  # onto what is there
        accumulate_gradients(lambda scale: (weight.float() * scale).sum(), [256.0, 0.5], [weight], into=[master])
    assert weight.grad is None
    assert master.grad is not None
    assert master.grad.item() == 513.0  # 512 in bfloat16


def test_worker_threads_use_as_many_torch_threads_as_the_caller() -> None:
    """A new thread would start with one per core, whatever the caller had set."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert list(in_threads(lambda _: torch.get_num_threads(), [0, 1], workers=2)) == [1, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_comes_back_without_page_faults() -> None:
    """In a process of its own: what is set holds for the rest of its life."""
    script = textwrap.dedent("""
        import resource, sys, torch
        from posttrain.trainer.parallel import in_threads, keep_freed_memory

        keep_freed_memory()

        def work(number):
            kept = [torch.ones(1 << 20) for _ in range(8)]  # 32 MiB
            return len(kept)

        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        for _ in range(3):
            list(in_threads(work, range(4), workers=2))
        before = faults()
        for _ in range(3):
            list(in_threads(work, range(4), workers=2))
        print(faults() - before)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000  # 3 x 4 x 32 MiB would be 98,000; on a busy machine a late thread starts afresh
