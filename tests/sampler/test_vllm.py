"""vLLM behind the sampler's contract: needs a vllm that runs here (`scripts/test_vllm` makes an environment)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm import VllmSampler
from posttrain.weights.manifest import WeightMismatch, weights_of
from posttrain.weights.publish import Publisher, WeightError, publish

from .contract import Case, ModelCase, ModelSamplerContract, tiny_case
from .tiny import FLOAT32_GAP, WIDE_CONFIGS, Played, changed, gap, play, policy, prompt, together, tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of vllm's imports
]


OPEN: dict[str, ModelCase] = {}


def case(family: str = "llama") -> ModelCase:
    """One engine for as many tests as possible: it takes seconds to start, and a process holds one at a time."""
    if family not in OPEN:
        close_all()
        OPEN[family] = made(family)
    return OPEN[family]


def close_all() -> None:
    for name in list(OPEN):
        sampler = OPEN.pop(name).sampler
        assert isinstance(sampler, VllmSampler)
        sampler.close()


@pytest.fixture(scope="module", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    close_all()


def made(family: str) -> ModelCase:
    model = policy(family, configs=WIDE_CONFIGS)
    sampler = VllmSampler(model, tokenizer(), truncation="allow", kv_cache_memory_bytes=1 << 27)
    try:
        asyncio.run(Publisher(model, sampler).publish())
    except BaseException:
        sampler.close()
        raise
    case = tiny_case(sampler, model, lambda: sampler.load(weights_of(model), model.version))
    return replace(case, tolerance=FLOAT32_GAP)


@pytest.fixture
def engine() -> VllmSampler:
    sampler = case().sampler
    assert isinstance(sampler, VllmSampler)
    return sampler


class TestContract(ModelSamplerContract):
    def make(self) -> Case:
        return case()


def test_prompts_of_a_group_and_the_past_of_a_session_are_computed_once(engine: VllmSampler) -> None:
    engine.reset()
    before = engine.stats.tokens_reused, engine.stats.tokens_prefilled
    params = SamplingParams(max_new_tokens=3)
    together(*(play(engine, prompt(100), params, seed=i, observations=[prompt(30)]) for i in range(4)))
    assert engine.stats.tokens_reused - before[0] >= 3 * 96 + 4 * 96  # blocks of 32
    assert engine.stats.tokens_prefilled - before[1] <= 100 + 3 * 4 + 4 * 40
    assert engine.counters()["tokens_reused"] == engine.stats.tokens_reused
    assert "evictions" not in engine.counters(), "nobody counts them, which is not 0"


@pytest.mark.parametrize("transport", ["memory", "disk", "broadcast"])
def test_every_transport_brings_the_same_weights(engine: VllmSampler, transport: str) -> None:
    model = case().policy
    for _ in range(2):
        changed(model, 0.99)
        model.version += 1
        done = asyncio.run(publish(model, engine, transport=transport))
        assert (done.version, done.transport, engine.version) == (model.version, transport, model.version)
        assert done.probe_gap < FLOAT32_GAP
        assert done.bytes == sum(p.numel() * 4 for p in model.module.parameters())


def test_a_broadcast_that_fails_in_the_middle_ends_at_once_and_can_be_made_again(engine: VllmSampler) -> None:
    """Not at the time limit of the group, ten minutes later: the sender still has 40 MB to go."""
    model = case().policy
    wrong = [("no.such.tensor", torch.zeros(4)), ("rest", torch.zeros(10_000_000))]
    with pytest.raises(RuntimeError, match=r"no\.such|named 'no'"):
        engine.load_broadcast(wrong, 99, bucket_bytes=16)
    assert engine.version < 0
    assert asyncio.run(publish(model, engine, transport="broadcast")).probe_gap < FLOAT32_GAP


def test_old_weights_are_found_by_the_probe(engine: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case().policy
    publisher = Publisher(model, engine)
    asyncio.run(publisher.publish())
    changed(model, 1.02)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_collective", lambda *args: [None])  # a transfer that brings nothing
        with pytest.raises(WeightError, match="differ from the trainer's"):
            asyncio.run(publisher.publish())
    assert asyncio.run(publisher.publish()).probe_gap < FLOAT32_GAP


def test_another_policy_is_refused_by_the_name_of_its_tensor(engine: VllmSampler) -> None:
    with pytest.raises(WeightMismatch, match=r"model.layers.0.self_attn.q_proj.bias"):
        Publisher(policy("qwen2", configs=WIDE_CONFIGS), engine)
    with pytest.raises(WeightMismatch, match=r"model.embed_tokens.weight is float32\[264, 32\] in the policy"):
        Publisher(policy("llama"), engine)


def test_weights_that_come_in_the_middle_of_a_turn_are_stamped_token_by_token(engine: VllmSampler) -> None:
    """What was computed with the old weights is computed anew: later log-probs are those of the new policy."""
    model = case().policy
    old = model.version

    async def main() -> Played:
        turn = asyncio.create_task(play(engine, prompt(40), SamplingParams(max_new_tokens=120), seed=3))
        before = engine.stats.steps
        while engine.stats.steps < before + 20 and not turn.done():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        changed(model, 1.03)
        model.version += 1
        engine.load(weights_of(model), model.version)
        return await turn

    played = asyncio.run(main())
    versions = played.turns[0][1].versions
    new = versions.count(old + 1)
    assert versions == [old] * (120 - new) + [old + 1] * new
    assert 0 < new < 120
    late = Played(played.ids, [(40 + 120 - new, _tail(played, new))])
    assert gap(model, [late]) < FLOAT32_GAP


def _tail(played: Played, count: int):
    sampled = played.turns[0][1]
    return replace(
        sampled, ids=sampled.ids[-count:], logprobs=sampled.logprobs[-count:], versions=sampled.versions[-count:]
    )


def test_sleep_and_wake_leave_the_answers_as_they_were(engine: VllmSampler) -> None:
    """Memory is freed on a GPU only, with the option enable_sleep_mode; the order of things is the same on a CPU."""
    params = SamplingParams(max_new_tokens=5)
    before = together(engine.sample(prompt(9), params, seed=1))[0]
    engine.sleep(1)
    with pytest.raises(SamplerError, match="asleep: wake it"):
        together(engine.sample(prompt(9), params, seed=1))
    engine.wake()
    assert together(engine.sample(prompt(9), params, seed=1))[0].ids == before.ids


def test_an_engine_that_has_given_up_its_weights_is_woken_by_new_ones(engine: VllmSampler) -> None:
    model, params = case().policy, SamplingParams(max_new_tokens=5)
    engine.sleep(2)
    assert engine.version < 0
    engine.wake()
    with pytest.raises(SamplerError, match="no weights yet"):
        together(engine.sample(prompt(9), params, seed=1))
    engine.sleep(2)
    model.version += 1
    changed(model, 1.01)
    assert asyncio.run(publish(model, engine)).probe_gap < FLOAT32_GAP
    assert gap(model, together(play(engine, prompt(9), params, seed=1))) < FLOAT32_GAP


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM frees memory on a GPU only")
def test_a_sleeping_engine_leaves_its_memory_to_the_trainer() -> None:
    """Both levels with one engine: vLLM starts no second one in a process whose first one could sleep."""
    close_all()
    model = policy("llama", configs=WIDE_CONFIGS)
    sampler = VllmSampler(model, kv_cache_memory_bytes=1 << 30, enable_sleep_mode=True)
    try:
        asyncio.run(publish(model, sampler))
        for level in (1, 2):
            awake = torch.cuda.mem_get_info()[0]
            sampler.sleep(level)
            assert torch.cuda.mem_get_info()[0] - awake > 0.9 * (1 << 30)
            if level == 1:
                sampler.wake()
            else:
                asyncio.run(publish(model, sampler))
            played = together(*(play(sampler, prompt(20), SamplingParams(max_new_tokens=8), seed=i) for i in range(3)))
            assert gap(model, played) < FLOAT32_GAP
    finally:
        sampler.close()


def test_a_process_holds_one_engine_at_a_time(engine: VllmSampler) -> None:
    with pytest.raises(SamplerError, match="close the one"):
        VllmSampler(case().policy)
    assert together(engine.sample([1], SamplingParams(max_new_tokens=1), seed=0))


def test_nothing_is_sampled_before_weights_are_there_and_threads_and_seeds_stay() -> None:
    close_all()
    torch.manual_seed(5)
    threads, expected = torch.get_num_threads(), torch.rand(1)
    torch.manual_seed(5)
    model = policy("qwen3", configs=WIDE_CONFIGS)
    sampler = VllmSampler(model, tokenizer(), max_model_len=128, kv_cache_memory_bytes=1 << 26)
    try:
        assert torch.rand(1) == expected
        torch.set_num_threads(threads)
        with pytest.raises(SamplerError, match="no weights yet"):
            together(sampler.sample([1], SamplingParams(max_new_tokens=1), seed=0))
        model.version = 7
        assert asyncio.run(publish(model, sampler)).version == sampler.version == 7
        with pytest.raises(ValueError, match="context is 128"):
            together(sampler.sample([1] * 128, SamplingParams(max_new_tokens=1), seed=0))
        with pytest.raises(ValueError, match=r"top_p=0\.5"):
            together(sampler.sample([1], SamplingParams(max_new_tokens=1, top_p=0.5), seed=0))
    finally:
        sampler.close()


def test_what_vllm_refuses_is_told() -> None:
    close_all()
    with pytest.raises(SamplerError, match="vLLM did not start"):
        VllmSampler(policy("llama", configs=WIDE_CONFIGS), max_model_len=1 << 20, kv_cache_memory_bytes=1 << 20)


@pytest.mark.parametrize("family", ["tied", "gemma3"])
def test_tied_weights_sliding_windows_and_buffers_survive_the_transfer(family: str) -> None:
    other = case(family)
    assert isinstance(other.sampler, VllmSampler)
    other.update()
    played = together(*(play(other.sampler, prompt(20), SamplingParams(max_new_tokens=8), seed=i) for i in range(3)))
    assert gap(other.policy, played) < FLOAT32_GAP
    close_all()
    other.sampler.close()
    with pytest.raises(SamplerError, match="closed"):
        together(other.sampler.sample([1], SamplingParams(max_new_tokens=1), seed=0))
