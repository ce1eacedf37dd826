"""How much memory the sampler beside the models of a process needs, as `sampler/` allocates it, or vLLM takes it."""

from __future__ import annotations

import os
from typing import Any

from posttrain.config import RLConfig
from posttrain.runs.layout import Layout, SamplerRoom
from posttrain.runs.memory import GIB
from posttrain.runs.model_shape import ModelShape
from posttrain.sampler.engine import row_capacity
from posttrain.sampler.native import CPU_KV_GIB, CUDA_KV_SHARE, MAX_BATCH, MOST_WORKERS, TOKENS_PER_STEP

VLLM_SHARE = 0.92  # vLLM's own default of gpu_memory_utilization
VLLM_CPU_KV_GIB = 1


def sampler_room(config: RLConfig, shape: ModelShape, layout: Layout, size: int | None) -> SamplerRoom:
    """What the sampler that shares a device with the models of a process holds; nothing where it is elsewhere."""
    options = config.sampler.options
    if config.cluster.samplers:
        return _beside(config, shape, layout, size) if config.cluster.colocated else SamplerRoom()
    if config.sampler.engine == "vllm":
        engine, asleep = _vllm_bytes(options, shape, layout, size), _asleep_bytes(config, shape, layout)
        return SamplerRoom(engine_bytes=engine, asleep_bytes=asleep)
    if config.sampler.engine != "native":
        return SamplerRoom()  # a server's memory is its own
    return _native_room(config, shape, layout, size)


def _beside(config: RLConfig, shape: ModelShape, layout: Layout, size: int | None) -> SamplerRoom:
    """What colocated samplers (processes of their own) hold on the device of one rank."""
    count, asleep = -(-config.cluster.samplers // layout.ranks), None
    if config.sampler.engine == "vllm":
        one = _vllm_bytes(config.sampler.options, shape, layout, size)
        asleep = _asleep_bytes(config, shape, layout)
    else:
        room = _native_room(config, shape, layout, size)
        keys = room.rows * room.capacity * shape.key_value_width * layout.dtype_bytes
        one = shape.parameters * layout.dtype_bytes + keys
    held = None if asleep is None else count * asleep
    return SamplerRoom(engine_bytes=count * one, asleep_bytes=held, processes=count)


def _asleep_bytes(config: RLConfig, shape: ModelShape, layout: Layout) -> int | None:
    """What a vLLM engine keeps in host memory while the trainer works; None: it stays awake."""
    if not config.sampler.sleep or layout.device != "cuda":
        return None
    return shape.parameters * layout.dtype_bytes if config.sampler.sleep == 1 else 0


def _native_room(config: RLConfig, shape: ModelShape, layout: Layout, size: int | None) -> SamplerRoom:
    options = config.sampler.options
    engines = _engines(config, layout)
    batch = -(-int(options.get("max_batch", MAX_BATCH)) // engines)
    steps = -(-int(options.get("tokens_per_step", TOKENS_PER_STEP[layout.device])) // engines)
    capacity = _capacity(config)
    row_bytes = capacity * shape.key_value_width * layout.dtype_bytes
    budget = _kv_budget(options.get("kv_gib"), layout, size)
    most = 4 * batch if budget is None else min(4 * batch, int(budget) // engines // row_bytes)
    episodes = config.batch.episodes_per_step * (1 + (config.sampling.max_staleness or 0))
    wanted = -(-episodes // ((config.cluster.samplers or layout.ranks) * engines))
    rows = _grown(wanted, most, batch if layout.device == "cuda" else 8)
    prompts = min(steps, config.batch.prompts_per_step * config.limits.max_prompt_tokens)
    return SamplerRoom(
        rows=engines * rows,
        capacity=capacity,
        batch=engines * min(batch, wanted),
        tokens_per_step=engines * prompts,
        graphs=layout.device == "cuda",
    )


def _engines(config: RLConfig, layout: Layout) -> int:
    if layout.device == "cuda":
        return 1
    cores = max(1, min(MOST_WORKERS, os.cpu_count() or 1))
    return config.sampling.engines or max(1, cores // layout.ranks)


def _capacity(config: RLConfig) -> int:
    """Tokens of a cache row after the longest episode, grown as `Engine._reserve` does: by half whenever too short."""
    limits = config.limits
    capacity = row_capacity(min(limits.max_prompt_tokens + limits.max_turn_tokens, limits.max_episode_tokens) + 1)
    while capacity < limits.max_episode_tokens + 1:
        capacity = row_capacity(max(capacity + 1, capacity * 3 // 2))
    return capacity


def _grown(wanted: int, most: int, least: int) -> int:
    """Rows of the cache once `wanted` sequences ran at a time, grown by half as `Engine._reserve_rows` does."""
    rows = min(least, most)
    while rows < min(wanted, most):
        rows = min(most, max(rows + 1, rows * 3 // 2))
    return rows


def _kv_budget(gib: Any, layout: Layout, size: int | None) -> float | None:
    if gib is not None:
        return float(gib) * GIB
    if layout.device == "cpu":
        return CPU_KV_GIB * GIB
    return None if size is None else CUDA_KV_SHARE * size  # of what is free then; this is the most that may be


def _vllm_bytes(options: dict[str, Any], shape: ModelShape, layout: Layout, size: int | None) -> int:
    """The share of the GPU that vLLM takes for all it has; on a CPU its weights and its cache."""
    weights, cache = shape.parameters * layout.dtype_bytes, options.get("kv_cache_memory_bytes")
    if layout.device == "cuda" and size is not None and cache is None:
        return int(size * float(options.get("gpu_memory_utilization", VLLM_SHARE)))
    return weights + int(VLLM_CPU_KV_GIB * GIB if cache is None else cache)
