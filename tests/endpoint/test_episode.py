"""What becomes of an agent's run: trajectories, rewards, limits, failures."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from cases.parts import CHAT_TEMPLATE, byte_tokenizer
from endpoint.parts import LOOK, called, in_turn, play, user
from posttrain.algorithms.advantages import grpo
from posttrain.endpoint.agent import ExternalAgent
from posttrain.endpoint.serving import EndpointError
from posttrain.loops.collect import Collector, collect, usable
from posttrain.packing import pack
from posttrain.rewards.config import load_reward
from posttrain.rollout import Limits
from posttrain.sampler.scripted import ScriptedCall, ScriptedSampler
from posttrain.task import Abstain, Invalid, Score, Task
from posttrain.trajectory import Source, StopReason


class Line:
    """A client that needs no package: one endpoint, one key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.http = httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, verify=False, timeout=30)

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def post(self, path: str, body: dict) -> httpx.Response:
        return await self.http.post(f"{self.base_url}/{path}", json=body)

    async def say(self, messages: list, **options) -> dict:
        """The assistant's message."""
        got = await self.post("chat/completions", {"messages": messages, **options})
        got.raise_for_status()
        return got.json()["choices"][0]["message"]


def talking(*questions: str, result=None):
    """An agent that asks one thing after the other in one conversation."""

    async def agent(task, base_url, api_key):
        messages = []
        async with Line(base_url, api_key) as line:
            for question in questions:
                messages.append(user(question))
                messages.append(await line.say(messages))
        return result

    return agent


# Conversations -------------------------------------------------------------------------------------------------------


def test_one_conversation_is_one_trajectory():
    played = play(talking("a?", "b?"), ["one", "two"])
    assert played.written == [["one<|im_end|>", "two<|im_end|>"]]
    assert (played.only.episode_id, played.only.task_id, played.only.group_id) == ("g/0", "t1", "g")
    assert played.spec.sampler.released == ["g/0#0"]


def test_going_back_to_an_earlier_point_forks_and_trains_nothing_twice():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            start = [user("a?")]
            start.append(await line.say(start))
            for question in ("b?", "c?", "d?"):
                await line.say([*start, user(question)])

    played = play(agent, in_turn("one", "two", "three", "four"))
    assert played.written == [["one<|im_end|>", "two<|im_end|>"], ["three<|im_end|>"], ["four<|im_end|>"]]
    first = played.spec.sampler.calls[0].ids
    shared = [t.token_ids[: len(first) + 4] for t in played.trajectories]
    assert shared[0] == shared[1] == shared[2], "the tokens in front of the fork are reused"
    assert set(played.trajectories[1].source[: len(shared[0])]) == {Source.PROMPT}


def test_a_parallel_continuation_of_one_point_forks():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            start = [user("a?")]
            start.append(await line.say(start))
            await asyncio.gather(*[line.say([*start, user(q)]) for q in ("b?", "c?")])

    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    played = play(agent, None, sampler=ScriptedSampler(lambda call: "x", tokenizer, delay=0.03))
    assert sorted(map(len, played.written)) == [1, 2]
    assert len({tuple(t.token_ids) for t in played.trajectories}) == 2


def test_p21_compaction_opens_a_further_trajectory_with_its_true_context():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            messages = [user("a?")]
            messages.append(await line.say(messages))
            messages += [user("b?")]
            messages.append(await line.say(messages))
            await line.say([user("So far: one, two."), messages[-1], user("c?")])

    played = play(agent, in_turn("one", "two", "three"))
    assert played.written == [["one<|im_end|>", "two<|im_end|>"], ["three<|im_end|>"]]
    assert played.texts[1] == (
        "<|im_start|>user\nSo far: one, two.<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"
    )
    assert played.episode.policy_texts == ("one", "two", "three")


