"""What every sampler must do, whatever engine is behind it. A test class per sampler derives from `SamplerContract`
and says how to make one; adapters of other engines reuse it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.trajectory import Source, StopReason, Trajectory

from .tiny import together


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sampler under test, and inputs that mean something to its model."""

    sampler: Sampler
    tokenizer: Any
    prompt: list[int]
    end_id: int  # a control token that turns may end with
    stop_string: str  # one that turns reach within `reach` tokens from `prompt` under some of the seeds 0..19
    reach: int = 64


class SamplerContract:
    """Derive, and override `make`."""

    def make(self) -> Case:
        raise NotImplementedError

    @pytest.fixture
    def case(self) -> Case:
        return self.make()

    def turns(self, case: Case, params: SamplingParams, seeds: Sequence[int] = range(20)) -> list[Sampled]:
        return together(*(case.sampler.sample(case.prompt, params, seed=seed) for seed in seeds))

    def test_ids_logprobs_and_versions_are_aligned_and_can_be_written(self, case: Case) -> None:
        for sampled in self.turns(case, SamplingParams(max_new_tokens=5, stop_ids=frozenset({case.end_id}))):
            assert 1 <= len(sampled.ids) <= 5
            trajectory = Trajectory(task_id="t", group_id="g", episode_id="e")
            trajectory.add_context(case.prompt, Source.PROMPT)
            trajectory.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
            assert trajectory.policy_token_count == len(sampled.ids)
            assert all(math.isfinite(p) and p <= 1e-6 for p in sampled.logprobs)
            assert sampled.versions == [case.sampler.version] * len(sampled.ids)

    def test_a_seed_fixes_a_turn_whatever_else_is_sampled(self, case: Case) -> None:
        params = SamplingParams(max_new_tokens=8, stop_ids=frozenset({case.end_id}))
        alone = together(case.sampler.sample(case.prompt, params, seed=3))[0]
        among = self.turns(case, params, seeds=[9, 3, 11, 4])[1]
        assert (alone.ids, alone.stop_reason) == (among.ids, among.stop_reason)
        assert alone.logprobs == pytest.approx(among.logprobs, abs=1e-5)

    def test_length_is_reported_when_nothing_else_stopped_it(self, case: Case) -> None:
        for sampled in self.turns(case, SamplingParams(max_new_tokens=1)):
            assert (len(sampled.ids), sampled.stop_reason, sampled.stop) == (1, StopReason.LENGTH, None)

    def test_p13_the_stop_id_is_kept_as_the_last_id_with_its_logprob(self, case: Case) -> None:
        """Also P52: any id of the set counts as a stop, never as a clipped turn."""
        free = self.turns(case, SamplingParams(max_new_tokens=6, stop_ids=frozenset({case.end_id})))
        longest = max(free, key=lambda sampled: len(sampled.ids))
        wanted = longest.ids[len(longest.ids) // 2]
        params = SamplingParams(max_new_tokens=6, stop_ids=frozenset({case.end_id, wanted}))
        seed = free.index(longest)
        stopped = self.turns(case, params, seeds=[seed])[0]
        assert stopped.stop_reason is StopReason.STOP_ID
        assert stopped.stop == stopped.ids[-1] == wanted
        assert stopped.ids == longest.ids[: longest.ids.index(wanted) + 1]
        assert len(stopped.logprobs) == len(stopped.ids)

    def test_p51_ids_and_text_are_cut_at_the_token_that_completes_the_stop_string(self, case: Case) -> None:
        stop = case.stop_string
        params = SamplingParams(
            max_new_tokens=case.reach, stop_strings=(stop, "\x00never\x00"), stop_ids=frozenset({case.end_id})
        )
        stopped = [s for s in self.turns(case, params) if s.stop_reason is StopReason.STOP_STRING]
        assert stopped, "no seed reached the stop string: the case is badly chosen"
        for sampled in stopped:
            assert sampled.stop == stop
            assert stop in case.tokenizer.decode(sampled.ids)
            assert stop not in case.tokenizer.decode(sampled.ids[:-1])
            assert len(sampled.ids) == len(sampled.logprobs) == len(sampled.versions)

    def test_a_stop_string_in_the_prompt_stops_nothing(self, case: Case) -> None:
        prompt = case.prompt + case.tokenizer.encode(case.stop_string, add_special_tokens=False)
        params = SamplingParams(max_new_tokens=1, stop_strings=(case.stop_string + case.stop_string,))
        sampled = together(case.sampler.sample(prompt, params, seed=0))[0]
        assert sampled.stop_reason is StopReason.LENGTH

    def test_the_prompt_is_left_as_it_was(self, case: Case) -> None:
        before = list(case.prompt)
        self.turns(case, SamplingParams(max_new_tokens=2))
        assert case.prompt == before

    def test_an_empty_prompt_is_refused(self, case: Case) -> None:
        with pytest.raises(ValueError, match="empty"):
            together(case.sampler.sample([], SamplingParams(max_new_tokens=2), seed=0))

    def test_a_session_may_be_released_at_any_time_and_twice(self, case: Case) -> None:
        case.sampler.release("unknown")
        params = SamplingParams(max_new_tokens=2, stop_ids=frozenset({case.end_id}))
        together(case.sampler.sample(case.prompt, params, seed=0, session="s"))
        case.sampler.release("s")
        case.sampler.release("s")

    def test_cancelling_one_caller_leaves_the_others_alone(self, case: Case) -> None:
        params = SamplingParams(max_new_tokens=8, stop_ids=frozenset({case.end_id}))
        alone = together(case.sampler.sample(case.prompt, params, seed=1))[0]

        async def main() -> Sampled:
            doomed = asyncio.create_task(case.sampler.sample(case.prompt, params, seed=0))
            kept = asyncio.create_task(case.sampler.sample(case.prompt, params, seed=1))
            await asyncio.sleep(0)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return await kept

        assert asyncio.run(main()).ids == alone.ids
