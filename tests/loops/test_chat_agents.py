"""Any agent of a config can be talked to: tools, ReAct, a simulated user, several envs, an external program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from posttrain.config import ConfigError, EvalRunConfig, parse_config
from posttrain.data import DataError
from posttrain.data.problems import FieldError
from posttrain.envs import SingleTurnEnv
from posttrain.loops.build import check_playable, env_maker, load_part, load_renderer, make_stage
from posttrain.loops.chat import Chat, answer_of, check_request, find_task, task_of
from posttrain.loops.person import HELP, Person
from posttrain.loops.target import find_target
from posttrain.loops.watch import CALL_STYLE, FAILED_STYLE, OTHER_CONVERSATION, READ_STYLE, documents_in
from posttrain.runs.trajectories import read_trajectories
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.task import Abstain, Score, Task
from posttrain.trajectory import Episode, Segment, Source

TOOLS = '''
from posttrain.tools import ToolError

async def find(query: str) -> str:
    """Finds documents.

    Args:
        query: what to look for
    """
    if query == "nothing":
        raise ToolError("failed", "the library is closed")
    lines = ["<snippet id=a1-0>", f"Title: About {query}", f"URL: https://example.org/{query}", "</snippet>"]
    return "\\n".join(lines)

async def agent(task, base_url, api_key):
    import asyncio, httpx
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as http:
        async def ask(text):
            body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            return (await http.post("/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        helper = await ask("Sub-question")
        return await ask(task.prompt[-1]["content"] + helper)
'''


def agent(script: Any, folder: Path, *, judged: bool = False, person: Person | None = None, **sections: Any) -> Chat:
    """A chat with the agent of `sections`; its policy follows a script."""
    (folder / "tools.py").write_text(TOOLS)
    config = parse_config(EvalRunConfig, {"model": {"path": "tiny_search_base"}, "data": {}} | sections)
    stage = make_stage(config, load_renderer(config), [task_of("?", config)], judged=judged)
    return Chat(config, stage, ScriptedSampler(script, stage.tokenizer), person=person)


def with_tools(folder: Path, **env: Any) -> dict[str, Any]:
    tool = {"name": "find", "location": f"{folder}/tools.py:find"}
    return {"env": env, "tools": [tool], "limits": {"max_prompt_tokens": 4000, "max_episode_tokens": 8000}}


def plain(shown: Sequence[Text], *styles: str) -> list[str]:
    return [piece.plain.strip() for piece in shown if piece.style in styles]


def test_tool_calls_and_what_they_found_are_shown_as_they_come(tmp_path):
    script = [
        '<tool_call>{"name": "find", "arguments": {"query": "Rome"}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {"query": "nothing"}}</tool_call>',
        '<tool_call>{"name": "fetch", "arguments": {}}</tool_call>',
        'It is <cite id="a1-0">old</cite>.',
    ]
    shown: list[Text] = []
    options = {"syntax": "hermes", "describe": "text"}
    with agent(script, tmp_path, **with_tools(tmp_path, name="tools", options=options)) as chat:
        reply = chat.ask("How old is Rome?", shown.append)
    assert reply.answer == 'It is <cite id="a1-0">old</cite>.'
    assert plain(shown, CALL_STYLE)[0].startswith("-> find(query='Rome') ok")
    failed = plain(shown, FAILED_STYLE)
    assert failed[0].startswith("-> find(query='nothing') failed")
    assert failed[0].endswith(": the library is closed")
    assert failed[1].startswith("-> fetch() unknown_tool: ")
    assert plain(shown, READ_STYLE) == ["read [a1-0] About Rome https://example.org/Rome"]
    order = [shown.index(piece) for piece in shown if piece.style in (CALL_STYLE, FAILED_STYLE)]
    assert order[0] == 2, "behind the prompt and the turn, before the next turn"
    first, *rest = reply.verdict.splitlines()
    assert first.startswith("answer: It is")
    assert "calls: 2 find, calls: 1 fetch" in first
    assert rest == ["cited: [a1-0] About Rome https://example.org/Rome"]
    record = json.loads(json.dumps(reply.as_dict()))
    assert [call["status"] for call in record["calls"]] == ["ok", "failed", "unknown_tool"]
    assert record["documents"] == [
        {"id": "a1-0", "title": "About Rome", "url": "https://example.org/Rome", "cited": True}
    ]


def test_a_template_that_ignores_tools_is_found_before_the_model_loads(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    sections = with_tools(tmp_path, name="tools") | {"model": {"path": "tiny_search_base"}, "data": {}}
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    with pytest.raises(ConfigError, match=r"env tools: the chat template ignores `tools`.*describe: text"):
        Chat.open(find_target(f"{tmp_path}/c.yaml"))


def test_react_answers_by_its_finish_action(tmp_path):
    script = [
        "Thought: look.\nAction: find[Rome]\nObservation",
        "Thought: I know.\nAction: finish[very old]",
    ]
    with agent(script, tmp_path, **with_tools(tmp_path, name="react")) as chat:
        reply = chat.ask("How old is Rome?")
    assert reply.answer == "very old"
    assert reply.verdict.startswith("answer: very old (calls: 1 find, ")


def test_a_simulated_user_answers_and_the_reward_judges(tmp_path):
    sections = {"env": {"name": "interaction", "options": {"default": "correcting"}}, "reward": {"name": "env"}}
    shown: list[Text] = []
    with agent(["#### 41", "#### 42"], tmp_path, judged=True, **sections) as chat:
        reply = chat.ask("6 x 7?", shown.append, answer="42")
        assert plain(shown, CALL_STYLE) == ["=> the env gives 0", "=> the env gives 1"]
        assert reply.verdict.splitlines()[1] == "reward: 1, env 1"
        assert "That is not correct" in "".join(piece.plain for piece in shown)
        unknown = chat.ask("6 x 7?")
    assert unknown.invalid is not None, "this user checks, and nobody told it what is right"


def person(*lines: str) -> tuple[Person, list[str], list[str]]:
    """Types the lines, and then nothing more; (what it was told, what it was complained about)."""
    left, told, complaints = list(lines), list[str](), list[str]()
    return Person(lambda: left.pop(0) if left else None, told.append, complaints.append), told, complaints


def test_a_person_sits_in_the_simulated_users_place(tmp_path):
    sections = {
        "env": {"name": "interaction", "options": {"default": "correcting", "max_turns": 2}},
        "limits": {"call_seconds": 0.05, "turn_seconds": 10.0},
    }
    me, told, complaints = person("Why?", "/rewrd 1", "/reward 0.5", "And then?", "/reward 1", "")
    with agent(["Because.", "So.", "The end."], tmp_path, person=me, **sections) as chat:
        reply = chat.ask("Is it?")
        chat.save(tmp_path / "kept.parquet")
        over = chat.ask("Still there?")
    assert told[:3] == ["Because.", "So.", "The end."]
    assert complaints == ["/rewrd 1 is not understood: " + HELP]
    text = "".join(segment.text for segment in reply.episode.segments)
    assert text.index("Because.") < text.index("Why?") < text.index("So.") < text.index("And then?")
    assert reply.episode.turn_rewards == (0.0, 0.5, 1.0)
    assert (reply.invalid, over.invalid) == (None, None), "who types nothing more has left"
    (saved,) = read_trajectories(tmp_path / "kept.parquet")
    assert sum(saved.rewards or ()) == 1.5


def test_a_person_needs_the_place_of_a_simulated_user(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"model": {"path": "tiny_search_base"}, "data": {}}))
    me, _, _ = person()
    with pytest.raises(ConfigError, match=r"--you takes the place of a simulated user, and the env single_turn.*none"):
        Chat.open(find_target(f"{tmp_path}/c.yaml", ["env.name=single_turn"]), person=me)


def test_an_external_agent_is_watched_too(tmp_path):
    shown: list[Text] = []
    sections: dict[str, Any] = {"env": {"name": "external", "options": {"agent": f"{tmp_path}/tools.py:agent"}}}
    with agent(lambda call: f"reply {call.turn}", tmp_path, **sections) as chat:
        reply = chat.ask("Main? ", shown.append)
        chat.save(tmp_path / "kept.parquet")
    text = "".join(piece.plain for piece in shown)
    assert reply.answer == "reply 0"
    assert reply.invalid is None
    assert text.count(OTHER_CONVERSATION) == 1
    assert "Sub-question" in text.split(OTHER_CONVERSATION)[0]
    assert "Main? reply 0" in text.split(OTHER_CONVERSATION)[1]
    saved = read_trajectories(tmp_path / "kept.parquet")
    assert len(saved) == 2
    assert len({one.episode_id for one in saved}) == 1


def test_of_several_envs_one_is_asked(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": "1", "question": "2 + 2?", "answer": "4"}\n')
    path, template = f"{tmp_path}/rows.jsonl", "Sum: {question}"
    sections = {
        "data": {"eval": [{"path": path}, {"path": path, "name": "b", "env": "tutor", "prompt_template": template}]},
        "envs": {"tutor": {"name": "interaction", "options": {"default": "correcting"}}},
    }
    (tmp_path / "c.yaml").write_text(json.dumps({"model": {"path": "tiny_search_base"}} | sections))
    target = find_target(f"{tmp_path}/c.yaml", ["limits.max_turn_tokens=4"])
    with Chat.open(target, env="tutor", judged=True) as chat:
        reply = chat.ask("2 + 2?", answer="4")
    assert "Sum: 2 + 2?" in reply.episode.segments[0].text
    assert reply.episode.env_reward is not None, "the tutor gives rewards, the usual env does not"
    with pytest.raises(ConfigError, match=r"unknown env 'tutr'. Did you mean 'tutor'\?"):
        Chat.open(target, env="tutr")


def test_a_task_of_the_data_is_played_judged_and_saved(tmp_path):
    rows = [{"id": f"x/{n}", "question": f"Where is {n}?", "answer": "Doli"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "model": {"path": "tiny_search_base"},
        "data": {"eval": f"{tmp_path}/rows.jsonl"},
        "reward": {"name": "em"},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    target = find_target(f"{tmp_path}/c.yaml", ["limits.max_turn_tokens=4"])
    with Chat.open(target, task="x/1") as chat:
        assert chat.task is not None
        reply = chat.play(chat.task)
        chat.play(chat.task)
        chat.save(tmp_path / "kept" / "two.parquet")
    assert reply.question == "Where is 1?"
    assert isinstance(reply.outcome, Score)
    assert reply.verdict.splitlines()[1].startswith("reward: 0, no_answer 1")
    saved = read_trajectories(tmp_path / "kept" / "two.parquet")
    assert [(one.task_id, one.group_id) for one in saved] == [(chat.task.id, "chat/1"), (chat.task.id, "chat/2")]
    assert saved[0].outcome == reply.outcome
    renderer = load_renderer(target.config)
    assert find_task("2", target.config, renderer).ground_truth == ("Doli",)
    with pytest.raises(ConfigError, match=r"no task 'x/9'.*It has 3, such as"):
        find_task("x/9", target.config, renderer)


def test_wishes_that_contradict_each_other_are_refused_before_anything_loads(tmp_path):
    there = tmp_path / "there.parquet"
    there.write_text("")
    for wishes, said in (
        (("q", "t", None, None), "leave these out"),
        ((None, "t", "e", None), "leave these out"),
        (("q", None, None, tmp_path / "x.json"), r"must end in .parquet"),
        (("q", None, None, there), "there already"),
        ((None, "t", None, None, "Rome"), "leave these out"),
        ((" ", None, None, None), "the question is empty"),
        (("q", None, None, None, ""), "--answer is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_request(*wishes)
    check_request("q", None, "e", tmp_path / "new.parquet")


def test_questions_without_an_answer_are_not_judged(tmp_path):
    with agent(["Four."], tmp_path) as chat:
        reply = chat.ask("2 + 2?")
    assert isinstance(reply.outcome, Abstain)
    assert reply.answer == "Four."
    assert reply.as_dict()["reward"] is None


def test_a_turn_that_was_cut_is_no_answer():
    def said(stop_reason: Any, text: str = "So it is") -> Episode:
        return Episode(task_id="t", episode_id="e", segments=(Segment(Source.POLICY, text),), stop_reason=stop_reason)

    assert answer_of(said("length")) is None
    assert answer_of(said("stop_id")) == "So it is"
    assert answer_of(said("stop_id"), untagged=False) is None
    assert answer_of(said("length", "<answer>Rome</answer>")) == "Rome"


def test_titles_are_found_in_both_forms():
    text = '<information>Doc 1(Title: "Rome (city)") Old.\nDoc 2(Title: Oslo) New.</information>'
    assert [found.title for found in documents_in(text)] == ["Rome (city)", "Oslo"]
    assert documents_in("Doc 1 was lost") == []


def test_a_person_speaks_in_the_middle_of_a_task_of_the_data(tmp_path):
    """The row names its user; who sits in that place need not know it."""
    row = {
        "id": "1",
        "question": "6 x 7?",
        "answer": "42",
        "interaction_kwargs": {"name": "scripted", "lines": ["No."]},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    sections = {"model": {"path": "tiny_search_base"}, "data": {"eval": f"{tmp_path}/rows.jsonl"}}
    (tmp_path / "c.yaml").write_text(json.dumps(sections | {"env": {"name": "interaction"}, "reward": {"name": "env"}}))
    target = find_target(f"{tmp_path}/c.yaml", ["limits.max_turn_tokens=4"])
    me, told, _ = person("Yes?", "/reward 1", "")
    with Chat.open(target, task="1", person=me) as chat:
        assert chat.task is not None
        reply = chat.play(chat.task)
    assert len(told) == 2
    assert "Yes?" in "".join(segment.text for segment in reply.episode.segments)
    assert isinstance(reply.outcome, Score)
    assert reply.outcome.value == 1.0


def test_a_row_whose_user_nobody_knows_stops_the_start(tmp_path):
    rows = [
        {"id": str(n), "question": "?", "answer": "4", "interaction_kwargs": {"name": "correcting"}} for n in range(3)
    ]
    rows[1]["interaction_kwargs"] = {"name": "corecting"}
    rows[2]["interaction_kwargs"] = {"name": "scripted", "line": ["x"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"model": {"path": "tiny_search_base"}, "data": {"eval": f"{tmp_path}/rows.jsonl"}}
    config = parse_config(EvalRunConfig, sections | {"env": {"name": "interaction"}})
    with pytest.raises(DataError) as caught:
        load_part(config, "eval", load_renderer(config))
    said = str(caught.value)
    assert "2 of 3 rows cannot be used" in said
    assert "rows.jsonl line 2: the env interaction cannot play it" in said
    assert "names the interaction 'corecting', which is not known. Did you mean 'correcting'?" in said
    assert "rows.jsonl line 3" in said
    assert "takes lines; the row also gives line" in said


class Picky(SingleTurnEnv):
    """An env whose `check_task` fails in other ways than it should."""

    def check_task(self, task: Task) -> Any:
        return task.extra["level"] == 1


def test_a_check_of_rows_that_breaks_names_the_row_and_one_that_returns_is_told_so():
    named = Task(id="a", prompt=(), extra={"level": 2})
    with pytest.raises(FieldError, match="the env picky cannot play it: check_task raised KeyError: 'level'"):
        check_playable(Task(id="a", prompt=()), "picky", lambda name: Picky())
    with pytest.raises(ConfigError, match="check_task of the env picky returned False; let it raise ValueError"):
        check_playable(named, "picky", lambda name: Picky())


def test_an_env_that_uses_its_options_up_leaves_the_next_one_whole_options(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from posttrain.envs import SingleTurnEnv\n\n"
        "class Spends(SingleTurnEnv):\n"
        "    def __init__(self, *, lines):\n"
        "        super().__init__()\n"
        "        self.said = lines.pop(0)\n"
    )
    env = {"name": f"{tmp_path}/own.py:Spends", "options": {"lines": ["first", "second"]}}
    config = parse_config(EvalRunConfig, {"model": {"path": "tiny_search_base"}, "data": {}, "env": env})
    make = env_maker(config.env.name, config, None)
    assert [make().said for _ in range(3)] == ["first"] * 3
    assert config.env.options == {"lines": ["first", "second"]}
