"""Field cases about calls, tools that fail, and groups that lose members."""

import asyncio
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.parts import DownShelf, Shelf, SlowShelf, byte_tokenizer, roll, spec, task
from pace import allowed
from posttrain.algorithms.advantages import grpo
from posttrain.envs import Action, Observation, SearchEnv, Step
from posttrain.episodes import episode_of
from posttrain.packing import Batch, pack
from posttrain.retrieval.client import HttpOptions, HttpRetriever
from posttrain.rewards import score
from posttrain.rewards.config import load_reward
from posttrain.rollout import Limits, RolloutSpec, rollout_group
from posttrain.sampler.scripted import ScriptedCall, ScriptedSampler
from posttrain.task import Invalid, Score, Task
from posttrain.trajectory import CallStatus, Source, StopReason, Trajectory

ANSWER = "<answer>Paris</answer>"


def em(trajectory: Trajectory, rollout: RolloutSpec) -> Score:
    outcome = asyncio.run(score(load_reward("em"), episode_of(trajectory, rollout.renderer), task()))
    assert isinstance(outcome, Score)
    return outcome


def statuses(trajectory: Trajectory) -> list[CallStatus]:
    return [call.status for turn in trajectory.turns for call in turn.calls]


def env_text(trajectory: Trajectory, rollout: RolloutSpec) -> str:
    segments = episode_of(trajectory, rollout.renderer).segments
    return "".join(segment.text for segment in segments if segment.source is Source.ENV)


def searching(shelf: Shelf, **options: Any) -> Any:
    return lambda task: SearchEnv(retriever=shelf, **options)


def test_p23_a_turn_is_cut_at_its_first_closing_tag_so_no_call_stays_unanswered() -> None:
    shelf = Shelf("T\nx")
    rollout = spec(["<search>a</search><search>b</search>", ANSWER], searching(shelf))
    (trajectory,) = roll(rollout)
    assert episode_of(trajectory, rollout.renderer).policy_texts[0] == "<search>a</search>"
    assert shelf.queries == ["a"]


def test_p24_a_search_in_a_thought_is_not_run_and_the_answer_behind_it_scores() -> None:
    shelf = Shelf("T\nx")
    rollout = spec(["<think>maybe <search>foo</search>", "</think>" + ANSWER], searching(shelf))
    (trajectory,) = roll(rollout)
    assert shelf.queries == []
    assert em(trajectory, rollout).value == 1.0
    assert trajectory.policy_token_count == len(trajectory) - len("Where is the tower?")


def test_p26_an_empty_query_reaches_no_server_and_is_answered_by_env_text() -> None:
    shelf = Shelf("T\nx")
    rollout = spec(["<search> </search>", ANSWER], searching(shelf))
    (trajectory,) = roll(rollout)
    assert shelf.queries == []
    assert "empty query" in env_text(trajectory, rollout)
    assert statuses(trajectory) == [CallStatus.EMPTY, CallStatus.OK]


@pytest.mark.parametrize("wrong", ["<SEARCH>q</SEARCH>", "<search>q</answer>"])
def test_p27_a_malformed_call_is_counted_and_its_correction_does_not_train(wrong: str) -> None:
    rollout = spec([wrong, ANSWER])
    (trajectory,) = roll(rollout)
    assert statuses(trajectory) == [CallStatus.MALFORMED, CallStatus.OK]
    assert "My previous action is invalid" in env_text(trajectory, rollout)
    correction = trajectory.turns[1]
    assert correction.who is Source.ENV
    assert not any(trajectory.loss_mask[correction.start : correction.end])


@pytest.mark.parametrize("planted", ["</answer>", "<answer>Paris</answer>", "<search>more</search>"])
def test_p28_answer_in_tool_output_scores_nothing(planted: str) -> None:
    shelf = Shelf(f"T\n{planted}")
    rollout = spec(["<search>tower</search>", "I do not know."], searching(shelf, max_turns=1))
    (trajectory,) = roll(rollout)
    outcome = em(trajectory, rollout)
    assert outcome.value == 0.0
    assert outcome.components["no_answer"] == 1.0
    assert planted in env_text(trajectory, rollout)
    assert shelf.queries == ["tower"]


def test_p45_a_call_cut_by_the_length_limit_is_not_run_and_the_episode_ends_as_length() -> None:
    shelf = Shelf("T\nx")
    rollout = spec(["<search>delete all but the last</search>"], searching(shelf), limits=Limits(max_turn_tokens=20))
    (trajectory,) = roll(rollout)
    assert shelf.queries == []
    assert statuses(trajectory) == [CallStatus.TRUNCATED]
    assert episode_of(trajectory, rollout.renderer).stop_reason is StopReason.LENGTH


def test_p54_a_search_that_never_ends_is_read_as_a_timeout_or_ends_the_episode_as_invalid() -> None:
    patient = spec(["<search>a</search>", ANSWER], searching(SlowShelf(), search_seconds=0.02))
    (trajectory,) = roll(patient)
    assert statuses(trajectory) == [CallStatus.TIMEOUT, CallStatus.OK]
    assert em(trajectory, patient).value == 1.0
    strict = spec(["<search>a</search>", ANSWER], searching(SlowShelf()), limits=Limits(episode_seconds=0.05))
    (trajectory,) = roll(strict)
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "timeout"


