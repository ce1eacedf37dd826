"""Plans for devices: the micro-batch a config leads to, what fits, and what is proposed where nothing does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import Command, command_in, write_config
from posttrain.config import ConfigError, RLConfig, parse_config
from posttrain.loops.room import DoesNotFit, check_room, largest_micro_batch, layout_of, room_of
from posttrain.runs.memory import GIB
from posttrain.trainer.ranks import ALONE

HALF_B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
BATCH = {"prompts_per_step": 16, "samples_per_prompt": 8, "tokens_per_micro_batch": 16384}
LIMITS = {"max_prompt_tokens": 512, "max_turn_tokens": 256, "max_episode_tokens": 768}


@pytest.fixture
def half_b(tmp_path: Path) -> Path:
    """A model of which there is only what a plan reads."""
    folder = tmp_path / "half_b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HALF_B))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_in(tmp_path, monkeypatch, capfd)


def config(folder: Path, **sections: Any) -> RLConfig:
    base = {"model": {"path": str(folder)}, "data": {"train": "unused"}, "limits": LIMITS, "batch": BATCH}
    return parse_config(RLConfig, base | sections)


def test_the_largest_micro_batch_is_that_of_episodes_at_their_limits(half_b: Path):
    """16 groups of 512 + 8 x 256 rows are 40,960, in three micro-batches of at most 16,384."""
    plan = config(half_b)
    micro, count = largest_micro_batch(plan, layout_of(plan, "cuda", 1))
    assert (micro.rows, count) == (13_654, 3)
    assert micro.tokens == round(13_654 / 40_960 * 98_304)
    assert micro.read == round(13_654 / 40_960 * 32_768)
    micro, count = largest_micro_batch(plan, layout_of(plan, "cuda", 8))
    assert (micro.rows, count) == (40_960 // 8, 1)
    plain = config(half_b, batch=BATCH | {"prompts_per_step": 2}, model={"path": str(half_b), "dtype": "float32"})
    micro, count = largest_micro_batch(plain, layout_of(plain, "cuda", 1))  # no FlashAttention: prompts for everyone
    assert (micro.rows, micro.tokens, micro.shared, count) == (12_288, 12_288, 0, 1)


def test_a_plan_for_gpus_is_made_where_there_are_none(half_b: Path):
    room = room_of(config(half_b), gpu_gib=80)
    assert room.fits
    assert 20 * GIB < room.estimate.bytes < 40 * GIB
    assert room.layout.device == "cuda"
    with pytest.raises(ConfigError, match=r"model\.device is cpu, and GPUs are said to have 80 GiB"):
        room_of(config(half_b, model={"path": str(half_b), "device": "cpu"}), gpu_gib=80)
    unknown = room_of(config(half_b, model={"path": str(half_b), "device": "cuda"}))
    assert unknown.fits == (unknown.device_bytes is None or unknown.estimate.bytes <= unknown.device_bytes)


def test_whole_weights_stay_whole_where_smaller_micro_batches_are_enough(half_b: Path):
    whole = config(half_b, trainer={"backend": "ddp", "ranks": 2})
    found = room_of(whole, gpu_gib=18).proposal
    assert found is not None
    assert found.settings == ("batch.tokens_per_micro_batch=8192",)
    found = room_of(whole, gpu_gib=6).proposal
    assert found is not None
    assert "trainer.backend=fsdp2" in found.settings


def test_samplers_on_the_gpus_of_ranks_count_there(half_b: Path):
    """Two vLLM samplers on the GPU of one rank: each has 494,032,768 weights of 2 bytes, its cache and a context."""
    vllm = {"engine": "vllm", "options": {"kv_cache_memory_bytes": GIB}}
    apart = room_of(config(half_b, cluster={"samplers": 2}, sampler=vllm), gpu_gib=80)
    beside = room_of(config(half_b, cluster={"samplers": 2, "colocated": True}, sampler=vllm), gpu_gib=80)
    assert beside.estimate.bytes - apart.estimate.bytes == 2 * (494_032_768 * 2 + GIB + GIB // 2)
    share = {"engine": "vllm", "options": {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.1}}
    share_of = room_of(config(half_b, cluster={"samplers": 1, "colocated": True}, sampler=share), gpu_gib=80)
    assert share_of.estimate.named("rollout").parts["another engine"] == 8 * GIB
    native = room_of(config(half_b, cluster={"samplers": 1, "colocated": True}), gpu_gib=80)
    cache = 256 * 800 * (2 * 24 * 128) * 2  # max_batch rows of 769 tokens and some, of two key heads of 64 in 24 layers
    assert native.estimate.named("rollout").parts["another engine"] == 494_032_768 * 2 + cache
    assert native.estimate.outside["CUDA contexts of samplers"] == GIB // 2


def test_the_cheapest_layout_that_fits_is_proposed_and_fits(half_b: Path):
    plan = config(half_b)
    room = room_of(plan, gpu_gib=20)
    assert not room.fits
    assert room.proposal is not None
    assert room.proposal.settings == ("batch.tokens_per_micro_batch=8192",)
    proposed = config(half_b, batch=BATCH | {"tokens_per_micro_batch": 8192})
    found = room_of(proposed, gpu_gib=20)
    assert found.fits
    assert found.estimate.bytes == room.proposal.bytes


def test_where_one_gpu_is_too_small_for_weights_there_are_more(half_b: Path):
    room = room_of(config(half_b), gpu_gib=6)
    assert room.proposal is not None
    assert any(setting.startswith("trainer.ranks=") for setting in room.proposal.settings)
    assert room.proposal.ranks > 1
    assert room_of(config(half_b), gpu_gib=1).proposal is None  # the sampler's copy alone takes as much


def test_a_cache_is_what_its_setting_says(half_b: Path):
    options = {"options": {"kv_gib": 1}}
    parts = room_of(config(half_b, sampler=options), gpu_gib=80).estimate.named("rollout").parts
    assert 0.9 * GIB < parts["keys and values"] <= GIB
    other = {"engine": "vllm", "options": {"gpu_memory_utilization": 0.5}}
    parts = room_of(config(half_b, sampler=other), gpu_gib=80).estimate.named("rollout").parts
    assert parts["another engine"] == 40 * GIB


def test_an_engine_that_sleeps_leaves_its_memory_to_the_update(half_b: Path):
    awake = room_of(config(half_b, sampler={"engine": "vllm"}), gpu_gib=80)
    asleep = room_of(config(half_b, sampler={"engine": "vllm", "sleep": 1}), gpu_gib=80)
    assert awake.estimate.worst.parts["another engine"] == asleep.estimate.named("rollout").parts["another engine"]
    assert not awake.fits
    assert "another engine" not in asleep.estimate.named("backward: last layer").parts
    assert asleep.estimate.host["another engine, asleep"] == 2 * 494_032_768
    server = {"engine": "vllm_server", "url": "http://127.0.0.1:8000/v1"}
    assert "keys and values" not in room_of(config(half_b, sampler=server), gpu_gib=80).estimate.named("rollout").parts


@pytest.mark.parametrize(("level", "kept"), [(1, 2 * 2 * 494_032_768), (2, None)])
def test_samplers_beside_a_rank_that_sleep_leave_all_but_their_contexts(half_b: Path, level: int, kept: int | None):
    """Two on its GPU, with 20 GiB each while they are awake."""
    beside = {"cluster": {"samplers": 2, "colocated": True}}
    vllm = {"engine": "vllm", "options": {"gpu_memory_utilization": 0.25}}
    awake = room_of(config(half_b, sampler=vllm, **beside), gpu_gib=80).estimate
    asleep = room_of(config(half_b, sampler=vllm | {"sleep": level}, **beside), gpu_gib=80).estimate
    assert asleep.named("rollout").parts == awake.named("rollout").parts
    for name in ("backward: last layer", "optimizer step"):
        assert awake.named(name).bytes - asleep.named(name).bytes == 40 * GIB
    assert asleep.outside == awake.outside
    assert asleep.host.get("another engine, asleep") == kept


def test_a_run_that_surely_cannot_fit_is_refused_before_anything_loads(half_b: Path):
    longest = 1 << 30
    huge = {"max_prompt_tokens": 512, "max_turn_tokens": 256, "max_episode_tokens": longest}
    plan = config(half_b, limits=huge, batch=BATCH | {"tokens_per_micro_batch": longest})
    with pytest.raises(DoesNotFit, match=r"the run does not fit: needs .* GiB \(.*\) of .* GiB"):
        check_room(plan, ALONE)
    check_room(config(half_b, batch=BATCH | {"prompts_per_step": 2, "tokens_per_micro_batch": 2048}), ALONE)


def test_the_command_prints_the_parts_and_refuses(command: Command, tmp_path: Path):
    write_config(tmp_path / "run.yaml")
    assert command("plan", "run.yaml", "--gpu-gib", "inf").code == 2
    planned = command("plan", "run.yaml", "--gpu-gib", "8")
    assert planned.code == 0
    assert "keys and values" in planned.out
    assert "fits: " in planned.out
    limits = {"max_turn_tokens": 48, "max_observation_tokens": 128, "max_episode_tokens": 65536}
    write_config(tmp_path / "long.yaml", {"limits": limits, "batch": BATCH | {"tokens_per_micro_batch": 262_144}})
    refused = command("plan", "long.yaml", "--gpu-gib", "4", "--json")
    record = json.loads(refused.out)["memory"]
    assert not record["fits"]
    assert record["needs"] > record["has"] == 4 * GIB
    assert "error: the run does not fit: needs" in refused.refused()
    assert "this would fit: batch.tokens_per_micro_batch=" in refused.err
    settings = record["proposal"]["settings"]
    assert command("plan", "long.yaml", *settings, "--gpu-gib", "4").code == 0
