"""The in-process sampler: the policy's own module, continuous batching, caches that live as long as an episode.

There is no second copy of the weights and nothing to synchronise; log-probs equal the trainer's. All work happens on
the caller's event loop: one task runs engine steps while any request is open, and between steps everything else that
can run (tools, HTTP, other episodes) runs.

The engine task
  consumes      requests put in by concurrent `sample` calls, in the order of the calls
  waits for     every episode that can go on without the clock or the network to have asked for its next turn
  unblocked by  the first `sample` call; it ends when no request is open
  produces      one `Sampled` per request, or the error that stopped the engine
With environments that never leave the event loop, the composition of every forward is a function of the seeds alone,
so a resumed run repeats it bit by bit.

On a CPU with few cores, `workers` engines share the requests, each on a thread of its own and at its own pace (see
`side_by_side.py`); that is worth what torch's intra-op threads are worth, without their barriers, which stall when a
neighbour takes a core. What one engine does must not hang on how fast another is, or runs would not repeat:
  - a session stays with one engine;
  - the engine whose results are being given out rests until everybody who can run without the clock or the network
    has run, and results of one engine at a time are given out; so what comes of them (next turns, new prompts too) is
    with that engine before its next forward, whatever the others do meanwhile;
  - prompts that come while no engine gives out results go where the same prompt went (a group stays together), new
    ones where the fewest requests are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from posttrain.sampler.engine import Engine
from posttrain.sampler.protocol import Hear, Sampled, SamplingParams
from posttrain.sampler.requests import EngineLimits, Request, SamplerStats, fail_all, new_request, refuse_truncation
from posttrain.sampler.side_by_side import Track
from posttrain.sampler.stopping import Stops
from posttrain.trainer.parallel import threads
from posttrain.trainer.policy import Policy

SETTLE_TURNS = 64  # at most so many turns of the event loop between two forwards
PAUSE_SECONDS = 0.005  # the longest that timers and the network wait for the engine
QUIET_TURNS = 16  # on a loop that does not show its queue: so many turns without a new request
MAX_BATCH = 256
MOST_WORKERS = 4
CPU_KV_GIB = 2.0
TOKENS_PER_STEP = {"cpu": 4096, "cuda": 16384}
CUDA_KV_SHARE = 0.25  # of the memory that is free when the sampler is made


@dataclass(slots=True)
class _Caller:
    """A request, the engine that has it, and the future on which its `sample` call waits."""

    request: Request
    track: Track
    future: asyncio.Future[Sampled]


class NativeSampler:
    """A `Sampler` on `policy.module`.

    tokenizer: a Hugging Face tokenizer, needed for stop strings only.
    max_batch: sequences per forward. tokens_per_step: new tokens per forward. kv_gib: memory for keys and values.
    workers: engines side by side; memory and rows are shared out among them.
    truncation: top_p < 1 and top_k > 0 give log-probs of the truncated distribution, which the trainer does not
    compute; "refuse" (the default) raises, "allow" samples them exactly and counts the tokens in `stats()`.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any | None = None,
        *,
        max_batch: int = MAX_BATCH,
        tokens_per_step: int | None = None,
        kv_gib: float | None = None,
        workers: int = 1,
        truncation: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if tokens_per_step is None:
            tokens_per_step = TOKENS_PER_STEP[policy.device.type]
        if max_batch < 1 or tokens_per_step < max_batch:
            raise ValueError(f"need 1 <= max_batch ({max_batch}) <= tokens_per_step ({tokens_per_step})")
        self.policy = policy
        self._stops = Stops(tokenizer)
        self._vocabulary = policy.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._truncation = truncation
        if workers < 1:
            raise ValueError(f"workers must be >= 1, got {workers}")
        limits = EngineLimits(
            max_batch=-(-max_batch // workers),
            tokens_per_step=-(-tokens_per_step // workers),
            kv_bytes=_kv_bytes(kv_gib, policy.device) // workers,
            max_context=getattr(policy.config, "max_position_embeddings", None) or 1 << 62,
        )
        self.engines = tuple(Engine(policy, limits) for _ in range(workers))
        self._tracks = tuple(map(Track, self.engines))
        self._pool = threads(workers, "sampler") if workers > 1 else None
        self._news = asyncio.Event()  # an engine is done, or one that rests has got something to do
        self._callers: dict[int, _Caller] = {}  # by id of the request
        self._prompts: dict[tuple[int, ...], Track] = {}  # who got which prompt: a group stays together
        self._sessions: dict[str, Track] = {}
        self._giving: Track | None = None  # whose results are being given out
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._submitted = 0

    @property
    def version(self) -> int:
        return self.policy.version

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Continues `ids` by one turn. Cancelling the caller frees its row at once.

        Raises ValueError for a request that cannot be served and SamplerError when the engine fails.
        """
        return await self._sample(ids, params, None, seed=seed, session=session)

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, hear: Hear, *, seed: int, session: str | None = None
    ) -> Sampled:
        """See `StreamingSampler`."""
        loop = asyncio.get_running_loop()

        def tell(token: int, logprob: float) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(hear, token, logprob)

        return await self._sample(ids, params, tell, seed=seed, session=session)

    async def _sample(
        self, ids: Sequence[int], params: SamplingParams, hear: Hear | None, *, seed: int, session: str | None
    ) -> Sampled:
        self._check(params)
        rule = self._stops.rule(params)
        context = self.engines[0].limits.max_context
        request = new_request(
            ids, params, seed=seed, session=session, rule=rule, max_context=context, vocabulary=self._vocabulary
        )
        request.hear = hear
        self.engines[0].check_fits(request)
        self._bind(asyncio.get_running_loop())
        track = self._home(request)
        caller = self._callers[id(request)] = _Caller(request, track, asyncio.get_running_loop().create_future())
        track.do(lambda: track.engine.submit(request))
        self._submitted += 1
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            return await caller.future
        finally:
            if self._callers.pop(id(request), None) is not None:  # cancelled
                track.do(lambda: track.engine.cancel(request))

    def release(self, session: str) -> None:
        home = self._sessions.pop(session, None)
        for track in self._tracks if home is None else (home,):
            track.do(lambda engine=track.engine: engine.release(session))

    def stats(self) -> SamplerStats:
        """The counters of all engines, summed."""
        return SamplerStats.total([engine.stats for engine in self.engines])

    def counters(self) -> dict[str, int]:
        """See `CountingSampler`."""
        return asdict(self.stats())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No forward runs meanwhile, so that weights may change; what is unfinished goes on afterwards."""
        with ExitStack() as held:
            for engine in self.engines:
                held.enter_context(engine.forward)
            yield

    def reset(self) -> None:
        """Drops every cache. Needed only when weights were changed without counting `policy.version` up."""
        if self._callers:
            raise RuntimeError(f"{len(self._callers)} requests are open; reset the sampler between rollouts")
        self._reset_engines()

    def _reset_engines(self) -> None:
        for track in self._tracks:
            track.stop()
        self._prompts.clear()
        self._sessions.clear()
        self._giving = None
        for engine in self.engines:
            engine.reset()

    def _home(self, request: Request) -> Track:
        """The engine for a request, by the first that applies: it has the session; its results are being given out, so
        that this request came of them; it was given the same prompt; it has the fewest open requests."""
        if len(self._tracks) == 1:
            return self._tracks[0]
        prompt = tuple(request.ids)
        home = self._sessions.get(request.session or "") or self._giving or self._prompts.get(prompt)
        if home is None:
            load = Counter(id(caller.track) for caller in self._callers.values())
            home = min(self._tracks, key=lambda track: load[id(track)])
        self._prompts[prompt] = home
        if request.session is not None:
            self._sessions[request.session] = home
        return home

    def _check(self, params: SamplingParams) -> None:
        if self._truncation == "refuse":
            refuse_truncation(params, "NativeSampler")

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes `loop` the one that uses this sampler; drops the requests of an earlier loop that has ended."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("this sampler is in use on another event loop; give each running loop its own sampler")
        if self._callers or self._task is not None:
            self._callers.clear()
            self._task = None
            self._reset_engines()
        self._loop = loop
        self._news = asyncio.Event()  # an event belongs to the loop in which it is first waited for

    async def _run(self) -> None:
        try:
            await self._settle()
            await (self._run_here() if self._pool is None else self._run_threads(self._pool))
            self._prompts.clear()
        except BaseException as error:
            if self._task is asyncio.current_task():  # else: of a dead loop, and another has taken over
                self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _run_here(self) -> None:
        """The only engine, on the loop itself."""
        (engine,) = self.engines
        quiet, settled = True, time.monotonic()
        while engine.has_work:
            finished = engine.step()
            for request in finished:
                self._answer(request)
            # while nobody got an answer, only the clock and the network can have moved anyone
            if finished or not quiet or time.monotonic() - settled > PAUSE_SECONDS:
                quiet, settled = await self._settle(), time.monotonic()

    async def _run_threads(self, pool: ThreadPoolExecutor) -> None:
        """See the module's docstring for the order in which results are given out."""
        ring = _bell(asyncio.get_running_loop(), self._news)
        while True:
            self._news.clear()
            for track in self._tracks:
                if not track.running and track.engine.has_work:
                    track.start(pool, ring)
            if not any(track.running for track in self._tracks):
                return
            self._giving = next((track for track in self._tracks if track.done), None)
            if self._giving is None:
                await self._news.wait()
                continue
            for request in self._giving.take():
                self._answer(request)
            await self._settle()
            self._giving = None

    async def _settle(self) -> bool:
        """Lets everything run that can run without waiting for the clock or the network; False if there was too much.

        asyncio's own loops show their queue of ready callbacks; when it is empty after our turn, nobody else can move.
        """
        ready = self._ready_queue()
        quiet, seen = 0, self._submitted
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
            if ready is not None:
                if not ready:
                    return True
                continue
            quiet, seen = (quiet + 1, seen) if seen == self._submitted else (0, self._submitted)
            if quiet >= QUIET_TURNS:
                return True
        return False

    def _ready_queue(self) -> Collection[object] | None:
        """What the loop is about to run, where the loop shows it (asyncio's own do, uvloop does not)."""
        return getattr(self._loop, "_ready", None)

    def _answer(self, request: Request) -> None:
        caller = self._callers.pop(id(request), None)
        assert request.result is not None
        if caller is not None and not caller.future.done():
            caller.future.set_result(request.result)

    def _fail(self, error: BaseException) -> None:
        """Nobody is left waiting, and nothing half-done is left in the engine."""
        callers = list(self._callers.values())
        self._callers.clear()
        self._reset_engines()
        fail_all([caller.future for caller in callers], error, f"sampling failed: {error}")


def workers_for(device: torch.device) -> int:
    """How many engines keep the cores busy: cores / torch's threads per engine, at most MOST_WORKERS.

    All engines share one interpreter lock, so that more of them are no faster.
    """
    if device.type != "cpu":
        return 1
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // torch.get_num_threads()))


def _bell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> Callable[[], None]:
    """A function that sets `news`, an event of `loop`, from any thread."""

    def ring() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile; whoever comes next waits for the thread itself
            loop.call_soon_threadsafe(news.set)

    return ring


def _kv_bytes(gib: float | None, device: torch.device) -> int:
    if gib is not None:
        if gib <= 0:
            raise ValueError(f"kv_gib must be > 0, got {gib}")
        return int(gib * 2**30)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_KV_SHARE)
    return int(CPU_KV_GIB * 2**30)
