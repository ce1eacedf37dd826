"""The native sampler's answers: right log-probs, whatever the batch, the cache and the schedule."""

from __future__ import annotations

import pytest
import torch

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.trajectory import StopReason

from .contract import Case, ModelSamplerContract, tiny_case
from .tiny import CONFIGS, END, PAD, VOCABULARY, Played, gap, play, policy, prompt, together, tokenizer


class TestContract(ModelSamplerContract):
    def make(self) -> Case:
        model = policy()
        return tiny_case(NativeSampler(model, tokenizer(), truncation="allow"), model)


def params(tokens: int = 8, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": tokens, "stop_ids": frozenset({END})} | options)


def episodes(
    sampler: NativeSampler, how: SamplingParams, count: int = 9, *, other: NativeSampler | None = None
) -> list:
    """Three groups with prompts shorter and longer than a sliding window; turns with observations of many lengths.
    Every second one goes to the other sampler, if there is one."""
    return [
        play(
            (sampler, other or sampler)[i % 2],
            prompt((4, 23, 61)[i % 3]),
            how,
            seed=i,
            session=f"s{i}",
            observations=[prompt(1 + (5 * i + 3 * k) % 17, seed=i) for k in range(2)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_p100_logprobs_equal_the_trainers_at_every_temperature(family: str, temperature: float) -> None:
    """Groups, tool turns and sliding windows; the ratio of a token to itself is 1 to 1e-5."""
    model = policy(family)
    played = together(*episodes(NativeSampler(model), params(temperature=temperature)))
    assert sum(len(sampled.ids) for episode in played for _, sampled in episode.turns) > 100
    assert gap(model, played, temperature) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logprobs_are_right_under_every_schedule(family: str) -> None:
    """Prompts in chunks, few rows, little memory: other schedules, the same log-probs and the same ids."""
    model = policy(family)
    plain = together(*episodes(NativeSampler(model), params(12)))
    token_bytes = NativeSampler(model).engines[0].cache.bytes_per_token
    for options in (
        {"max_batch": 7, "tokens_per_step": 7},
        {"max_batch": 2, "tokens_per_step": 64},
        {"max_batch": 1, "tokens_per_step": 1},
        {"workers": 2},
        {"workers": 3, "max_batch": 3, "tokens_per_step": 33},
        {"kv_gib": 3 * 192 * token_bytes / 2**30},
    ):
        played = together(*episodes(NativeSampler(model, **options), params(12)))
        assert [e.sampled_ids for e in played] == [e.sampled_ids for e in plain], options
        assert gap(model, played) < 1e-5, options


def test_logprobs_in_bfloat16_stay_near_the_trainers() -> None:
    model = policy("qwen3", dtype=torch.bfloat16, sharp=2.0)
    played = together(*episodes(NativeSampler(model), params()))
    assert gap(model, played) < 0.1


def test_ids_do_not_depend_on_the_batch_the_order_or_the_number_of_samplers() -> None:
    model = policy("qwen3")
    one = together(*episodes(NativeSampler(model), params()))
    lonely = NativeSampler(model)
    alone = [together(e)[0] for e in episodes(lonely, params())]
    backwards = together(*reversed(episodes(NativeSampler(model), params())))[::-1]
    shared_out = together(*episodes(NativeSampler(model), params(), other=NativeSampler(model)))
    for other in (alone, backwards, shared_out):
        assert [e.sampled_ids for e in other] == [e.sampled_ids for e in one]


def test_seeds_draw_from_the_models_distribution() -> None:
    model = policy(sharp=3.0)
    ids = prompt(6)
    count = 2000
    sampler = NativeSampler(model, max_batch=512)
    sampled = together(*(sampler.sample(ids, params(1), seed=seed) for seed in range(count)))
    drawn = torch.bincount(torch.tensor([s.ids[0] for s in sampled]), minlength=VOCABULARY)
    logprobs = {s.ids[0]: s.logprobs[0] for s in sampled}
    expected = torch.tensor([logprobs.get(i, -99.0) for i in range(VOCABULARY)], dtype=torch.float64).exp() * count
    often = expected > 5
    assert often.sum() >= 10
    chi_squared = ((drawn[often] - expected[often]) ** 2 / expected[often]).sum()
    assert chi_squared < often.sum() + 5 * (2 * often.sum()) ** 0.5


def test_greedy_takes_the_best_token_and_reports_its_logprob_at_temperature_one() -> None:
    model = policy()
    first, second = together(*(play(NativeSampler(model), prompt(9), params(temperature=0.0), seed=s) for s in (1, 2)))
    assert first.sampled_ids == second.sampled_ids
    assert gap(model, [first], 1.0) < 1e-5
    start, sampled = first.turns[0]
    for i in range(len(sampled.ids)):
        context = first.ids[: start + i]
        assert sampled.logprobs[i] >= max(_next_logprobs(model, context)) - 1e-5


def _next_logprobs(model, context: list[int]) -> list[float]:
    model.module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
    finally:
        model.module.set_attn_implementation("posttrain")
    return logits.log_softmax(-1).tolist()


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    sampler = NativeSampler(policy())
    hows = [params(temperature=t) for t in (0.0, 0.7, 1.0, 0.0)]
    mixed = together(*(play(sampler, prompt(9), how, seed=i) for i, how in enumerate(hows)))
    alone = [together(play(sampler, prompt(9), how, seed=i))[0] for i, how in enumerate(hows)]
    assert [e.sampled_ids for e in mixed] == [e.sampled_ids for e in alone]


def test_p15_the_pad_id_in_the_middle_of_a_turn_is_a_token_like_any_other() -> None:
    model = policy()
    with torch.no_grad():
        model.module.get_output_embeddings().weight[PAD] = model.module.get_output_embeddings().weight[7]
    sampled = together(*(NativeSampler(model).sample(prompt(9), params(60), seed=s) for s in range(8)))
    inner = [s for s in sampled if PAD in s.ids[:-1]]
    assert inner
    assert all(len(s.ids) == len(s.logprobs) for s in inner)


def test_truncation_is_refused_unless_allowed_and_then_counted() -> None:
    with pytest.raises(ValueError, match="truncation"):
        together(NativeSampler(policy()).sample(prompt(5), params(top_p=0.9), seed=0))
    sampler = NativeSampler(policy(), truncation="allow")
    (sampled,) = together(sampler.sample(prompt(5), params(4, top_k=1), seed=0))
    assert sampled.logprobs == pytest.approx([0.0] * len(sampled.ids), abs=1e-6)
    assert sampler.stats().tokens_truncated_draw == len(sampled.ids)
    (greedy,) = together(sampler.sample(prompt(5), params(4, temperature=0.0), seed=0))
    assert greedy.ids == sampled.ids
    assert sampler.stats().tokens_truncated_draw == len(sampled.ids)


def test_a_turn_ends_with_length_where_the_context_of_the_model_ends() -> None:
    sampler = NativeSampler(policy())
    (sampled,) = together(sampler.sample(prompt(509), SamplingParams(max_new_tokens=50), seed=0))
    assert (len(sampled.ids), sampled.stop_reason) == (3, StopReason.LENGTH)
    with pytest.raises(ValueError, match="context is 512"):
        together(sampler.sample(prompt(512), params(), seed=0))


def test_p45_a_turn_cut_by_length_at_a_would_be_stop_says_length() -> None:
    sampler = NativeSampler(policy(), tokenizer())
    (free,) = together(sampler.sample(prompt(9), SamplingParams(max_new_tokens=6), seed=0))
    text_after = tokenizer().decode(free.ids)
    stop = (text_after[-1:] + "|",)  # begun by the last token, not completed
    (cut,) = together(sampler.sample(prompt(9), SamplingParams(max_new_tokens=6, stop_strings=stop), seed=0))
    assert (cut.ids, cut.stop_reason, cut.stop) == (free.ids, StopReason.LENGTH, None)


def test_a_played_episode_reads_back_as_it_was_written() -> None:
    played: Played = together(*episodes(NativeSampler(policy()), params(), count=1))[0]
    trajectory = played.trajectory("e")
    assert trajectory.token_ids == played.ids[: len(trajectory)]
    assert trajectory.policy_token_count == sum(len(s.ids) for _, s in played.turns)