def test_a_rewritten_history_shows_the_policys_calls_as_it_wrote_them():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            message = await line.say([user("a?")], tools=[LOOK])
            answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Paris"}
            await line.say([{"role": "system", "content": "Be brief."}, user("a?"), message, answer], tools=[LOOK])

    played = play(agent, in_turn("hm " + called("q"), "two"))
    assert len(played.trajectories) == 2
    assert "hm " + called("q") + "<|im_end|>\n<|im_start|>tool\nParis<|im_end|>" in played.texts[1]
    assert played.written[1] == ["two<|im_end|>"]


def test_a_sub_agent_has_a_trajectory_of_its_own_and_the_last_words_are_last():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            messages = [user("a?")]
            messages.append(await line.say(messages))
            report = await line.say([{"role": "system", "content": "You are a scout."}, user("look")])
            await line.say([*messages, user(report["content"])])

    played = play(agent, in_turn("one", "seen", "end"))
    assert played.written == [["seen<|im_end|>"], ["one<|im_end|>", "end<|im_end|>"]]
    assert played.episode.final_text == "end"
    assert played.spec.sampler.released == ["g/0#0", "g/0#1"]


def test_other_tools_are_another_prompt_only_where_the_policy_is_shown_them():
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE

    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            messages = [user("a?")]
            messages.append(await line.say(messages, tools=[LOOK]))
            await line.say([*messages, user("b?")])

    shown = play(agent, in_turn("one", "two"), template=template, show_tools=True)
    assert shown.texts[0].startswith('[{"type": "function"')
    assert len(shown.trajectories) == 2
    assert len(play(agent, in_turn("one", "two"), template=template).trajectories) == 1


def test_tools_are_described_in_the_system_message_where_the_template_does_not():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            await line.say([{"role": "developer", "content": "Be brief."}, user("a?")], tools=[LOOK])
            await line.say([user("a?")], tools=[LOOK])

    played = play(agent, in_turn("one", "two"), show_tools=True)
    for text, start in zip(played.texts, ("Be brief.\n\n", ""), strict=True):
        assert text.startswith(f"<|im_start|>system\n{start}You may call these tools:")
        assert '"name": "look"' in text


def test_results_inside_the_policys_turn_for_syntaxes_that_want_it():
    search = {"type": "function", "function": {"name": "search", "parameters": LOOK["function"]["parameters"]}}

    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            messages = [user("a?")]
            messages.append(await line.say(messages, tools=[search]))
            (call,) = messages[-1]["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It is in Paris."})
            agent.got = await line.say(messages, tools=[search])

    played = play(agent, ["<search> tower </search> and more", "<answer> Paris </answer>"], syntax="search_r1")
    assert agent.got["content"] == "<answer> Paris </answer>"
    assert played.texts == [
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n<search> tower </search>"
        "\n\n<information>It is in Paris.</information>\n\n<answer> Paris </answer>"
    ]
    assert played.written == [["<search> tower </search>", "<answer> Paris </answer>"]]


def test_thoughts_in_a_field_of_their_own_still_match():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            first = await line.say([user("a?")])
            assert (first["content"], first["reasoning_content"]) == ("one", "let me see")
            await line.say([user("a?"), {"role": "assistant", "content": first["content"]}, user("b?")])

    played = play(agent, ["<think>\nlet me see\n</think>\n\none", "two"], reasoning="separate")
    assert played.written == [["<think>\nlet me see\n</think>\n\none<|im_end|>", "two<|im_end|>"]]


def test_thoughts_that_the_agent_strips_are_not_in_the_later_context():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            first = await line.say([user("a?")])
            stripped = {"role": "assistant", "content": first["content"].split("</think>")[1]}
            await line.say([user("a?"), stripped, user("b?")])

    played = play(agent, in_turn("<think>hm</think>one", "two"))
    assert played.written == [["<think>hm</think>one<|im_end|>"], ["two<|im_end|>"]]
    assert "hm" not in played.texts[1]


# Rewards -------------------------------------------------------------------------------------------------------------


