"""vLLM as a sampler, in this process: token ids in and out, processed log-probs, prefix caching, chunked prefill.

The engine has its own copy of the weights, given to it by `posttrain.weights`; until then it refuses to sample. It
lives on a thread of its own, and everything that touches it goes there.

The engine task
  consumes      requests and cancellations in the order of the calls
  waits for     the engine's step, on its thread; the event loop runs meanwhile
  unblocked by  the first `sample` call; it ends when no request is open
  produces      one `Sampled` per request, or the error that stopped the engine

A token is stamped with the weights that its step ran with. Seeds belong to requests, so that a turn does not depend on
what else is sampled, but for rounding: the engine's products are rounded differently in another batch.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import (
    NO_WEIGHTS,
    SEED_MASK,
    Request,
    SamplerError,
    SamplerStats,
    ends,
    fail_all,
    new_request,
    refuse_truncation,
)
from posttrain.sampler.stopping import Stops
from posttrain.sampler.vllm_engine import adapter_request, sampling_params, start_engine, stop_engine
from posttrain.trainer.loading import write_module
from posttrain.trainer.lora import without_adapters
from posttrain.trainer.policy import Policy
from posttrain.weights.adapters import adapter_of, has_adapters
from posttrain.weights.buckets import BUCKET_BYTES, Group, listen, open_group, send

T = TypeVar("T")
LOCAL = "127.0.0.1"


@dataclass(slots=True, eq=False)
class _Caller:
    """Who waits for a request, under the name that the engine knows it by."""

    name: str
    request: Request
    future: asyncio.Future[Sampled]


@dataclass(slots=True, eq=False)
class _Running:
    """A request inside the engine."""

    request: Request
    seed: int


class VllmSampler:
    """A `Sampler` on an engine of its own for models like `policy`; weights that may be sampled from come by `load`.

    tokenizer: needed for stop strings only. options: vLLM's EngineArgs by name. truncation: as the native sampler's.
    For a policy with adapters the engine takes these apart from the base, unless the option enable_lora is false.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any | None = None,
        *,
        truncation: Literal["refuse", "allow"] = "refuse",
        **options: Any,
    ) -> None:
        self.version = NO_WEIGHTS
        self.stats = SamplerStats()
        self._stops = Stops(tokenizer)
        self._truncation = truncation
        self._vocabulary = policy.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._orders: deque[Callable[[], None]] = deque()  # what the engine's thread does before its next step
        self._callers: dict[str, _Caller] = {}
        self._in_engine: dict[str, _Running] = {}  # touched on the engine's thread only
        self._adapter: Any | None = None  # vLLM's name for the one that is in use
        self._asleep = False
        self._adapters = 0  # that came so far: each has a number of its own, by which vLLM tells prefixes apart
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._count = 0
        self._closed = False
        self.model_config, self.dtype = transformers_config(policy), policy.dtype
        adapted = has_adapters(policy.module) and options.get("enable_lora", True)
        adapter = adapter_of(policy.module) if adapted else None
        save = policy.save if adapter is None else lambda folder: write_module(without_adapters(policy.module), folder)
        try:
            self._engine = self._on_thread(lambda: start_engine(save, policy.dtype, options, adapter))
        except BaseException:
            self._thread.shutdown()
            raise
        self.max_context: int = self._engine.model_config.max_model_len
        self._workers: int = self._engine.vllm_config.parallel_config.world_size
        self.in_one_process = self._workers == 1
        self.takes_adapters = adapter is not None
        self._group: Group | None = None

    def counters(self) -> dict[str, int]:
        """See `CountingSampler`. What the scheduler gives up for memory is the engine's own business."""
        return self.stats.chosen("requests", "tokens_generated", "tokens_prefilled", "tokens_reused")

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Continues `ids` by one turn; cancelling the caller aborts it in the engine.

        Raises ValueError for a request that cannot be served and SamplerError when the engine fails.
        """
        self._check(params)
        request = new_request(
            ids,
            params,
            seed=seed,
            session=session,
            rule=self._stops.rule(params),
            max_context=self.max_context,
            vocabulary=self._vocabulary,
        )
        self._bind(asyncio.get_running_loop())
        self._count += 1
        name = str(self._count)
        caller = self._callers[name] = _Caller(name, request, asyncio.get_running_loop().create_future())
        self._orders.append(lambda: self._submit(name, request, seed))
        self._wake()
        try:
            return await caller.future
        finally:
            if self._callers.pop(name, None) is not None:  # cancelled
                self._orders.append(lambda: self._abort([name]))
                self._wake()

    def release(self, session: str) -> None:
        """Nothing to do: the engine's cache is by content, and drops what was not used for longest."""

    def reset(self) -> None:
        """Drops every cached prefix; running requests are computed anew."""
        self._on_thread(self._reset)

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names without a tensor in the engine, tensors of the engine without a name), in Hugging Face layout."""
        return across_workers(names, self._rpc("posttrain_unmatched", list(names)))

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, rank: int = 0) -> None:
        """New weights from this process, all of them; what was computed with the old ones is forgotten.

        rank: > 0 for the factors of an adapter, which is used on top of the weights until others come.
        Requests that are open go on under the new weights, from the token at which they are.
        """
        if not self.in_one_process:
            raise SamplerError("the engine has several worker processes: weights reach them by files or by broadcast")
        self._new_weights(version, rank, "posttrain_load", tensors)

    def load_files(self, folder: str, version: int, *, rank: int = 0) -> None:
        """As `load`, from safetensors in Hugging Face layout, or peft's for an adapter."""
        self._new_weights(version, rank, "posttrain_load_files", folder)

    def load_broadcast(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        version: int,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        rank: int = 0,
    ) -> None:
        """As `load`, by broadcasts to all workers: gloo, as NCCL joins no two processes of one GPU."""
        if self._group is None:
            self._group = self._meet()
        group, self._group = self._group, None  # should the transfer fail, all have to meet anew
        with ThreadPoolExecutor(1, "weights") as sender:  # everybody takes part at the same time
            sent = sender.submit(send, tensors, group, bucket_bytes)
            self._new_weights(version, rank, "posttrain_load_broadcast")
            sent.result()
        self._group = group

    def _meet(self) -> Group:
        world, backend = self._workers + 1, "gloo"
        store = listen(LOCAL, world)
        joined = self._thread.submit(self._collective, "posttrain_join", LOCAL, store.port, world, backend)
        group = open_group(store, rank=0, world=world, backend=backend)
        joined.result()
        return group

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the cache, and the weights' memory too: 1 keeps them in host memory, 2 forgets them. Only between
        rollouts; `wake` or new weights end it. Needs the option enable_sleep_mode on a GPU; a CPU's vLLM frees nothing.
        """
        if self._callers:
            raise SamplerError(f"{len(self._callers)} requests are open; the engine sleeps between rollouts")

        def put_to_sleep() -> None:
            self._reset()
            self._engine.sleep(level)
            self._asleep = True
            if level == 2:
                self.version = NO_WEIGHTS

        self._on_thread(put_to_sleep)

    def wake(self) -> None:
        """With the weights that were kept; those that were forgotten have to be given anew, which wakes it, too."""
        self._on_thread(lambda: self._rouse("weights", "kv_cache"))

    def close(self) -> None:
        """Ends the engine. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._on_thread(lambda: stop_engine(self._engine))
        self._thread.shutdown()

    def _check(self, params: SamplingParams) -> None:
        if self._closed:
            raise SamplerError("this sampler is closed")
        if self._asleep:
            raise SamplerError("the engine is asleep: wake it, or publish a policy to it (posttrain.weights)")
        if self.version == NO_WEIGHTS:
            raise SamplerError("the engine has no weights yet: publish a policy to it (posttrain.weights)")
        if self._truncation == "refuse":
            refuse_truncation(params, "VllmSampler")

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Every use is from one loop at a time; what a dead loop left behind is aborted."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("this sampler is in use on another event loop; give each running loop its own sampler")
        if self._callers:
            left = list(self._callers)
            self._orders.append(lambda: self._abort(left))
        self._callers.clear()
        self._loop, self._task = loop, None

    def _wake(self) -> None:
        if self._task is None and self._loop is not None and not self._loop.is_closed():
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(0)  # everybody who asks now is in the first batch
            while self._callers or self._orders:
                for name, request in await loop.run_in_executor(self._thread, self._advance):
                    self._answer(name, request)
                await asyncio.sleep(0)
        except BaseException as error:
            if self._task is asyncio.current_task():
                self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _answer(self, name: str, request: Request) -> None:
        caller = self._callers.pop(name, None)
        assert request.result is not None
        if caller is not None and not caller.future.done():
            caller.future.set_result(request.result)

    def _fail(self, error: BaseException) -> None:
        """Nobody is left waiting."""
        callers = list(self._callers.values())
        self._callers.clear()
        self._orders.append(lambda: self._abort([caller.name for caller in callers]))
        fail_all([caller.future for caller in callers], error, f"sampling failed: {type(error).__name__}: {error}")

    # On the engine's thread -------------------------------------------------------------------------------------------

    def _on_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _advance(self) -> list[tuple[str, Request]]:
        """Runs one engine step and returns the requests that it ended."""
        self._obey()
        if not self._in_engine:
            return []
        outputs = self._engine.step()
        self.stats.steps += 1
        return [done for output in outputs if (done := self._read(output)) is not None]

    def _obey(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _submit(self, name: str, request: Request, seed: int) -> None:
        """Also what was in the engine before and goes on: its draws are then other ones."""
        params = request.params
        settings = sampling_params(
            max_tokens=request.limit - len(request.ids),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=(seed + request.generated) & SEED_MASK,
            stop_token_ids=sorted(request.rule.ids),
        )
        prompt = {"prompt_token_ids": list(request.ids)}
        self._engine.add_request(name, prompt, settings, lora_request=self._adapter)
        self._in_engine[name] = _Running(request, seed)

    def _abort(self, names: list[str]) -> None:
        known = [name for name in names if self._in_engine.pop(name, None) is not None]
        if known:
            self._engine.abort_request(known)

    def _read(self, output: Any) -> tuple[str, Request] | None:
        """Appends the new tokens of an output to its request; returns (name, request) when that ends the turn."""
        name = output.request_id
        running = self._in_engine.get(name)
        if running is None:
            return None
        request = running.request
        (part,) = output.outputs
        for token, found in zip(part.token_ids, part.logprobs or (), strict=True):
            request.ids.append(token)
            request.logprobs.append(min(found[token].logprob, 0.0))
            request.versions.append(self.version)
            if ends(request):
                self._finished(name, request, output)
                return name, request
        if output.finished:
            del self._in_engine[name]
            raise SamplerError(f"the engine ended a turn after {request.generated} tokens for {part.finish_reason!r}")
        return None

    def _finished(self, name: str, request: Request, output: Any) -> None:
        if output.finished:
            del self._in_engine[name]
        else:
            self._abort([name])  # at a stop string, of which the engine knows nothing
        reused = output.num_cached_tokens or 0
        self.stats.requests += 1
        self.stats.tokens_generated += request.generated
        self.stats.tokens_reused += reused
        self.stats.tokens_prefilled += max(request.prompt_length - reused, 0)
        self.stats.cache_hits += reused > 0

    def _reset(self) -> None:
        self._obey()
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._in_engine)):
            raise SamplerError("vLLM did not drop its prefix cache: what it holds is of the old weights")

    def _new_weights(self, version: int, rank: int, method: str, *sent: Any) -> None:
        def exchange() -> None:
            self._obey()
            self.version = NO_WEIGHTS  # should the transfer fail, half of the weights are of no version
            self._rouse("weights")
            adapter = None
            if rank:
                self._adapters += 1
                adapter = adapter_request(self._adapters)
                self._collective(method, *sent, (self._adapters, rank))
            else:
                self._collective(method, *sent)
            self._use(adapter)
            self._reset()
            self._rouse("kv_cache")  # after the transfer, whose copies have its room meanwhile
            self.version = version
            self.stats.flushes += 1

        self._on_thread(exchange)

    def _rouse(self, *memory: str) -> None:
        """Gives the engine these kinds of memory again, if it is asleep; with the last of them it is awake."""
        if self._asleep:
            self._engine.wake_up(list(memory))
            self._asleep = "kv_cache" not in memory

    def _use(self, adapter: Any | None) -> None:
        """Requests in the engine have an adapter for good: those that are open begin anew, at the token they are at."""
        changed, self._adapter = adapter is not self._adapter, adapter
        for name, running in list(self._in_engine.items()) if changed else []:
            self._engine.abort_request([name])
            self._submit(name, running.request, running.seed)

    def _collective(self, method: str, *args: Any) -> list[Any]:
        return self._engine.collective_rpc(method, args=args)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._on_thread(lambda: self._collective(method, *args))


def transformers_config(policy: Policy) -> Any:
    """The transformers config, with the architecture that a directory would name."""
    module: Any = policy.module.get_base_model() if hasattr(policy.module, "get_base_model") else policy.module  # type: ignore[operator]
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(policy.dtype).removeprefix("torch.")
    return config


def across_workers(
    names: Sequence[str], answers: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> tuple[list[str], list[str]]:
    """(names that no worker has a tensor for, tensors that some worker needs and that are not among the names)

    With pipeline parallelism every worker has some of the layers, so a name is unknown only if all say so.
    """
    unknown = set(names).intersection(*(answer[0] for answer in answers))
    missing = dict.fromkeys(name for answer in answers for name in answer[1])
    return [name for name in names if name in unknown], list(missing)