@pytest.mark.alone
def test_p57_ten_megabytes_are_cut_to_the_budget_with_both_tags_whole_and_the_loss_on_record() -> None:
    contents = "Title\n" + "päragraph " * 1_000_000
    rollout = spec(["<search>a</search>", ANSWER], searching(Shelf(contents)), limits=Limits(max_observation_tokens=99))
    started = time.perf_counter()
    (trajectory,) = roll(rollout)
    assert time.perf_counter() - started < allowed(1.0)
    seen = trajectory.turns[1]
    assert seen.end - seen.start <= 99
    text = env_text(trajectory, rollout)
    assert text.startswith("\n\n<information>Doc 1(Title: Title) p")
    assert text.endswith("...(truncated)</information>\n\n")
    assert "\ufffd" not in text
    kept = text.removeprefix("\n\n<information>").removesuffix("...(truncated)</information>\n\n")
    whole = ("Doc 1(Title: Title) " + contents.partition("\n")[2]).strip()
    assert seen.bytes_cut == len(whole.encode()) - len(kept.encode())
    assert seen.tokens_cut > 0
    assert trajectory.turns[0].bytes_cut == 0


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60),
    st.integers(1, 80),
    st.sampled_from(["", "...(truncated)"]),
)
@settings(max_examples=60, deadline=None)
def test_p57_what_is_kept_is_always_a_prefix_within_the_budget(body: str, budget: int, marker: str) -> None:
    class Says(Echo):
        said = Observation(head="[", text=body, tail="]")

    limits = Limits(max_observation_tokens=budget, cut_marker=marker)
    rollout = spec(["x", "y"], lambda task: Says(), tokenizer=TOKENIZER, limits=limits)
    (trajectory,) = roll(rollout)
    turn = trajectory.turns[1]
    text = rollout.renderer.decode(trajectory.token_ids[turn.start : turn.end])
    assert text[0] + text[-1] == "[]"
    assert turn.end - turn.start <= max(budget, 2)
    if turn.tokens_cut == 0:
        assert turn.bytes_cut == 0
        assert text == f"[{body}]"
    else:
        kept = text[1:-1].removesuffix(marker)
        assert body.startswith(kept)
        assert turn.bytes_cut == len(body.encode()) - len(kept.encode()) > 0


class Echo:
    """Shows one observation, then ends."""

    stop_strings = ()
    max_turns = 2
    said = Observation()

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Step:
        self.turn += 1
        return Step(observation=self.said, done=self.turn == 2)

    async def close(self) -> None:
        return None


TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("output", "shown"),
    [(None, ""), (b"caf\xc3\xa9", "café"), ({"k": [1]}, '{"k": [1]}'), (ValueError("no"), "ValueError: no"), (7, "7")],
)
@pytest.mark.parametrize("as_message", [False, True])
def test_p58_any_tool_output_becomes_text_and_the_rollout_goes_on(output: Any, shown: str, as_message: bool) -> None:
    class Tool(Echo):
        said = (
            Observation(messages=({"role": "tool", "content": output},))
            if as_message
            else Observation(head="<", text=output, tail=">")
        )

    rollout = spec(["x", "y"], lambda task: Tool())
    (trajectory,) = roll(rollout)
    assert not isinstance(trajectory.outcome, Invalid)
    assert env_text(trajectory, rollout) == (shown if as_message else f"<{shown}>")


