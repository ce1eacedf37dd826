"""A vLLM server that gets the policy's weights, for training: token ids in and out over HTTP, as with `server`.

It must be started with the routes for such use, and with what receives the weights:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server MODEL --logprobs-mode processed_logprobs \\
        --worker-extension-cls posttrain.sampler.vllm_worker.WeightReceiver

New weights: nothing is asked any more -> open requests are broken off, and what they have is taken -> all weights, by
files that both machines see or by broadcast -> cached prefixes are dropped -> the server is marked -> turns that were
broken off go on, from the token at which they are. So every token is known to be of the weights before or after, though
the server does not say so.

A server that is started anew has its first weights again and no mark. Every answer is followed by a look at the mark
(none is needed within RESTART_SECONDS of the last, in which no server starts); when it is gone, the weights are sent
anew by `renew`, and the answers since the last look are thrown away and asked for again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from torch import Tensor

from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import NO_WEIGHTS, Request, SamplerError
from posttrain.sampler.server import SHOWN, ServerSampler
from posttrain.sampler.vllm import across_workers, transformers_config
from posttrain.sampler.vllm_engine import RECEIVER
from posttrain.trainer.policy import Policy
from posttrain.weights.buckets import BUCKET_BYTES, Group, listen, open_group, send

log = logging.getLogger("posttrain")
RESTART_SECONDS = 2.0  # importing vLLM alone takes longer
LEFT_SECONDS = 1.0  # for answers that were broken off; who gets none in it had not begun, and is asked again
RENEWALS = 3  # times in a row that one turn may meet a server that was restarted
LOGPROBS = "processed_logprobs"
START = f"start it with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode {LOGPROBS} --worker-extension-cls {RECEIVER}"


class VllmServerSampler(ServerSampler):
    """A `Sampler` for models like `policy`; weights that may be sampled from come by `load_files` or `load_broadcast`.

    patience_seconds: for which a server that is not there is waited for. host: of this machine, as the server sees it,
    for broadcasts; None = as this machine sees itself on the way to the server. The rest: see `ServerSampler`.
    """

    in_one_process = False
    interruptible = True

    def __init__(
        self,
        policy: Policy,
        url: str,
        tokenizer: Any | None = None,
        *,
        patience_seconds: float = 300.0,
        host: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(url, tokenizer, **options)
        self.version = NO_WEIGHTS
        self.patience_seconds = patience_seconds
        self.model_config = transformers_config(policy)
        self.renew: Callable[[], Awaitable[Any]] | None = None  # called when the server has forgotten its weights
        self._vocabulary = policy.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._host, self._backend = host, "nccl" if policy.device.type == "cuda" else "gloo"
        self._name = uuid.uuid4().hex  # of this sampler, in marks: another run may have given weights meanwhile
        self._transfers = itertools.count()
        self._mark, self._seen = "", 0.0
        self._lives = 0  # of the server, as far as they were noticed
        self._renewing: asyncio.Task[Any] | None = None
        self._looking: asyncio.Lock
        self._may_ask: asyncio.Event  # not while weights change
        self._asking: set[asyncio.Task[bool]] = set()
        self._looker = ThreadPoolExecutor(
            1, "vllm server"
        )  # asyncio's own threads may be taken by waiting environments
        self._exchanging = threading.Lock()  # the mark here and the one there change together
        self._group: Group | None = None
        root = self.url.removesuffix("/v1")
        anew = httpx.Limits(max_keepalive_connections=0)  # after an error the server closes the connection
        self._control = httpx.Client(base_url=root, headers=self._headers, timeout=self._timeout, limits=anew)
        try:
            self.dtype, self._workers = self._introduction()
        except BaseException:
            self._control.close()
            raise

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Continues `ids` by one turn; cancelling the caller closes the connection, by which the server stops.

        Raises ValueError for a request that no server could serve, and SamplerError for what the server makes of it.
        """
        for _ in range(RENEWALS + 1):
            await self._client()
            await self._may_ask.wait()
            if self.version == NO_WEIGHTS and self._lives == 0:
                raise SamplerError("the server has no weights yet: publish a policy to it (posttrain.weights)")
            lives = self._lives
            sampled = await super().sample(ids, params, seed=seed, session=session)
            await self._look()
            if lives == self._lives and NO_WEIGHTS not in sampled.versions:
                return sampled
        raise SamplerError(f"{self.url} was restarted {RENEWALS + 1} times while one turn was sampled")

    def reset(self) -> None:
        """Drops every cached prefix; running requests are computed anew."""
        found = self._order("POST", "/reset_prefix_cache?reset_running_requests=true")
        if found.get("success") is not True:
            raise SamplerError(
                f"{self.url} did not drop its prefix cache, what it holds is of the old weights: {found}"
            )

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names without a tensor in the engine, tensors of the engine without a name), in Hugging Face layout."""
        return across_workers(names, self._rpc("posttrain_unmatched", list(names)))

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise SamplerError("the engine is another process: weights reach it by files or by broadcast")

    def load_files(self, folder: str, version: int) -> None:
        """New weights, all of them, from safetensors in Hugging Face layout that the server sees under the same path.

        Requests that are open go on under the new weights, from the token at which they are.
        """
        self._exchange(version, lambda: self._rpc("posttrain_load_files", folder))

    def load_broadcast(
        self, tensors: Sequence[tuple[str, Tensor]], version: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """As `load_files`, by broadcasts to all workers: gloo, or NCCL from a GPU to others."""
        if self._group is None or not self._holds_what_it_was_given():
            self._group = self._meet()
        group, self._group = self._group, None  # should the transfer fail, all have to meet anew
        with ThreadPoolExecutor(1, "weights") as sender:  # everybody takes part at the same time
            sent = sender.submit(send, tensors, group, bucket_bytes)
            self._exchange(version, lambda: self._rpc("posttrain_load_broadcast"))
            sent.result()
        self._group = group

    def close(self) -> None:
        self._looker.shutdown(wait=False)
        self._control.close()

    async def _client(self) -> httpx.AsyncClient:
        if self._loop is not asyncio.get_running_loop():
            self._looking, self._may_ask = asyncio.Lock(), asyncio.Event()
            self._may_ask.set()
            self._asking.clear()  # of a loop that has ended
        return await super()._client()

    async def _extend(self, http: httpx.AsyncClient, request: Request, seed: int) -> bool:
        while True:
            await self._may_ask.wait()
            asking = asyncio.create_task(super()._extend(http, request, seed))
            self._asking.add(asking)
            try:
                await asyncio.wait([asking])
            finally:
                self._asking.discard(asking)
                asking.cancel()  # unless it is done: the caller was cancelled
            if not asking.cancelled():  # else it had not begun when weights changed
                return asking.result()

    async def _look(self) -> None:
        """Whether the server still has the weights that it was given; if not, it has them afterwards."""
        if self._renewing is asyncio.current_task() or time.monotonic() - self._seen < RESTART_SECONDS:
            return
        async with self._looking:
            if time.monotonic() - self._seen < RESTART_SECONDS:
                return
            started = time.monotonic()
            if await asyncio.get_running_loop().run_in_executor(self._looker, self._holds_what_it_was_given):
                self._seen = started
                return
            await self._renew()

    async def _renew(self) -> None:
        log.warning("%s has other weights than it was given: it was restarted, or another run uses it", self.url)
        self._lives += 1
        self.version, self._group = NO_WEIGHTS, None
        if self.renew is None:
            raise SamplerError(f"{self.url} has lost its weights, and nobody is there to give them anew")
        self._renewing = asyncio.current_task()
        try:
            await self.renew()
        finally:
            self._renewing = None

    def _exchange(self, version: int, transfer: Callable[[], Any]) -> None:
        """On any thread. Where another one runs the loop that asks, requests may be open."""
        self._on_loop(self._shut)
        try:
            self._order("POST", "/pause?mode=abort")
            try:
                self._on_loop(self._left)
                self.version = NO_WEIGHTS  # should the transfer fail, half of the weights are of no version
                transfer()
                self.reset()
                with self._exchanging:
                    self._mark = f"{self._name}/{next(self._transfers)}"
                    self._rpc("posttrain_mark", self._mark)
            finally:
                self._order("POST", "/resume")
            self.version, self._seen = version, time.monotonic()
        finally:
            self._on_loop(self._reopen)

    def _on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = self._loop
        if loop is not None and loop.is_running() and loop is not _loop_here():
            asyncio.run_coroutine_threadsafe(work(), loop).result()

    async def _shut(self) -> None:
        self._may_ask.clear()

    async def _left(self) -> None:
        """Nothing is open any more."""
        late = list(self._asking)
        if late:
            _, late = await asyncio.wait(late, timeout=LEFT_SECONDS)
        for asking in late:
            asking.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _reopen(self) -> None:
        self._may_ask.set()

    def _meet(self) -> Group:
        world = self._workers + 1
        host = self._host or _own_address(self.url)
        store = listen(host, world)
        with ThreadPoolExecutor(1, "weights") as asker:
            joined = asker.submit(self._rpc, "posttrain_join", host, store.port, world, self._backend)
            group = open_group(store, rank=0, world=world, backend=self._backend)
            joined.result()
        return group

    def _holds_what_it_was_given(self) -> bool:
        with self._exchanging:
            return self._marked() == {self._mark}

    def _marked(self) -> set[str | None]:
        return set(self._rpc("posttrain_marked", again=True))

    def _introduction(self) -> tuple[torch.dtype, int]:
        """(dtype of the model, worker processes). Raises SamplerError for a server that cannot be trained with."""
        try:
            told = self._rpc("posttrain_introduction")[0]
        except SamplerError as error:
            raise SamplerError(f"{error}; does it have the --worker-extension-cls? {START}") from error
        if told["logprobs_mode"] != LOGPROBS:
            raise SamplerError(f"{self.url} runs with --logprobs-mode {told['logprobs_mode']}, not {LOGPROBS}: {START}")
        return getattr(torch, told["dtype"]), int(told["workers"])

    def _rpc(self, method: str, *args: Any, again: bool = False) -> list[Any]:
        """What every worker answers."""
        body = {"method": method, "args": list(args)}
        return self._order("POST", "/collective_rpc", body, again=again).get("results", [])

    def _order(self, method: str, path: str, body: Any = None, *, again: bool = False) -> dict[str, Any]:
        """The JSON object of an answer. Waits for a server that is not there. again: whether to ask a second time, too,
        when the server goes in the midst of the first: for what changes nothing there.

        Raises SamplerError.
        """
        end, unheard = time.monotonic() + self.patience_seconds, httpx.TransportError if again else httpx.ConnectError
        while True:
            try:
                answer = self._control.request(method, path, json=body)
                break
            except httpx.TransportError as error:
                if not isinstance(error, unheard):
                    told = f"{type(error).__name__}: {error}"
                    raise SamplerError(f"{method} {path} to {self.url} failed: {told}") from error
                if time.monotonic() > end:
                    raise SamplerError(f"{method} {self.url}: nobody is there ({error})") from error
                time.sleep(1.0)
        if answer.status_code == 404:
            raise SamplerError(f"{self.url} has no route {path.partition('?')[0]}: {START}")
        if not answer.is_success:
            raise SamplerError(f"{method} {path} to {self.url}: status {answer.status_code}: {answer.text[:SHOWN]}")
        try:
            found = answer.json() if answer.content else {}
        except json.JSONDecodeError as error:
            raise SamplerError(f"{self.url}{path} answered without JSON: {answer.text[:SHOWN]!r}") from error
        return found if isinstance(found, dict) else {}


def _loop_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _own_address(url: str) -> str:
    """Of this machine, on the way to a server; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return probe.getsockname()[0]
