"""What may break between two steps of a protocol: real sockets and processes, and models only where these matter."""

from __future__ import annotations

import asyncio
import json
import multiprocessing.connection
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.apart import MODEL, Processes
from forked import server
from loops.toy import toy_config
from posttrain.cluster.channel import HELLO_BYTES, Channel, ChannelServer, on_a_thread
from posttrain.cluster.launch import free_port
from posttrain.cluster.pool import Member, Pool
from posttrain.cluster.remote_sampler import PoolSampler
from posttrain.cluster.seat import Seat
from posttrain.cluster.supervisor import SECRET, KillRequest, calls_at
from posttrain.cluster.watchdog import Watchdog
from posttrain.cluster.weight_receiver import TransferReceiver
from posttrain.cluster.worker_group import weights_folder
from posttrain.config import ClusterConfig, SamplerConfig
from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.weights.buckets import listen, open_group, send
from posttrain.weights.gather import as_json, manifest_of
from posttrain.weights.shared import NotShared, Shelf

SECONDS = 60


def until(found: Callable[[], object]) -> None:
    ends = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.01)


@contextmanager
def called(count: int) -> Iterator[tuple[Pool, list[Channel]]]:
    """A pool of so many members, and their ends of the channels."""
    server = ChannelServer("127.0.0.1")
    pool = Pool(server, ClusterConfig(samplers=count), lambda channel: None)
    server.keep_answering("sampler", pool.admit)
    channels = [Channel.call(server.address, server.secret, number) for number in range(count)]
    try:
        until(lambda: len(pool.members()) == count)
        yield pool, channels
    finally:
        for channel in channels:
            channel.close()
        pool.close()


def test_two_samplers_that_hang_at_once_are_both_lost():
    """What the first had goes to the second, which reads nothing either. The watchdog must not wait for that, or nobody
    would ever find that the second hangs."""
    with called(2) as (pool, _):
        sampler, watch = PoolSampler(pool), Watchdog(pool.settings, (), pool)
        first, second = pool.members()
        sampler.serve(first)
        asking = threading.Thread(target=lambda: asyncio.run(asked_in_vain(sampler)))
        asking.start()
        until(lambda: "sampler 0" in sampler.waiting())
        sampler.serve(second)
        full = {"do": "sample", "ids": "x" * (1 << 26)}  # more than the kernel keeps
        assert pool.tell(second, full)
        looking = threading.Thread(target=watch.look, args=(time.monotonic() + 1000,), daemon=True)
        looking.start()
        until(lambda: not pool.members())
        looking.join()
        until(lambda: "" in sampler.waiting())
        sampler.fail(RuntimeError("over"))
        asking.join()


def test_what_to_do_about_an_engine_that_may_hang_is_said(caplog: pytest.LogCaptureFixture):
    """It lives, and answers nothing; another one has had its request for a shorter time."""
    with called(2) as (pool, _):
        watch, now = Watchdog(pool.settings, (), pool), time.monotonic() + 400
        watch.waiting = lambda: {"sampler 0": (1, now - 310), "sampler 1": (1, now - 290), "": (1, now - 400)}
        for member in pool.members():
            member.channel.heard = now
        watch.look(now)
        assert len(pool.members()) == 2
    here = socket.gethostname()
    assert f"if sampler 0 hangs, kill -9 {os.getpid()} on {here}: it is replaced" in caplog.text
    assert "if sampler 1 hangs" not in caplog.text


def answering(channel: Channel) -> None:
    """A sampler at this end, on a thread: what it samples is the seed of the request."""

    def work() -> None:
        while (order := channel.receive()) is not None:
            if order["do"] == "sample":
                one = {"ids": [order["seed"]], "logprobs": [0.0], "stop_reason": "length", "versions": [0]}
                channel.send({"id": order["id"], "sampled": one})

    threading.Thread(target=work, daemon=True).start()  # ends with the channel


def test_one_that_reads_nothing_keeps_no_episode_of_another_one_waiting():
    """A request that is more than the kernel keeps is put to a frozen sampler, and the loop of all episodes goes on;
    once it is found by its silence, the other one does this request, too."""
    long, short = [7] * (1 << 22), SamplingParams(max_new_tokens=1)

    async def work(sampler: PoolSampler, frozen: Member) -> list[list[int]]:
        stuck = asyncio.create_task(sampler.sample(long, short, seed=1))
        await asyncio.sleep(0)  # it is asked
        others = await asyncio.gather(*(sampler.sample([1], short, seed=seed) for seed in (2, 3)))
        assert not stuck.done()
        assert sampler.waiting().keys() == {str(frozen)}
        frozen.channel.heard -= 121
        Watchdog(sampler.pool.settings, (), sampler.pool).look(time.monotonic())
        return [one.ids for one in (await stuck, *others)]

    with called(2) as (pool, (_, reads)):
        answering(reads)
        sampler, (frozen, other) = PoolSampler(pool), pool.members()
        sampler.serve(frozen)
        sampler.serve(other)
        found = on_a_thread(lambda: asyncio.run(work(sampler, frozen)))
        assert found.result(SECONDS) == [[1], [2], [3]]
        assert pool.members() == [other]