def test_what_the_agent_returns_is_the_reward_or_the_answer():
    rewarded = play(talking("a?", "b?", result=0.5), ["one", "two"])
    assert rewarded.only.rewards == [0.0] * (len(rewarded.only) - 1) + [0.5]
    assert rewarded.episode.env_reward == 0.5
    answered = play(talking("a?", result="Paris"), ["one"])
    assert (answered.episode.answer, answered.episode.env_reward) == ("Paris", None)
    assert play(talking("a?"), ["one"]).episode.answer is None


def test_posted_rewards_add_up_where_the_policy_wrote():
    async def agent(task, base_url, api_key):
        messages = [user("a?")]
        async with Line(base_url, api_key) as line:
            assert (await line.post("reward", {"reward": 1})).status_code == 409
            messages.append(await line.say(messages))
            assert (await line.post("reward", {"reward": 0.25})).json() == {"status": "ok"}
            await line.post("reward", {"reward": 0.25})
            assert (await line.post("reward", {"reward": "much"})).status_code == 400
            await line.say([*messages, user("b?")])
        return 1

    played = play(agent, ["one", "two"])
    first, last = (turn.end - 1 for turn in played.only.turns if turn.who is Source.POLICY)
    assert {i: r for i, r in enumerate(played.only.rewards) if r} == {first: 0.5, last: 1.0}
    assert played.episode.env_reward == 1.5


@pytest.mark.parametrize(
    ("result", "reason"), [(float("nan"), "non_finite_reward"), (object(), "agent_error"), ([1], "agent_error")]
)
def test_what_is_no_reward_makes_the_episode_invalid(result, reason):
    assert play(talking("a?", result=result), ["one"]).only.outcome.reason == reason


@pytest.mark.alone
def test_an_agent_may_say_that_it_cannot_be_judged():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            await line.say([user("a?")])
            await line.post("reward", {"invalid": "tool_down", "detail": "no weather today"})
            await asyncio.sleep(5)

    started = time.perf_counter()
    assert play(agent, ["one"]).only.outcome == Invalid("tool_down", "no weather today")
    assert time.perf_counter() - started < 4


# Failures and limits -------------------------------------------------------------------------------------------------


def test_an_agent_that_crashes_is_invalid_with_its_traceback():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            await line.say([user("a?")])
        raise KeyError("weather")

    played = play(agent, ["one"])
    assert played.only.outcome == Invalid("agent_error", "KeyError: 'weather'")
    assert "in agent" in played.only.info["traceback"]
    assert played.written == [["one<|im_end|>"]], "kept for whoever looks for the cause"


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_an_agent_that_exits_does_not_end_the_run(kind):
    async def exits(task, base_url, api_key):
        sys.exit(3)

    def exits_in_a_thread(task, base_url, api_key):
        sys.exit(3)

    outcome = play(exits if kind == "async" else exits_in_a_thread, []).only.outcome
    assert (outcome.reason, "sys.exit(3)" in outcome.detail) == ("agent_error", True)


def test_an_agent_that_asks_nothing_is_invalid():
    async def agent(task, base_url, api_key):
        return 1.0

    assert play(agent, []).only.outcome.reason == "no_call"


@pytest.mark.parametrize("stubborn", [False, True])
def test_p54_the_deadline_ends_the_agent_and_its_key(stubborn):
    seen = {}

    async def agent(task, base_url, api_key):
        seen.update(base_url=base_url, api_key=api_key)
        async with Line(base_url, api_key) as line:
            await line.say([user("a?")])
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            if not stubborn:
                raise
            await asyncio.sleep(1.5)  # does not let itself be cancelled

    started = time.perf_counter()
    played = play(agent, ["one"], limits=Limits(episode_seconds=0.3))
    assert time.perf_counter() - started < 8
    assert played.only.outcome.reason == "timeout"
    assert played.only.turns[-1].stop_reason is StopReason.DEADLINE
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{seen['base_url']}/chat/completions", json={})


def test_a_turn_that_takes_too_long_ends_the_episode():
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    played = play(
        talking("a?"), None, sampler=ScriptedSampler(["x"], tokenizer, delay=5), limits=Limits(turn_seconds=0.1)
    )
    assert played.only.outcome == Invalid("timeout", "turn_seconds passed while sampling")


