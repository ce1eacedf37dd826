"""What the cache saves, what it must never serve, and how memory is given up. Costs are in tokens, not seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.trainer.policy import Policy

from .tiny import Played, forwarder, gap, play, policy, prompt, steps, together


def params(tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


class Spy:
    """Counts the tokens that really go through a sampler's policy, forward by forward."""

    def __init__(self, sampler: NativeSampler) -> None:
        self.sizes: list[int] = []
        watched = forwarder(sampler.policy)
        watched.hidden_states = self._counting(watched.hidden_states, len)  # type: ignore[method-assign]
        for decoder in (engine._compiled for engine in sampler.engines):
            if decoder is not None:
                count = self._counting(decoder.hidden_states, lambda order: len(order.requests))
                decoder.hidden_states = count  # type: ignore[method-assign]

    def _counting(self, forward: Callable[..., torch.Tensor], size: Callable[[Any], int]) -> Any:
        def hidden_states(of: Any, *rest: Any) -> torch.Tensor:
            self.sizes.append(size(of))
            return forward(of, *rest)

        return hidden_states

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


def spied(**options: object) -> tuple[Policy, NativeSampler, Spy]:
    model = policy()
    sampler = NativeSampler(model, **options)  # type: ignore[arg-type]
    return model, sampler, Spy(sampler)


def test_the_prompt_of_a_group_is_computed_once() -> None:
    model, sampler, spy = spied()
    played = together(*(play(sampler, prompt(100), params(5), seed=i) for i in range(16)))
    assert spy.sizes == [100, 16, 16, 16, 16]  # the first token of all 16 comes from one row of logits
    assert gap(model, played) < 1e-5
    assert len({tuple(e.ids) for e in played}) > 8
    stats = sampler.stats()
    assert (stats.tokens_forwarded, stats.tokens_prefilled, stats.tokens_reused) == (164, 100, 1500)
    assert (stats.requests, stats.tokens_generated, stats.cache_hits, stats.steps) == (16, 80, 15, 5)
    assert stats.mean_batch == (1 + 4 * 16) / 5


def test_a_long_common_prefix_of_different_prompts_is_computed_once() -> None:
    model, sampler, spy = spied()
    system = prompt(80)
    played = together(*(play(sampler, system + prompt(5 + i), params(1), seed=i) for i in range(6)))
    assert spy.tokens == 80 + sum(5 + i for i in range(6))
    assert gap(model, played) < 1e-5


def test_a_turn_costs_its_new_tokens_whatever_went_before() -> None:
    model, sampler, spy = spied()
    observations = [prompt(11, seed=i) for i in range(6)]
    (played,) = together(play(sampler, prompt(40), params(5), seed=1, session="s", observations=observations))
    # a turn forwards its observation, its 5 sampled tokens but the last, and the last one of the turn before
    assert spy.tokens == (40 + 4) + 6 * (11 + 5)
    assert gap(model, [played]) < 1e-5


def test_without_a_session_a_released_row_still_serves_as_a_prefix() -> None:
    model, sampler, spy = spied()
    (first,) = together(play(sampler, prompt(60), params(5), seed=1))
    before = spy.tokens
    (second,) = together(play(sampler, prompt(60) + prompt(3), params(1), seed=2))
    assert spy.tokens - before == 3
    assert gap(model, [first, second]) < 1e-5


def test_a_rewritten_history_is_computed_again_from_where_it_differs() -> None:
    model, sampler, spy = spied()

    async def main() -> list[Played]:
        ids = prompt(40)
        first = await sampler.sample(ids, params(), seed=1, session="s")
        before = spy.tokens
        forgotten = [*ids[:30], 7, *ids[31:], *first.ids]  # one token of the prompt was edited
        second = await sampler.sample(forgotten, params(1), seed=2, session="s")
        assert spy.tokens - before == len(forgotten) - 30
        return [Played([*ids, *first.ids], [(40, first)]), Played([*forgotten, *second.ids], [(48, second)])]

    assert gap(model, asyncio.run(main())) < 1e-5


def test_one_session_used_by_two_callers_at_once_is_served_right() -> None:
    model, sampler, _ = spied()
    played = together(*(play(sampler, prompt(9, seed=i), params(), seed=i, session="same") for i in range(3)))
    assert gap(model, played) < 1e-5


def test_p69_new_weights_between_turns_flush_every_cache() -> None:
    model, sampler, _ = spied()

    async def main() -> list[tuple[int, Sampled]]:
        ids = prompt(40)
        first = await sampler.sample(ids, params(), seed=1, session="s")
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(1.1)
        model.version += 1
        start = len(ids) + 8
        return [(start, await sampler.sample([*ids, *first.ids], params(), seed=2, session="s"))]

    ((start, second),) = asyncio.run(main())
    assert second.versions == [1] * 8
    ids = [*together(NativeSampler(policy()).sample(prompt(40), params(), seed=1))[0].ids]
    fresh = Played([*prompt(40), *ids, *second.ids], [(start, second)])
    assert gap(model, [fresh]) < 1e-5  # a stale key would differ by far more
    assert sampler.stats().flushes == 1


