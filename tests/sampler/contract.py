"""What every sampler must do, whatever engine is behind it. A test class per sampler derives from `SamplerContract`
and says how to make one; adapters of other engines reuse it. `ModelSamplerContract` adds what those must do that run a
policy known to the trainer: its log-probs, its temperature, its versions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from posttrain.sampler.draw import truncate
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, StopReason, Trajectory

from .tiny import END, Played, changed, gap, play, prompt, together, tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sampler under test, and inputs that mean something to its model."""

    sampler: Sampler
    tokenizer: Any
    prompt: list[int]
    end_id: int  # a control token that turns may end with
    stop_string: str  # one that turns reach within `reach` tokens from `prompt` under some of the seeds 0..19
    reach: int = 64
    tolerance: float = 1e-5  # of log-probs


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
        assert alone.logprobs == pytest.approx(among.logprobs, abs=case.tolerance)

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

    def test_many_requests_at_once_are_all_answered(self, case: Case) -> None:
        params = SamplingParams(max_new_tokens=3, stop_ids=frozenset({case.end_id}))
        prompts = [case.prompt[: 1 + i % len(case.prompt)] for i in range(70)]
        sampled = together(*(case.sampler.sample(ids, params, seed=i) for i, ids in enumerate(prompts)))
        assert [1 <= len(s.ids) <= 3 for s in sampled] == [True] * 70


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase(Case):
    """sampler: of `policy`, and truncating as asked. update: other weights and the next version, in both."""

    policy: Policy
    update: Callable[..., None]
    max_context: int = 512

    def logits(self, ids: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
        """[n, V] float32 of the distributions that `sampled` came from, by the plain model."""
        module = self.policy.module
        module.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                logits = module(input_ids=torch.tensor([[*ids, *sampled]]), use_cache=False).logits[0]
        finally:
            module.set_attn_implementation("posttrain")
        return logits[len(ids) - 1 : -1].float()


def tiny_case(sampler: Sampler, model: Policy, publish: Callable[[], None] = lambda: None) -> ModelCase:
    """Of a model of `tiny.py`. publish: gives the sampler the policy's new weights, where it has a copy of them."""

    def update(factor: float = 1.05) -> None:
        changed(model, factor)
        model.version += 1
        publish()

    return ModelCase(
        sampler=sampler,
        tokenizer=tokenizer(),
        prompt=prompt(9),
        end_id=END,
        stop_string="a",
        reach=200,
        policy=model,
        update=update,
    )


class ModelSamplerContract(SamplerContract):
    """Derive, and override `make` with a `ModelCase`."""

    @pytest.fixture
    def model(self, case: Case) -> ModelCase:
        assert isinstance(case, ModelCase)
        return case

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_logprobs_are_the_trainers_at_every_temperature_and_turn(self, model: ModelCase, temperature: float):
        params = SamplingParams(max_new_tokens=9, temperature=temperature)
        later = [prompt(5), prompt(38, seed=1)]
        episodes = [
            play(model.sampler, prompt(4 + 9 * i), params, seed=i, session=f"e{i}", observations=later)
            for i in range(6)
        ]
        assert gap(model.policy, together(*episodes), temperature) < model.tolerance

    def test_greedy_takes_the_best_token_and_gives_its_logprob_at_temperature_one(self, model: ModelCase) -> None:
        params = SamplingParams(max_new_tokens=12, temperature=0)
        first, second = self.turns(model, params, seeds=[1, 2])
        assert first.ids == second.ids
        logprobs = model.logits(model.prompt, first.ids).log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == first.ids
        assert first.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=model.tolerance)

    @pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 5), (0.5, 20)])
    def test_truncated_samples_have_the_logprobs_of_the_truncated_distribution(
        self, model: ModelCase, top_p: float, top_k: int
    ) -> None:
        params = SamplingParams(max_new_tokens=6, temperature=0.8, top_p=top_p, top_k=top_k)
        for sampled in self.turns(model, params, seeds=range(6)):
            logits = model.logits(model.prompt, sampled.ids) / 0.8
            ks = None if not top_k else torch.full((len(logits), 1), top_k)
            ps = None if top_p == 1 else torch.full((len(logits), 1), top_p)
            expected = truncate(logits, ks, ps).log_softmax(-1).gather(-1, torch.tensor(sampled.ids)[:, None])[:, 0]
            assert sampled.logprobs == pytest.approx(expected.tolist(), abs=model.tolerance)

    def test_seeds_draw_from_the_models_distribution(self, model: ModelCase) -> None:
        count = 600
        sampled = self.turns(model, SamplingParams(max_new_tokens=1, temperature=0.5), seeds=range(count))
        probs = (model.logits(model.prompt, [0])[0] / 0.5).double().softmax(-1)
        drawn = torch.bincount(torch.tensor([s.ids[0] for s in sampled]), minlength=len(probs))
        often = probs * count > 5
        rest = [drawn[~often].sum(), probs[~often].sum() * count]
        chi = ((drawn[often] - probs[often] * count) ** 2 / (probs[often] * count)).sum()
        chi = chi + (rest[0] - rest[1]) ** 2 / rest[1]
        assert often.sum() >= 5
        assert chi < often.sum() + 5 * (2 * often.sum()) ** 0.5

    def test_a_session_changes_no_result(self, model: ModelCase) -> None:
        params = SamplingParams(max_new_tokens=7)
        later = [prompt(40, seed=2), prompt(3, seed=3)]
        kept, forgotten = together(
            play(model.sampler, prompt(70), params, seed=1, session="kept", observations=later),
            play(model.sampler, prompt(70), params, seed=1, observations=later),
        )
        assert kept.sampled_ids == forgotten.sampled_ids

    def test_a_request_cancelled_in_the_middle_leaves_the_others_alone(self, model: ModelCase) -> None:
        params = SamplingParams(max_new_tokens=60)
        alone = self.turns(model, params, seeds=[1])[0]

        async def main() -> Sampled:
            doomed = asyncio.create_task(model.sampler.sample(model.prompt, params, seed=0))
            kept = asyncio.create_task(model.sampler.sample(model.prompt, params, seed=1))
            await asyncio.sleep(0.01)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return await kept

        assert asyncio.run(main()).ids == alone.ids

    def test_new_weights_between_turns_are_used_and_stamped(self, model: ModelCase) -> None:
        """What was cached under the old weights is not mixed in."""
        params = SamplingParams(max_new_tokens=6)

        async def main() -> tuple[Played, Played, int]:
            before = await play(model.sampler, prompt(70), params, seed=5, session="a")
            version = model.sampler.version
            model.update()
            after = Played(before.ids + prompt(4))
            sampled = await model.sampler.sample(after.ids, params, seed=6, session="a")
            after.turns.append((len(after.ids), sampled))
            after.ids = after.ids + sampled.ids
            return before, after, version

        before, after, version = asyncio.run(main())
        assert before.turns[0][1].versions == [version] * 6
        assert after.turns[0][1].versions == [version + 1] * 6
        assert model.sampler.version == model.policy.version == version + 1
        assert gap(model.policy, [after]) < model.tolerance
        plain = (3 if torch.cuda.is_available() else 10) * model.tolerance
        assert gap(model.policy, [before]) > plain, "the update changed nothing: the case is badly made"

    def test_prompts_that_cannot_be_served_are_refused_and_harm_nobody(self, model: ModelCase) -> None:
        params = SamplingParams(max_new_tokens=2)
        wrong = [[10**6], [-1], [1] * model.max_context]

        async def main() -> list[Any]:
            prompts = [model.prompt, *wrong]
            return list(
                await asyncio.gather(
                    *(model.sampler.sample(ids, params, seed=0) for ids in prompts), return_exceptions=True
                )
            )

        served, *refused = asyncio.run(main())
        assert len(served.ids) == 2
        assert all(isinstance(error, ValueError) for error in refused)

    def test_a_turn_ends_with_length_where_the_context_does(self, model: ModelCase) -> None:
        ids = (model.prompt * model.max_context)[: model.max_context - 3]
        sampled = together(model.sampler.sample(ids, SamplingParams(max_new_tokens=50), seed=0))[0]
        assert (len(sampled.ids), sampled.stop_reason) == (3, StopReason.LENGTH)