def test_p67_a_full_context_ends_the_episode_without_making_it_invalid():
    played = play(talking("a?", "b?"), lambda call: "x" * 40, limits=Limits(max_episode_tokens=80))
    assert played.only.outcome == Abstain("not scored")
    assert [turn.stop_reason for turn in played.only.turns if turn.who is Source.POLICY][-1] is StopReason.CONTEXT_FULL
    assert "context_length_exceeded" not in played.texts[0]


def test_an_agent_that_makes_room_after_a_full_context_goes_on():
    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            message = await line.say([user("a?")])
            got = await line.post("chat/completions", {"messages": [user("a?"), message, user("b?")]})
            assert (got.status_code, got.json()["error"]["code"]) == (400, "context_length_exceeded")
            await line.say([user("c?")])
        raise KeyError("later")

    played = play(agent, lambda call: "x" * 40, limits=Limits(max_episode_tokens=80))
    assert played.trajectories[-1].outcome.reason == "agent_error", "this was no consequence of the limit"


def test_calls_are_limited():
    played = play(talking("a?", "b?", "c?", result=1.0), lambda call: "x", limits=Limits(max_turns=2))
    assert played.only.outcome == Abstain("not scored")
    assert played.only.turns[-1].stop_reason is StopReason.MAX_TURNS
    assert played.written == [["x<|im_end|>", "x<|im_end|>"]]


def test_a_first_prompt_that_is_too_long_is_invalid():
    assert play(talking("a" * 60), ["x"], limits=Limits(max_prompt_tokens=50)).only.outcome.reason == "prompt_too_long"


def test_without_uvicorn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(EndpointError, match=r"posttrain\[serve\]"):
        play(talking("a?"), ["x"])


# Side by side --------------------------------------------------------------------------------------------------------


def test_episodes_side_by_side_are_told_apart_and_reproducible():
    keys = []

    async def agent(task, base_url, api_key):
        keys.append(api_key)
        async with Line(base_url, api_key) as line:
            messages = [user("a?")]
            messages.append(await line.say(messages))
            await line.say([*messages, user("b?")])

    def script(call: ScriptedCall) -> str:
        return f"{call.seed % 1000:03}"

    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    runs = [
        play(agent, None, group_size=6, sampler=ScriptedSampler(script, tokenizer, delay=delay))
        for delay in (lambda c: 0.0, lambda c: 0.01 * (c.seed % 7))
    ]
    assert runs[0].texts == runs[1].texts, "whoever comes first"
    assert len(set(runs[0].texts)) == 6
    assert [t.episode_id for t in runs[0].trajectories] == [f"g/{i}" for i in range(6)]
    assert len(set(keys)) == 12
    assert not any(
        key in str(t.info) + text for r in runs for t, text in zip(r.trajectories, r.texts, strict=True) for key in keys
    )
    assert play(agent, None, group_size=6, step=1, sampler=ScriptedSampler(script, tokenizer)).texts != runs[0].texts


def test_no_more_agents_at_once_than_told():
    running, most = set(), []

    async def agent(task, base_url, api_key):
        running.add(api_key)
        most.append(len(running))
        async with Line(base_url, api_key) as line:
            await line.say([user("a?")])
        running.remove(api_key)

    play(agent, lambda call: "x", group_size=6, concurrency=2)
    assert max(most) == 2