def test_p69_new_weights_in_the_middle_of_a_turn_stamp_each_token_with_its_own_version() -> None:
    model, sampler, _ = spied()
    old = policy()

    async def main() -> list[Sampled]:
        turns = [
            asyncio.create_task(sampler.sample(prompt(30 + i % 2), params(40), seed=i, session=f"{i}"))
            for i in range(4)
        ]
        await steps(sampler, 15)
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(1.1)
        model.version = 3
        return [await turn for turn in turns]

    for i, sampled in enumerate(asyncio.run(main())):
        change = sampled.versions.index(3)
        assert 0 < change < 40
        assert sampled.versions == [0] * change + [3] * (40 - change)
        length = 30 + i % 2
        ids = prompt(length) + sampled.ids
        before = Sampled(
            ids=sampled.ids[:change],
            logprobs=sampled.logprobs[:change],
            versions=sampled.versions[:change],
            stop_reason=sampled.stop_reason,
        )
        after = Sampled(
            ids=sampled.ids[change:],
            logprobs=sampled.logprobs[change:],
            versions=sampled.versions[change:],
            stop_reason=sampled.stop_reason,
        )
        assert gap(old, [Played(ids[: length + change], [(length, before)])]) < 1e-5
        assert gap(model, [Played(ids, [(length + change, after)])]) < 1e-5
    assert sampler.stats().restarts == 4


def test_weights_changed_without_a_version_need_a_reset() -> None:
    model, sampler, _ = spied()
    together(play(sampler, prompt(40), params(), seed=1))
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(1.1)
    sampler.reset()
    assert gap(model, together(play(sampler, prompt(40), params(), seed=1))) < 1e-5


def test_idle_sessions_give_way_when_memory_is_short_and_are_computed_again() -> None:
    model = policy()
    token_bytes = NativeSampler(model).engines[0].cache.bytes_per_token
    rows = 3
    sampler = NativeSampler(model, kv_gib=rows * 64 * token_bytes / 2**30)
    plenty = NativeSampler(model)

    def waves(on: NativeSampler) -> list[Played]:
        observations = [prompt(9, seed=k) for k in range(3)]
        return together(
            *(
                play(on, prompt(12, seed=i), params(5), seed=i, session=f"s{i}", observations=observations)
                for i in range(8)
            )
        )

    tight, roomy = waves(sampler), waves(plenty)
    assert [e.sampled_ids for e in tight] == [e.sampled_ids for e in roomy]
    assert gap(model, tight) < 1e-5
    assert sampler.stats().evictions > 0
    assert plenty.stats().evictions == 0
    assert sampler.engines[0].cache.rows * sampler.engines[0].cache.capacity <= rows * 64


@pytest.mark.parametrize("rows", [2, 3])
def test_growing_rows_under_a_tight_budget_keeps_and_loses_the_right_ones(rows: int) -> None:
    """2 rows of 64 tokens become 1 of 96, and 3 become 2: a left-over prefix loses its row just when it is wanted, and
    the idle session loses it, too, or is moved."""
    model = policy()
    token_bytes = NativeSampler(model).engines[0].cache.bytes_per_token
    sampler = NativeSampler(model, kv_gib=rows * 64 * token_bytes / 2**30)
    idle_prompt, short = prompt(36, seed=1), params(5)

    async def main() -> list[Played]:
        left_overs = [play(sampler, prompt(40, seed=i), short, seed=i) for i in range(2, rows + 1)]
        *done, first = await asyncio.gather(*left_overs, sampler.sample(idle_prompt, short, seed=1, session="idle"))
        longer = await play(sampler, prompt(40, seed=2) + prompt(50), short, seed=9)
        ids = [*idle_prompt, *first.ids, *prompt(3)]
        second = await sampler.sample(ids, short, seed=2, session="idle")
        return [*done, longer, Played([*ids, *second.ids], [(36, first), (len(ids), second)])]

    assert gap(model, asyncio.run(main())) < 1e-5
    assert sampler.stats().evictions == (1 if rows == 2 else 0)
    assert sampler.engines[0].cache.capacity == 96


def test_running_requests_are_put_back_when_they_outgrow_the_memory() -> None:
    model = policy()
    token_bytes = NativeSampler(model).engines[0].cache.bytes_per_token
    sampler = NativeSampler(model, kv_gib=4 * 64 * token_bytes / 2**30)  # 4 rows of 64 tokens, or 2 of 128
    played = together(*(play(sampler, prompt(20, seed=i), params(90), seed=i) for i in range(4)))
    roomy = together(*(play(NativeSampler(model), prompt(20, seed=i), params(90), seed=i) for i in range(4)))
    assert [e.sampled_ids for e in played] == [e.sampled_ids for e in roomy]
    assert gap(model, played) < 1e-5
    assert sampler.stats().preemptions > 0


def test_a_request_that_could_never_fit_is_refused_at_once() -> None:
    model = policy()
    token_bytes = NativeSampler(model).engines[0].cache.bytes_per_token
    sampler = NativeSampler(model, kv_gib=64 * token_bytes / 2**30)
    with pytest.raises(ValueError, match=r"up to 80 tokens needs .* raise kv_gib"):
        together(sampler.sample(prompt(40), params(40), seed=0))
    assert together(sampler.sample(prompt(40), params(20), seed=0))[0].ids


def test_the_cache_grows_with_the_sequences_and_not_before() -> None:
    _, sampler, _ = spied()
    together(*(play(sampler, prompt(10), params(4), seed=i) for i in range(3)))
    assert (sampler.engines[0].cache.rows, sampler.engines[0].cache.capacity) == (8, 32)
    together(*(play(sampler, prompt(100), params(4), seed=i) for i in range(20)))
    assert sampler.engines[0].cache.rows >= 20
    assert 104 <= sampler.engines[0].cache.capacity <= 160
    sampler.reset()
    assert sampler.engines[0].cache.rows == 0
