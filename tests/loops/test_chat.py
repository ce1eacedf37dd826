"""A question is answered by the rollout that trains, and every piece of it is shown once, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from cases.parts import DownShelf, Shelf, byte_tokenizer
from cli_runs import Command, command_in
from posttrain.chat import Renderer
from posttrain.config import ConfigError, EvalRunConfig, parse_config
from posttrain.envs import SearchEnv
from posttrain.envs.tiny_world import eval_rows
from posttrain.loops.build import Stage
from posttrain.loops.chat import Chat, explained, task_of
from posttrain.loops.show import ANSWER_STYLE, STYLES
from posttrain.loops.target import find_target
from posttrain.loops.watch import CALL_STYLE, HISTORY_REWRITTEN, READ_STYLE, Watched
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.task import EpisodeInvalid, Invalid, Task
from posttrain.trajectory import Source, Trajectory

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny_search.yaml"
SEARCH_THEN_ANSWER = ["<search>tower</search>", "<think>so</think><answer>Paris</answer>"]
SEARCHING = {
    "model": {"path": "m"},
    "data": {"eval": "e.jsonl"},
    "env": {"name": "search"},
    "retrieval": {"corpus": "c.jsonl"},
}


def scripted(script: Any, shelf: Shelf | None = None, **sections: Any) -> Chat:
    """A chat whose policy follows a script and searches `shelf`."""
    world = shelf or Shelf('"Tower"\nThe tower is in Paris.')
    tokenizer = byte_tokenizer()
    stage = Stage(
        renderer=Renderer(tokenizer),
        retriever=world,
        rewards={},
        envs={"search": lambda: SearchEnv(retriever=world, max_turns=2)},
        tools={},
    )
    config = parse_config(EvalRunConfig, SEARCHING | sections)
    return Chat(config, stage, ScriptedSampler(script, tokenizer))


def test_a_question_is_answered_and_shown_piece_by_piece():
    shown: list[Text] = []
    with scripted(SEARCH_THEN_ANSWER) as chat:
        reply = chat.ask("Where is the tower?", shown.append)
    assert [piece.plain for piece in shown] == [
        "Where is the tower?",
        "<search>tower</search>",
        "\n  -> search(query='tower') ok",
        "\n     read Tower",
        '\n\n<information>Doc 1(Title: "Tower") The tower is in Paris.</information>\n\n',
        "<think>so</think><answer>Paris</answer>",
        "\n  -> answer(answer='Paris') ok",
    ]
    styles = [piece.style or piece.spans[0].style for piece in shown]
    assert styles == [
        STYLES[Source.PROMPT],
        STYLES[Source.POLICY],
        CALL_STYLE,
        READ_STYLE,
        STYLES[Source.ENV],
        STYLES[Source.POLICY],
        CALL_STYLE,
    ]
    assert shown[-2].spans[-1].style == ANSWER_STYLE
    assert reply.answer == "Paris"
    assert reply.verdict == f"answer: Paris (calls: 1 search, tokens: {len(''.join(SEARCH_THEN_ANSWER))})"


def test_the_reply_as_json():
    with scripted(SEARCH_THEN_ANSWER) as chat:
        record = json.loads(json.dumps(chat.ask("Where is the tower?").as_dict()))
    assert record["question"] == "Where is the tower?"
    assert (record["answer"], record["searches"], record["invalid"]) == ("Paris", ["tower"], None)
    assert [segment["source"] for segment in record["segments"]] == ["prompt", "policy", "env", "policy"]
    assert [call["status"] for call in record["calls"]] == ["ok", "ok"]
    assert record["stop_reason"] == "stop_string"


def test_several_questions_are_separate_episodes():
    with scripted(SEARCH_THEN_ANSWER) as chat:
        shown: list[Text] = []
        first, second = chat.ask("One?", shown.append), chat.ask("Two?", shown.append)
    assert (first.answer, second.answer) == ("Paris", "Paris")
    assert [piece.plain for piece in shown][::7] == ["One?", "Two?"]


def test_a_search_that_is_down_is_told_and_is_no_answer():
    with scripted(SEARCH_THEN_ANSWER, DownShelf()) as chat:
        reply = chat.ask("Where?")
    assert reply.answer is None
    assert reply.invalid is not None
    assert reply.verdict.startswith("invalid: tool_down: ")
    assert "nobody answers" in reply.as_dict()["invalid"]


def test_an_env_that_raises_shows_where_and_that_the_question_has_no_answer():
    raised = EpisodeInvalid("env_error", "IndexError: tuple index out of range")
    last = Trajectory(task_id="t", group_id="g", episode_id="e", outcome=Invalid(raised.reason, raised.detail))
    last.info["traceback"] = 'File "guess.py", line 15'
    said = explained(last, Task(id="t", prompt=()))
    assert isinstance(said, Invalid)
    assert said.detail.splitlines() == [
        raised.detail,
        'File "guess.py", line 15',
        "The question has no accepted answer; --answer gives one to an env that reads it.",
    ]


def test_no_answer_is_told():
    with scripted(["I do not know."] * 3) as chat:
        reply = chat.ask("Where?")
    assert reply.answer is None
    assert reply.verdict.startswith("no answer, ended by stop_id (calls: 0")


def test_rewritten_history_is_shown_as_such():
    tokenizer = byte_tokenizer()
    shown: list[str] = []
    watched = Watched(
        ScriptedSampler(["ab"], tokenizer, end_id=0), Renderer(tokenizer), lambda text: shown.append(text.plain)
    )

    async def sample(prompt: str) -> None:
        params = SamplingParams(max_new_tokens=8, stop_strings=("b",))
        await watched.sample(Renderer(tokenizer).text(prompt), params, seed=0)

    asyncio.run(sample("long prompt"))
    asyncio.run(sample("short"))
    watched.release("s")
    assert shown == ["long prompt", "ab", HISTORY_REWRITTEN, "short", "ab"]


def asked(**data: Any) -> Any:
    config = parse_config(EvalRunConfig, SEARCHING | {"data": data})
    return task_of("Where?", config)


def test_a_question_is_put_as_the_data_would():
    assert asked(eval="e.jsonl").prompt == ({"role": "user", "content": "Where?"},)
    templated = asked(eval={"path": "e.jsonl", "prompt_template": "Q: {query}\nA:", "system_prompt": "Be brief."})
    assert [message["content"] for message in templated.prompt] == ["Be brief.", "Q: Where?\nA:"]
    assert asked(train={"path": "t.jsonl", "prompt_template": "{problem}!"}).prompt[0]["content"] == "Where?!"
    with pytest.raises(ConfigError, match="the prompt template needs context, question"):
        asked(eval={"path": "e.jsonl", "prompt_template": "{context} {question}"})


# ---------------------------------------------------------------- the packaged model


@pytest.fixture(scope="module")
def tiny() -> Iterator[Chat]:
    with Chat.open(find_target("tiny_search_base", ["eval.temperature=1.0"], config=RECIPE)) as chat:
        yield chat


def test_the_packaged_model_searches_its_world(tiny):
    """The base model searches seldom; over a few questions it does, and reads what the world holds."""
    replies = [tiny.ask(str(row["question"])) for row in eval_rows(seed=0)[:40]]
    assert all(reply.invalid is None for reply in replies)
    searching = [reply for reply in replies if reply.as_dict()["searches"]]
    assert 1 <= len(searching) < 40
    read = [s.text for s in searching[0].episode.segments if s.source is Source.ENV]
    assert "<information>" in read[0]


def test_asking_again_gives_the_same_reply(tiny):
    shown: list[Text] = []
    first, second = tiny.ask("Where was Zofe Sogo born?"), tiny.ask("Where was Zofe Sogo born?", shown.append)
    assert first.as_dict() == second.as_dict()
    said = "".join(piece.plain for piece in shown if piece.style not in (CALL_STYLE, READ_STYLE))
    assert said == "".join(segment.text for segment in second.episode.segments)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_in(ROOT, monkeypatch, capfd)


CHAT = ("chat", "tiny_search_base", "--config", "recipes/tiny_search.yaml", "--json")


def test_the_command_reads_questions_until_the_end_of_the_file(command: Command):
    done = command(*CHAT, typed=b"Where was Zofe born?\n\nWho?\n")
    assert done.code == 0, done.err
    assert [json.loads(line)["question"] for line in done.out.splitlines()] == ["Where was Zofe born?", "Who?"]


def test_a_line_that_is_no_text_does_not_end_the_conversation(command: Command):
    done = command(*CHAT, typed=b"first?\n\xff?\nlast?\n")
    assert [json.loads(line)["question"] for line in done.out.splitlines()] == ["first?", "last?"]
    assert "lone UTF-16 surrogates" in done.refused()


def test_a_model_without_a_world_is_told_what_is_missing(command: Command):
    assert "add --config FILE.yaml" in command("chat", "tiny_search_base", "Where?").refused()


def test_the_eval_command_ends_with_one_json_line(command: Command, tmp_path: Path):
    done = command(
        "eval",
        "recipes/tiny_search.yaml",
        "eval.max_tasks=4",
        "--samples=2",
        "--temperature=1",
        "--json",
        f"--out={tmp_path}",
    )
    assert done.code == 0, done.err
    record = json.loads(done.out.splitlines()[-1])
    assert (record["tasks"], record["episodes"], record["out"]) == (4, 8, str(tmp_path))
    assert record["pass_at"].keys() == {"1", "2"}
    assert (tmp_path / "results.json").is_file()