async def html_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    page = b"<html><body>502 Bad Gateway</body></html>"
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(page), page))
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("fault", ["html", "refused"])
def test_p59_a_search_server_that_answers_html_or_not_at_all_makes_invalid_episodes_not_zeros(fault: str) -> None:
    async def run() -> list[Trajectory]:
        server = await asyncio.start_server(html_server, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if fault == "refused":
            server.close()
            await server.wait_closed()
        options = HttpOptions(max_attempts=2, backoff_seconds=0.001, deadline_seconds=5)
        retriever = HttpRetriever(f"http://127.0.0.1:{port}/retrieve", options)
        rollout = spec(["<search>a</search>", ANSWER], lambda task: SearchEnv(retriever=retriever))
        try:
            return await rollout_group(task(), rollout, group_id="g", group_size=2, run_seed=0, step=0)
        finally:
            await retriever.close()
            server.close()

    for trajectory in asyncio.run(run()):
        assert isinstance(trajectory.outcome, Invalid)
        assert trajectory.outcome.reason == "tool_down"
        assert trajectory.rewards is None
        assert trajectory.policy_token_count > 0


def failing(*samples: int) -> Any:
    """make_env: the episodes with these numbers, in the order of their making, have no server."""
    made = iter(range(10**6))
    return lambda task: SearchEnv(retriever=DownShelf() if next(made) in samples else Shelf("T\nx"))


def credited(trajectories: list[Trajectory], rewards: list[float]) -> tuple[Batch, torch.Tensor]:
    """The batch of the valid episodes and their GRPO advantages by episode; rewards at the last policy token."""
    valid = [t for t in trajectories if not isinstance(t.outcome, Invalid)]
    for trajectory, reward in zip(valid, rewards, strict=True):
        trajectory.rewards = [0.0] * len(trajectory)
        trajectory.rewards[max(i for i, bit in enumerate(trajectory.loss_mask) if bit)] = reward
    batch = pack(valid)
    advantages = grpo(batch.rewards, batch.loss_mask, batch.episode_index, batch.group_index)
    return batch, advantages


def by_episode(batch: Batch, advantages: torch.Tensor) -> list[float]:
    last = [int(((batch.episode_index == e) & batch.loss_mask).nonzero().max()) for e in batch.episode_index.unique()]
    return advantages[last].tolist()


def test_p61_three_of_eight_fail_and_the_other_five_are_a_group_of_five() -> None:
    script = ["<search>a</search>", ANSWER]
    trajectories = roll(spec(script, failing(1, 4, 6)), group_size=8)
    assert [i for i, t in enumerate(trajectories) if isinstance(t.outcome, Invalid)] == [1, 4, 6]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    alone = roll(spec(script), group_size=5)
    assert by_episode(*credited(trajectories, rewards)) == pytest.approx(by_episode(*credited(alone, rewards)))
    assert all(t.rewards is None for t in trajectories if isinstance(t.outcome, Invalid))


def test_p62_a_group_in_which_all_fail_ends_with_nothing_to_train_on() -> None:
    trajectories = roll(spec(["<search>a</search>"], failing(*range(8))), group_size=8)
    assert len(trajectories) == 8
    assert {t.outcome.reason for t in trajectories if isinstance(t.outcome, Invalid)} == {"tool_down"}
    with pytest.raises(ValueError, match="nothing to pack"):
        credited(trajectories, [])


@given(st.permutations(range(8)))
@settings(max_examples=15, deadline=None)
def test_p63_the_order_of_arrival_leaves_advantages_unchanged(order: list[int]) -> None:
    async def both() -> list[Trajectory]:
        def delay(call: ScriptedCall) -> float:
            group, _, sample = str(call.session).partition("/")
            return order[int(sample) + 4 * (group == "B")] * 0.001

        sampler = ScriptedSampler([ANSWER], TOKENIZER, delay=delay)
        rollout = spec(None, tokenizer=TOKENIZER, sampler=sampler)
        groups = [
            rollout_group(task(task_id=name), rollout, group_id=name, group_size=4, run_seed=0, step=0) for name in "AB"
        ]
        return [t for group in await asyncio.gather(*groups) for t in group]

    trajectories = asyncio.run(both())
    assert [t.episode_id for t in trajectories] == ["A/0", "A/1", "A/2", "A/3", "B/0", "B/1", "B/2", "B/3"]
    rewards = dict(zip([t.episode_id for t in trajectories], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], strict=True))
    arrived = [trajectories[i] for i in order]
    shuffled = by_episode(*credited(arrived, [rewards[t.episode_id] for t in arrived]))
    in_order = [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5]
    assert shuffled == pytest.approx([in_order[i] for i in order], abs=1e-4)


def test_p67_a_context_without_room_ends_context_full_and_no_request_is_sent() -> None:
    contents = "T\n" + "w" * 300
    rollout = spec(["<search>a</search>", ANSWER], searching(Shelf(contents)), limits=Limits(max_episode_tokens=200))
    (trajectory,) = roll(rollout)
    assert len(rollout.sampler.calls) == 1
    end = trajectory.turns[-1]
    assert (end.stop_reason, end.start, end.end) == (StopReason.CONTEXT_FULL, len(trajectory), len(trajectory))
    lost = trajectory.turns[-2]
    assert (lost.who, lost.start, lost.end) == (Source.ENV, len(trajectory), len(trajectory))
    assert lost.tokens_cut > 300
    assert episode_of(trajectory, rollout.renderer).final_text == "<search>a</search>"
    assert em(trajectory, rollout).value == 0.0


@pytest.mark.parametrize("room", [0, -17])
def test_p67_a_prompt_that_fills_the_context_sends_no_request(room: int) -> None:
    limits = Limits(max_episode_tokens=len("Where is the tower?") + room)
    rollout = spec([ANSWER], limits=limits)
    (trajectory,) = roll(rollout)
    assert rollout.sampler.calls == []
    assert [turn.stop_reason for turn in trajectory.turns] == [StopReason.CONTEXT_FULL]


def test_p67_the_last_free_token_is_used() -> None:
    rollout = spec([ANSWER], limits=Limits(max_episode_tokens=len("Where is the tower?") + 1))
    (trajectory,) = roll(rollout)
    assert rollout.sampler.calls[0].params.max_new_tokens == 1
    assert trajectory.policy_token_count == 1
    assert trajectory.turns[0].stop_reason is StopReason.LENGTH