async def asked_in_vain(sampler: PoolSampler) -> None:
    with pytest.raises(RuntimeError, match="over"):
        await sampler.sample([1], SamplingParams(max_new_tokens=1), seed=0)


def watching(told: multiprocessing.connection.Connection) -> None:
    """Rank 0, in a process that is stopped for longer than the limit."""
    server = ChannelServer("127.0.0.1")
    pool = Pool(server, ClusterConfig(samplers=4, heartbeat_seconds=4), lambda channel: None)
    server.keep_answering("sampler", pool.admit)
    told.send((server.address, server.secret))
    until(lambda: len(pool.members()) == 4)
    watch = Watchdog(pool.settings, (), pool)
    watch.start()
    told.send("watches")
    assert told.recv() == "goes on"
    time.sleep(2.5)  # two looks
    told.send(len(pool.members()))
    watch.stop()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal")
def test_who_stood_still_itself_does_not_take_others_for_silent():
    here, there = server().Pipe()
    process = server().Process(target=watching, args=(there,))
    process.start()
    address, secret = here.recv()
    channels = [Channel.call(address, secret, number) for number in range(4)]
    for channel in channels:
        channel.beat()
    assert here.recv() == "watches"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5)  # longer than the limit
    os.kill(process.pid, signal.SIGCONT)
    here.send("goes on")
    assert here.recv() == 4
    process.join(SECONDS)
    assert process.exitcode == 0
    for channel in channels:
        channel.close()