def test_an_episode_of_several_trajectories_counts_once_in_the_baseline():
    """Episodes 0 and 1 have three trajectories, the others one; the group's mean is over four episodes."""

    async def agent(task, base_url, api_key):
        async with Line(base_url, api_key) as line:
            number = int((await line.say([user("number?")]))["content"])
            for part in range(2 if number < 2 else 0):
                await line.say([{"role": "system", "content": f"sub-agent {part}"}, user("go")])
        return float(number == 0)

    def script(call: ScriptedCall) -> str:
        return call.session.split("/")[-1].split("#")[0] if call.session.endswith("#0") else "sub"

    played = play(agent, script, group_size=4)
    collector = Collector(spec=played.spec, rewards={None: load_reward("env")}, seed=7)
    task = Task(id="t1", prompt=(user("x"),))
    kept = usable(asyncio.run(collect([task], collector, group_size=4, step=1)))
    assert [t.episode_id[-1] for t in kept] == ["0", "0", "0", "1", "1", "1", "2", "3"]
    assert all(isinstance(t.outcome, Score) for t in kept)
    batch = pack(kept)
    assert batch.rewards.sum() == 1, "the reward lies once in the episode"
    advantages = grpo(batch.rewards, batch.loss_mask, batch.episode_index, batch.group_index, std="none")
    for place, segment in enumerate(kept):
        mine = advantages[(batch.segment_ids == place) & batch.loss_mask]
        expected = 0.75 if segment.episode_id.endswith("/0") else -0.25
        torch.testing.assert_close(mine, torch.full_like(mine, expected))


# Programs ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": task["prompt"] + [{"role": "user", "content": sys.argv[1]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("the answer is", answer, task["ground_truth"])
"""


def test_a_program_is_an_agent_too(tmp_path: Path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "agent.py"), "id={id}; {prompt}"]
    played = play(None, ["Paris"], command=command)
    assert played.only.outcome == Abstain("not scored")
    assert played.episode.answer == "the answer is Paris ['Paris']"
    assert "id=t1; Where is the tower?" in played.texts[0]


def test_a_program_that_fails_is_invalid_with_the_end_of_its_words(tmp_path: Path):
    code = "import sys; print('no weather', file=sys.stderr); sys.exit(4)"
    outcome = play(None, [], command=[sys.executable, "-c", code]).only.outcome
    assert outcome.reason == "agent_error"
    assert "exit code 4: no weather" in outcome.detail
    assert "cannot be started" in play(None, [], command="no-such-program --x").only.outcome.detail


def test_a_program_is_killed_with_its_children_at_the_deadline(tmp_path: Path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(60)\n"
    )
    started = time.perf_counter()
    played = play(None, [], command=[sys.executable, "-c", code], limits=Limits(episode_seconds=4))
    assert played.only.outcome.reason == "timeout"
    assert time.perf_counter() - started < 30
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 2
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)


def test_a_program_whose_start_is_cancelled_is_killed_too(tmp_path: Path):
    """The loop is busy with other episodes: the program runs before asyncio has connected its pipes."""
    begun, place = tmp_path / "begun", tmp_path / "pid"
    code = (
        f"import os, time\nopen({str(place)!r}, 'w').write(str(os.getpid()))\nos.rename({str(place)!r}, {str(begun)!r})"
    )
    agent = ExternalAgent(command=[sys.executable, "-c", f"{code}\ntime.sleep(60)"])

    def other_episodes() -> None:
        until = time.monotonic() + 50
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.02)

    async def cancelled() -> None:
        job = asyncio.create_task(agent.run(Task(id="t", prompt=()), "http://x", "key"))
        for _ in range(2):  # then its process is there
            await asyncio.sleep(0)
        other_episodes()
        job.cancel()
        done, _ = await asyncio.wait({job}, timeout=30)
        assert done
        assert job.cancelled()

    asyncio.run(cancelled())
    program, until = int(begun.read_text()), time.monotonic() + 10
    while _alive(program) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _alive(program)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "say either agent"),
        ({"agent": print, "command": "x"}, "say either agent"),
        ({"agent": 5}, "must be a function"),
        ({"agent": print, "syntax": "hermez"}, "hermes"),
        ({"agent": print, "reasoning": "gone"}, "content or separate"),
        ({"agent": print, "other_sampling": "yes"}, "refuse, ignore or exclude"),
        ({"agent": print, "concurrency": 0}, ">= 1"),
        ({"agent": print, "address": "8000"}, "HOST:PORT"),
        ({"agent": "no_such_module:agent"}, "no module"),
    ],
)
def test_wrong_settings_are_found_before_anything_runs(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        ExternalAgent(**options)
