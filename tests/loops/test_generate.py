"""A file of prompts in, a line per episode out; what is there is not asked again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loops.toy import toy_config, write_rows
from posttrain.config import ConfigError, EvalRunConfig, parse_config
from posttrain.loops.chat import check_request
from posttrain.loops.export import export_target
from posttrain.loops.generate import generate, source_of
from posttrain.loops.target import Target


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def target(folder: Path, **sections: Any) -> Target:
    config = toy_config(folder).model_dump(mode="json")
    kept = {name: config[name] for name in ("model", "data", "limits", "env")}
    for name, section in sections.items():
        kept[name] = kept.get(name, {}) | section
    return Target(config=parse_config(EvalRunConfig, kept))


def prompts(folder: Path, count: int) -> str:
    asked = [{"question": f"Where was person {i} born?", "note": i} for i in range(count)]
    return str(write_rows(folder / "asked.jsonl", asked))


def test_every_prompt_is_answered_once_in_order(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    done = generate(target(tmp_path), prompts(tmp_path, 5), out)
    assert (done.written, done.kept, done.invalid) == (5, 0, 0)
    found = lines(out)
    assert [line["extra"]["note"] for line in found] == [0, 1, 2, 3, 4]
    assert [line["prompt"] for line in found] == [
        [{"role": "user", "content": f"Where was person {i} born?"}] for i in range(5)
    ]
    assert all(line["turns"][-1]["by"] == "policy" and line["text"] for line in found)
    assert all(line["policy_tokens"] <= 12 and line["model"] == "tiny_search_base" for line in found)


def test_what_is_not_said_to_be_the_answer_is_none(tmp_path: Path) -> None:
    env = {"name": "single_turn", "options": {"stop_strings": ["</answer>"]}}
    for most, unanswered in ((48, 0), (4, 3)):
        world, out = target(tmp_path, limits={"max_turn_tokens": most}, env=env), tmp_path / f"{most}.jsonl"
        done = generate(world, prompts(tmp_path, 3), out)
        assert done.as_dict()["unanswered"] == unanswered
        for line in lines(out):
            assert (line["answer"] is None) == (most == 4)
            assert line["text"].startswith("<think>")
            assert line["answer"] is None or f"<answer> {line['answer']} </answer>" in line["text"]


def test_a_stopped_generation_goes_on_and_gives_the_same_file(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    file, world = prompts(tmp_path, 4), target(tmp_path, eval={"temperature": 1.0, "samples_per_prompt": 2})
    assert generate(world, file, whole, samples=2).written == 8
    assert len({json.dumps(line["turns"]) for line in lines(whole)}) > 4, "samples of a prompt differ"
    text = whole.read_text()
    stopped.write_text(text[: len(text) * 2 // 5])  # killed within a line
    done = generate(world, file, stopped, samples=2)
    assert done.written + done.kept == 8
    assert done.kept >= 2
    assert sorted(stopped.read_text().splitlines()) == sorted(text.splitlines())


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ('{"id": "a", "sample": 0, "model": "other"}\n', "holds answers of other"),
        ("hello\n", ":1 is no answer"),
        ("a file of mine, whose last line has no end", ":1 is no answer"),
        ('{"id": "1", "question": "Where?"}', ":1 is no answer"),
        ('{"id": "a", "sample": 0, "model": "tiny_search_base"}\nnotes', ":2 is no answer"),
        ("\x00\xff", ":1 is no answer"),
        ('{"id": ["a"], "sample": 0, "model": "tiny_search_base"}\n', ':1 is no answer.*the text "id"'),
        ('{"id": 1, "sample": 0, "model": "tiny_search_base"}\n', ":1 is no answer"),
        ('{"id": "a", "sample": {}, "model": "tiny_search_base"}\n', ":1 is no answer"),
        ('{"id": "a", "sample": 0, "model": ["tiny_search_base"]}\n', ":1 is no answer"),
        ('{"id": {}, "sample": 0, "model": "tiny_search_base"}', ":1 is no answer"),
        ("[" * 100_000 + "\n", ":1 is no answer"),
        ("[" * 100_000, ":1 is no answer"),
    ],
)
def test_files_of_others_are_left_alone(tmp_path: Path, content: str, shown: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=shown):
        generate(target(tmp_path), prompts(tmp_path, 1), out)
    assert out.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("folder", "is a folder"), ("answers.parquet", "is named .parquet"), (os.devnull, "is no regular file")],
)
def test_what_cannot_hold_lines_is_refused_at_once(tmp_path: Path, name: str, shown: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=f"--out is a file of JSON lines.*{shown}"):
        generate(target(tmp_path), prompts(tmp_path, 1), tmp_path / name)


def test_a_place_below_a_file_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    asked = target(tmp_path, model={"path": "no_such_model"})
    out = Path(prompts(tmp_path, 1)) / "answers.jsonl"
    with pytest.raises(ConfigError, match=r"cannot be written: .*asked.jsonl is no folder that may be written to"):
        generate(asked, prompts(tmp_path, 1), out)
    with pytest.raises(ConfigError, match=r"no folder that may be written to; set OUT"):
        export_target(asked, out)
    with pytest.raises(ConfigError, match=r"no folder that may be written to; set --save"):
        check_request("q", None, None, out.with_suffix(".parquet"))


def test_answers_of_any_characters_are_read_again_also_when_cut_within_one(tmp_path: Path) -> None:
    """U+2028 ends a line for Python's splitlines, not in JSON."""
    asked = [{"question": f"Où est\u2028person {i}?\x85", "note": "é"} for i in range(3)]
    file, out = str(write_rows(tmp_path / "asked.jsonl", asked)), tmp_path / "out.jsonl"
    assert generate(target(tmp_path), file, out).written == 3
    whole = out.read_bytes()
    second = whole.index(b"\n") + 1
    out.write_bytes(whole[: whole.index("ù".encode(), second) + 1])
    done = generate(target(tmp_path), file, out)
    assert (done.written, done.kept) == (2, 1)
    assert out.read_bytes() == whole


def test_the_file_is_read_like_the_evaluation_data(tmp_path: Path) -> None:
    template = {"path": "dev.jsonl", "prompt_template": "Q: {question}", "where": {"split": "dev"}, "limit": 3}
    config = target(tmp_path, data={"eval": [template]}).config
    source = source_of("other/new.jsonl", config)
    assert (source.path, source.name, source.prompt_template) == (("other/new.jsonl",), "new", "Q: {question}")
    assert (source.where, source.limit, source.ground_truth_required) == ({}, None, False)
