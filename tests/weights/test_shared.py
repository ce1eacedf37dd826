"""Weights through memory that real processes share: the files of a CPU, and CUDA IPC where there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import server
from posttrain.weights.buckets import as_json, layout, read_buckets
from posttrain.weights.shared import NotShared, Shelf, hand_over, opened, take_over
from weights.test_buckets import tensors

SIZE, TRANSFERS = 256, 3  # bytes of a buffer: the largest tensor has eight pieces


def _take(pipe: Any, visible: str) -> None:
    """A taker; it sees the GPUs of `visible` alone, and says at the end whether all was right."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.set_num_threads(1)
    buffers = [opened(ticket) for ticket in pipe.recv()]

    def hear() -> tuple[int, Callable[[], object]]:
        return pipe.recv(), lambda: pipe.send("taken")

    for number in range(TRANSFERS):
        buckets = read_buckets(pipe.recv())
        got = dict(take_over(buckets, buffers, hear))
        wanted = {name: tensor + number for name, tensor in tensors()}
        same = all(torch.equal(got[name].cpu(), tensor) for name, tensor in wanted.items())
        pipe.send(same and list(got) == list(wanted) and all(t.device == buffers[0].device for t in got.values()))


@contextmanager
def takers(shelf: Shelf, visible: list[str]) -> Iterator[list[Any]]:
    pipes = [server().Pipe() for _ in visible]
    running = [server().Process(target=_take, args=(theirs, v)) for (_, theirs), v in zip(pipes, visible, strict=True)]
    for process in running:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    try:
        for pipe in ours:
            pipe.send(shelf.tickets())
        yield ours
    finally:
        for process in running:
            process.join(30)
            process.kill()
    assert [process.exitcode for process in running] == [0] * len(running)


def give(shelf: Shelf, pipes: list[Any], device: str) -> None:
    def say(number: int) -> Callable[[], None]:
        for pipe in pipes:
            pipe.send(number)

        def wait() -> None:
            for pipe in pipes:
                assert pipe.poll(60)
                assert pipe.recv() == "taken"

        return wait

    for number in range(TRANSFERS):
        named = [(name, (tensor + number).to(device)) for name, tensor in tensors()]
        buckets = layout([(name, tensor.shape, tensor.dtype) for name, tensor in named], SIZE)
        for pipe in pipes:
            pipe.send(as_json(buckets))
        hand_over(buckets, iter(named), shelf, say)
        for pipe in pipes:
            assert pipe.poll(60)
            assert pipe.recv() is True


def test_other_processes_get_every_tensor_to_the_bit_again_and_again() -> None:
    shelf = Shelf(torch.device("cpu"), SIZE)
    with takers(shelf, ["", ""]) as pipes:
        give(shelf, pipes, "cpu")
    shelf.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("visible", [["0"], ["0", "1"], ["1", "1"]])
def test_gpus_share_memory_whichever_of_them_a_process_sees(visible: list[str]) -> None:
    """Buffers lie on the first GPU; a process may see another one only."""
    if max(visible) >= str(torch.cuda.device_count()):
        pytest.skip("needs two GPUs")
    shelf = Shelf(torch.device("cuda", 0), SIZE)
    with takers(shelf, visible) as pipes:
        give(shelf, pipes, "cuda:0")


def test_no_buffer_is_filled_before_all_have_what_lay_in_it() -> None:
    """In one process, step by step: the giver waits for the oldest of two pieces, and for no younger one."""
    shelf = Shelf(torch.device("cpu"), SIZE)
    (ticket, *_) = shelf.tickets()
    seen, said, waited = opened(ticket), [], []

    def say(number: int) -> Callable[[], object]:
        said.append(number)
        place = len(said)
        return lambda: waited.append((place, len(said), int(seen[0])))

    buckets = layout([("big", (5 * SIZE,), torch.uint8)], SIZE)
    hand_over(buckets, iter([("big", torch.arange(5).repeat_interleave(SIZE).to(torch.uint8))]), shelf, say)
    assert said == [0, 1, 0, 1, 0]
    assert waited == [(1, 2, 0), (2, 3, 2), (3, 4, 2), (4, 5, 4), (5, 5, 4)]
    shelf.close()


def test_memory_has_no_name_and_is_gone_with_its_owner() -> None:
    before = sorted(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else []
    shelf = Shelf(torch.device("cpu"), SIZE)
    (ticket, *_) = shelf.tickets()
    assert not [path for path in Path("/dev/shm").glob("tmp*") if path not in before]
    shelf.close()
    with pytest.raises(NotShared, match=r"one machine.*set sampler\.transport to broadcast"):
        opened(ticket)