def test_who_cannot_be_answered_for_want_of_files_is_answered_later(caplog: pytest.LogCaptureFixture):
    server, admitted = ChannelServer("127.0.0.1"), list[Channel]()
    server.keep_answering("sampler", admitted.append)
    caller = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 1, hard))
    try:
        caller.connect(server.address)
        until(lambda: "no sampler can call just now" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    channel = Channel(caller, 0)
    channel.send({"secret": server.secret, "rank": 5})
    until(lambda: [one.rank for one in admitted] == [5])
    server.close()
    for one in (channel, *admitted):
        one.close()


@pytest.mark.parametrize("said", ["[1]", "7", '{"secret": "\\u00e9\\ud800"}', "GET / HTTP/1.1", "too much"])
def test_whatever_a_stranger_says_who_calls_next_is_answered(said: str):
    server, admitted = ChannelServer("127.0.0.1"), list[Channel]()
    server.keep_answering("sampler", admitted.append)
    caller = socket.create_connection(server.address, SECONDS)
    stranger, long = Channel(caller, 0), {"secret": server.secret, "rank": 1, "more": "x" * HELLO_BYTES}
    caller.sendall((json.dumps(long) if said == "too much" else said).encode() + b"\n")
    assert stranger.receive() is None
    known = Channel.call(server.address, server.secret, 2)
    until(lambda: [one.rank for one in admitted] == [2])
    server.close()
    for one in (stranger, known, *admitted):
        one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine there")
def test_only_the_address_that_others_call_is_listened_at():
    for host, elsewhere in (("127.0.0.2", "127.0.0.3"), ("127.0.0.1", "127.0.0.2"), ("localhost", "127.0.0.2")):
        server = ChannelServer(host)
        socket.create_connection(server.address).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, server.address[1]))
        server.close()
    store = listen("127.0.0.1", 2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
    everywhere = ChannelServer("192.0.2.77")  # of a gateway, for instance
    socket.create_connection(("127.0.0.1", everywhere.address[1])).close()
    everywhere.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_who_is_on_another_machine_may_call_by_either_protocol():
    stores = [listen(host, 2) for host in ("::1", "localhost")]
    servers = [ChannelServer(host) for host in ("2001:db8::77", "node-7")]
    for host in ("::1", "127.0.0.1"):
        for port in [store.port for store in stores] + [one.address[1] for one in servers]:
            socket.create_connection((host, port)).close()
    for one in servers:
        one.close()


def test_a_sampler_that_loads_its_model_when_the_run_ends_has_not_failed(tmp_path: Path):
    """Rank 0 says stop and hangs up at once. A status of 1 would end the launch as a failure."""
    server, admitted = ChannelServer("127.0.0.1"), list[Channel]()
    server.keep_answering("sampler", admitted.append)
    processes = Processes(tmp_path, server.address, server.secret, 1)
    until(lambda: admitted)
    manifest = as_json(manifest_of(Policy.from_config(MODEL)))
    options = {"model": MODEL.model_dump(mode="json"), "sampler": SamplerConfig().model_dump(mode="json"), "engines": 1}
    (channel,) = admitted
    channel.send({"do": "begin", **options, "manifest": manifest})
    channel.send({"do": "stop"})
    channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing can be sent here
    channel.close()
    processes.running[0].join(SECONDS)
    assert processes.running[0].exitcode == 0, (tmp_path / "sampler0").read_text()
    processes.end()
    server.close()


class Takes:
    """An engine without a model; `fails` when the first tensor is there."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in tensors:
            if self.fails:
                raise RuntimeError("out of memory")


def test_a_sampler_that_cannot_load_what_it_receives_keeps_nobody_waiting(pair: tuple[Channel, Channel]):
    """It leaves the process group, where rank 0 would send on until its patience of minutes is over."""
    store, failures = listen("127.0.0.1", 2), list[str]()
    meet = {"host": "127.0.0.1", "port": store.port, "world": 2, "backend": "gloo", "rank": 1}
    receiver: Any = TransferReceiver(Takes(fails=True), pair[0])  # type: ignore[arg-type]

    def take() -> None:
        try:
            receiver.load({"version": 1, "rank": 0, "meet": meet})
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    group = open_group(store, rank=0, world=2, backend="gloo")
    sending = threading.Thread(target=give, args=(group, failures), daemon=True)
    sending.start()
    sending.join(SECONDS)
    assert not sending.is_alive()
    thread.join()
    assert "out of memory" in failures
    assert len(failures) == 2, "and rank 0 is told"


class Slow:
    """An engine without a model that takes its time to give up version 1."""

    def __init__(self) -> None:
        self.failed, self.may_end, self.loaded = threading.Event(), threading.Event(), list[int]()

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        try:
            self.loaded += [version for _ in tensors]
        except RuntimeError:
            self.failed.set()
            assert self.may_end.wait(SECONDS)
            raise


def test_who_gives_up_a_transfer_does_not_break_the_next_one(pair: tuple[Channel, Channel]):
    engine = Slow()
    receiver: Any = TransferReceiver(engine, pair[0])  # type: ignore[arg-type]

    def begun(version: int) -> tuple[Any, Any]:
        """What takes, and rank 0's end of the group."""
        store = listen("127.0.0.1", 2)
        meet = {"host": "127.0.0.1", "port": store.port, "world": 2, "backend": "gloo", "rank": 1}
        order = {"do": "weights", "version": version, "rank": 0, "meet": meet}
        receiver.hear(order)
        return on_a_thread(lambda: receiver.load(order)), open_group(store, rank=0, world=2, backend="gloo")

    first, broken = begun(1)
    until(lambda: receiver._group is not None)
    broken.abort()
    assert engine.failed.wait(SECONDS)
    second, whole = begun(2)
    until(lambda: receiver._group is not None)
    engine.may_end.set()
    assert isinstance(first.exception(SECONDS), RuntimeError)
    send([("weight", torch.zeros(4))], whole)
    second.result(SECONDS)
    assert engine.loaded == [2]


def give(group: Any, failures: list[str]) -> None:
    """More than the kernel keeps of a connection."""
    try:
        send([(str(number), torch.zeros(1 << 20)) for number in range(32)], group, 1 << 22)
    except RuntimeError as error:
        failures.append(str(error))


def test_runs_that_keep_weights_in_one_folder_do_not_meet_there(tmp_path: Path):
    def folder(run: str) -> Path:
        (tmp_path / run).mkdir(exist_ok=True)
        sampler = {"folder": str(tmp_path), "transport": "disk"}
        return weights_folder(toy_config(tmp_path / run, sampler=sampler, cluster={"samplers": 1}))

    assert folder("a") == folder("a")
    assert folder("a") != folder("b")
    assert folder("a").parent == tmp_path
    alone = toy_config(tmp_path / "a")
    assert weights_folder(alone).parent == alone.run.directory


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="memory cannot be reserved")
def test_memory_that_is_not_there_is_an_error_before_it_is_used():
    """A file may be longer than the disk below it; whoever writes to what lacks is killed by the kernel (SIGBUS)."""
    with pytest.raises(NotShared, match=r"no \d+ MiB of shared memory for weights.*--shm-size.*broadcast or disk"):
        Shelf(torch.device("cpu"), 1 << 44)


def test_a_kill_request_is_kept_until_it_is_known_to_have_been_heard(tmp_path: Path):
    """The driver does not wait for a seat that is slow to answer; what the answer held must come again."""
    seat, says = Seat(), "import os; os.write(int(os.environ['POSTTRAIN_KILL_REQUESTS']), b'rank 1 77\\n')"
    seat.begin([sys.executable, "-c", says], {}, str(tmp_path))
    until(lambda: seat.state(0).status is not None)
    assert seat.state(0).kill_requests == (KillRequest("rank", 1, 77),)
    assert seat.state(0, heard=1).kill_requests == ()
    seat._output.close()
    os.close(seat._kill_requests)
    os.close(seat._told)


def test_what_a_run_starts_besides_is_not_told_the_secret(monkeypatch: pytest.MonkeyPatch):
    """Tools, agents and rewards get the environment of rank 0."""
    with free_port() as port:
        for name, value in calls_at("127.0.0.1", port).items():
            monkeypatch.setenv(name, value)
        pool = Pool.listen(ClusterConfig(samplers=1))
    assert SECRET not in os.environ
    pool.close()
