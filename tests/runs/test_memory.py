"""The plan's estimate of memory: formulas worked by hand, peaks that were measured on a GPU, peaks measured here."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.runs.layout import Layout, MicroBatch, Roles, SamplerRoom
from posttrain.runs.memory import ERROR_BAND, GIB, ProcessSetup, estimate
from posttrain.runs.model_shape import ModelShape
from posttrain.runs.model_sizes import shape_at, shape_like


def loaded(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[2] / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


memory = loaded("benchmarks/memory.py")
HALF_B = memory.SHAPES["0.5b"]
GROUP = MicroBatch(rows=2560, tokens=6144, read=2048, shared=512)  # 8 episodes of 512 + 256 tokens
TORCH_211 = Layout(grouped_keys=False)  # whose FlashAttention on packed rows wants as many key heads as query heads
CACHE = SamplerRoom(rows=256, capacity=800, batch=128, tokens_per_step=16384, graphs=True)


def groups(count: int) -> MicroBatch:
    return MicroBatch(**{name: count * getattr(GROUP, name) for name in ("rows", "tokens", "read", "shared")})


@pytest.fixture(scope="module")
def half_b() -> ModelShape:
    return shape_like(HALF_B)


def test_sizes_are_those_of_the_modules(half_b: ModelShape):
    assert half_b.parameters == 494_032_768
    assert half_b.layers * half_b.layer_parameters + half_b.outside == half_b.parameters
    assert half_b.key_value_width == 24 * 2 * 2 * 64
    packaged = shape_at("tiny_search_base")
    assert packaged.layers * packaged.layer_parameters + packaged.outside == packaged.parameters


def test_a_step_on_an_h100_as_measured(half_b: ModelShape):
    """docs/performance.md: 8.9 GiB held and 18.4 GiB for an update in micro-batches of 16,384 tokens, 59 GB in one."""
    setup = ProcessSetup(
        policy=half_b, layout=TORCH_211, micro_batches=(groups(6), groups(5), groups(5)), sampler=CACHE
    )
    found = estimate(setup)
    held = found.named("optimizer step").bytes - found.named("optimizer step").parts["gradients"]
    assert held == pytest.approx(8.9 * GIB, rel=0.02)
    assert found.torch_bytes == pytest.approx((8.9 + 18.4) * GIB, rel=0.05)
    single = estimate(replace(setup, micro_batches=(groups(16),)))
    assert single.torch_bytes == pytest.approx(59e9, rel=0.05)


def test_bytes_by_hand(half_b: ModelShape):
    """docs/scaling.md: 2 (sampler) + 16 / N bytes per parameter; a bfloat16 reference 2 / N, a critic 16 / N."""
    count, layout = half_b.parameters, Layout(ranks=4)
    setup = ProcessSetup(
        policy=half_b, layout=layout, micro_batches=(GROUP,), roles=Roles(ref=True, critic=True, copy=True)
    )
    step = estimate(setup).named("optimizer step").parts
    assert step["policy, whole, for the sampler"] == 2 * count
    assert step["float32 masters (shards)"] + step["moments of AdamW"] + step["gradients"] == 16 * count // 4
    assert step["reference"] == 2 * count // 4
    assert step["critic, its masters and moments"] == 12 * count // 4  # its gradients come and go
    offloaded = estimate(replace(setup, layout=replace(layout, offload=True)))
    assert set(offloaded.named("optimizer step").parts) == {"policy, whole, for the sampler"}
    assert offloaded.host["shards, moments and gradients"] == (2 * count * 16 + 2 * count) // 4


def test_bytes_of_whole_weights_by_hand(half_b: ModelShape):
    """docs/scaling.md: 2 + 4 + 12 / N bytes per parameter, a reference 2; and this rank's stretch of gradients."""
    count, layout = half_b.parameters, Layout(ranks=4, whole_weights=True)
    setup = ProcessSetup(policy=half_b, layout=layout, micro_batches=(GROUP,), roles=Roles(ref=True, critic=True))
    step = estimate(setup).named("optimizer step").parts
    assert step["policy"] == step["reference"] == 2 * count
    assert step["float32 masters"] + step["moments of AdamW"] == 12 * count // 4
    assert step["gradients"] == 4 * count
    assert step["gradients of this rank's masters"] == 4 * count // 4
    assert step["critic, its masters and moments"] == 2 * count + 12 * count // 4
    assert "gathered weights" not in estimate(setup).named("backward: last layer").parts


def test_what_makes_room_makes_room(half_b: ModelShape):
    def peak(**changes: object) -> int:
        rows = MicroBatch(rows=16384, tokens=16384, read=8192)
        copy = Roles(copy=bool(changes.get("ranks")))
        return estimate(
            ProcessSetup(policy=half_b, layout=Layout(**changes), micro_batches=(rows, rows), roles=copy)  # type: ignore[arg-type]
        ).torch_bytes

    two = {"ranks": 2, "compiled": True}
    assert peak(gradient_checkpointing=True) < peak() / 2 < peak() < peak(compiled=False)
    assert peak(**two, offload=True) < peak(**two) < peak(**two, reshard_after_forward=False)
    assert peak(**two, sequence_parallel=2) < 0.7 * peak(**two)
    eager = two | {"compiled": False}
    assert peak(**eager, tensor_parallel=2) < 0.8 * peak(**eager)


MEASURED = ("tiny", "tiny_checkpointing", "tiny_several")


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_near_the_peak_of_an_update(name: str, tmp_path: Path):
    """All that torch's allocator gives and takes, as its profiler records it."""
    case = memory.CPU_CASES[name]
    memory.write_model(tmp_path / "model", memory.SHAPES[case.model])
    found = memory.case_on_this_rank(case, "cpu", tmp_path / "model")
    assert abs(found["error"]) < ERROR_BAND, found
