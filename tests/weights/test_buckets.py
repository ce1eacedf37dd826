"""Broadcasts between real processes over gloo."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import server
from posttrain.weights.buckets import connect, layout, listen, open_group, receive, send

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Several dtypes, a scalar, an empty one, one that is not contiguous, one larger than a bucket."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("a.weight", torch.randn(7, 5, generator=generator)),
        ("a.bias", torch.randn(3, generator=generator).bfloat16()),
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.zeros(0, 4)),
        ("turned", torch.randn(6, 4, generator=generator).T),
        ("big", torch.randn(500, generator=generator)),
        ("count", torch.tensor([2**40, -1])),
        ("bytes", torch.arange(9, dtype=torch.uint8)),
    ]


def _take(port: int, rank: int, world: int, answers: Any) -> None:
    torch.set_num_threads(1)
    group = open_group(connect("127.0.0.1", port, world), rank=rank, world=world, backend="gloo")
    for _ in range(2):
        got = dict(receive(group))
        wanted = dict(tensors())
        same = list(got) == list(wanted) and all(
            got[name].dtype == wanted[name].dtype and torch.equal(got[name], wanted[name]) for name in wanted
        )
        answers.put((rank, same))


def test_two_other_processes_get_every_tensor_to_the_bit_again_and_again() -> None:
    answers, world = server().Queue(), 3
    store = listen("127.0.0.1", world)
    takers = [server().Process(target=_take, args=(store.port, rank, world, answers), daemon=True) for rank in (1, 2)]
    for taker in takers:
        taker.start()
    group = open_group(store, rank=0, world=world, backend="gloo")
    sent = [send(tensors(), group, bucket_bytes=256) for _ in range(2)]
    assert sorted(answers.get(timeout=60) for _ in range(4)) == [(1, True), (1, True), (2, True), (2, True)]
    for taker in takers:
        taker.join(timeout=30)
        assert taker.exitcode == 0
    assert sent[0] == sent[1] >= sum(t.numel() * t.element_size() for _, t in tensors())


def _wait(port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    group = open_group(connect("127.0.0.1", port, 2), rank=1, world=2, backend="gloo")
    answers.put("waits")
    try:
        group.broadcast(torch.zeros(1))
    except RuntimeError:
        answers.put("was told")


def test_who_waits_is_told_when_the_sender_gives_up() -> None:
    answers, store = server().Queue(), listen("127.0.0.1", 2)
    waiter = server().Process(target=_wait, args=(store.port, answers), daemon=True)
    waiter.start()
    group = open_group(store, rank=0, world=2, backend="gloo")
    assert answers.get(timeout=60) == "waits"
    group.abort()
    assert answers.get(timeout=60) == "was told"
    waiter.join(timeout=30)
    with pytest.raises(RuntimeError, match="has been left"):
        group.broadcast(torch.zeros(1))
    group.abort()


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(DTYPES)), max_size=12),
    st.integers(16, 300),
)
@settings(deadline=None, max_examples=60)
def test_a_layout_keeps_the_order_fills_buckets_and_aligns(given_: list[Any], size: int) -> None:
    named = [(str(i), shape, dtype) for i, (shape, dtype) in enumerate(given_)]
    buckets = layout(named, size)
    assert [place.name for bucket in buckets for place in bucket] == [name for name, _, _ in named]
    for bucket in buckets:
        assert bucket[0].start == 0
        assert bucket[-1].stop <= size or len(bucket) == 1
        for before, after in pairwise(bucket):
            assert before.stop <= after.start < before.stop + 16
        for place in bucket:
            assert place.start % 16 == 0
            assert place.stop - place.start == torch.Size(place.shape).numel() * place.dtype.itemsize


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="gloo or nccl"):
        open_group(None, rank=0, world=1, backend="mpi")
