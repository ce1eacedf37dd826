"""Rollouts spread over ranks: what is sampled, where it goes, and what becomes of it when a rank goes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from posttrain.cluster.channel import Channel, ChannelServer, RankLost
from posttrain.cluster.request_handler import RequestHandler
from posttrain.cluster.sampler import SpreadSampler, params_of, plain
from posttrain.cluster.worker_group import WorkerGroup
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.policy import Policy

PARAMS = SamplingParams(max_new_tokens=6, stop_ids=frozenset({3}), stop_strings=("\n",))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load("tiny_search_base")


def answer(channel: Channel, sampler: NativeSampler) -> None:
    """Rank 1, on a thread."""

    async def work() -> None:
        handler = RequestHandler(sampler, channel)
        while (order := await asyncio.to_thread(channel.receive)) is not None:
            handler.hear(order)

    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()  # ends with the channel


def tokens(count: int, first: int) -> list[int]:
    return [(first + 7 * n) % 300 + 10 for n in range(count)]


def test_who_samples_changes_nothing(policy: Policy, pair: tuple[Channel, Channel]):
    here, there = pair
    answer(there, NativeSampler(policy, truncation="allow"))
    params = SamplingParams(max_new_tokens=6)
    alone, spread = NativeSampler(policy), SpreadSampler(NativeSampler(policy), (here,))
    prompts = [tokens(9, first) for first in (1, 1, 2, 2, 3, 3, 4, 4)]

    async def ask(sampler: NativeSampler | SpreadSampler):
        return await asyncio.gather(*(sampler.sample(p, params, seed=n) for n, p in enumerate(prompts)))

    expected, found = asyncio.run(ask(alone)), asyncio.run(ask(spread))
    for one, other in zip(expected, found, strict=True):
        assert (one.ids, one.stop_reason, one.stop, one.versions) == (
            other.ids,
            other.stop_reason,
            other.stop,
            other.versions,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    homes = [spread._routing.prompts[tuple(p)] for p in prompts]
    assert homes == [0, 0, 1, 1, 0, 0, 1, 1]  # a group stays together, ranks take turns
    counted = spread.counters()
    assert counted["requests"] == 8
    assert counted["tokens_generated"] == sum(len(one.ids) for one in found)
    assert counted["tokens_prefilled"] + counted["tokens_reused"] == 8 * 9  # which of them depends on what comes first


def test_errors_of_a_rank_are_raised_where_it_was_asked(policy: Policy, pair: tuple[Channel, Channel]):
    here, there = pair
    answer(there, NativeSampler(policy))
    spread = SpreadSampler(NativeSampler(policy), (here,))
    spread._load[0] = 9
    with pytest.raises(ValueError, match="999999"):
        asyncio.run(spread.sample([1, 999999], SamplingParams(max_new_tokens=2), seed=0))


def test_a_rank_that_goes_ends_what_waits_for_it(policy: Policy, pair: tuple[Channel, Channel]):
    here, there = pair
    spread = SpreadSampler(NativeSampler(policy), (here,))
    spread._load[0] = 9

    async def ask() -> None:
        waiting = asyncio.create_task(spread.sample([1, 2], PARAMS, seed=0))
        await asyncio.sleep(0.05)
        there.close()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await waiting
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await spread.sample([1, 2], PARAMS, seed=0)

    asyncio.run(ask())


def test_a_cancelled_request_is_cancelled_there_too(policy: Policy, pair: tuple[Channel, Channel]):
    here, there = pair
    spread = SpreadSampler(NativeSampler(policy), (here,))
    spread._load[0] = 9

    async def ask() -> None:
        waiting = asyncio.create_task(spread.sample([1, 2], PARAMS, seed=5, session="a"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(ask())
    asked, cancelled = there.receive(), there.receive()
    assert asked is not None
    assert asked["do"] == "sample"
    assert params_of(asked["params"]) == PARAMS
    assert cancelled == {"do": "cancel", "id": asked["id"]}
    assert spread._load == {0: 9, 1: 0}
    spread.release("a")
    assert there.receive() == {"do": "release", "session": "a"}


def test_params_travel_as_they_are():
    assert params_of(plain(PARAMS)) == PARAMS


def test_a_channel_may_be_closed_while_it_begins_to_listen(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
):
    """A pool is closed on one thread while a sampler that has just called is listened to on another."""
    heard, begin = list[object](), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        pair[0].close()
        begin(thread)
        thread.join(10)

    monkeypatch.setattr(threading.Thread, "start", start)
    pair[0].listen(heard.append)
    assert heard == [None]


def test_strangers_are_not_answered():
    server = ChannelServer("127.0.0.1")
    found: list[tuple[Channel, ...]] = []
    waiting = threading.Thread(target=lambda: found.append(server.answer(1)))
    waiting.start()
    stranger = Channel.call(server.address, "guess", 1)
    assert stranger.receive() is None
    stranger.close()
    known = Channel.call(server.address, server.secret, 1)
    waiting.join(10)
    assert [channel.rank for channel in found[0]] == [1]
    found[0][0].send({"do": "stop"})
    assert known.receive() == {"do": "stop"}
    known.close()
    found[0][0].close()


def test_one_process_has_nobody_to_ask(policy: Policy):
    local = NativeSampler(policy)
    assert WorkerGroup().sampler(local) is local
    WorkerGroup().order("save", object())
