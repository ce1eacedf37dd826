"""`posttrain generate`: a model in its world answers a file of prompts, one JSON line per episode.

Lines are added a chunk of tasks at a time, in the order of the file; what stands there already is not asked again, so a
generation that was stopped goes on where it ended. Nothing is judged.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.config import ConfigError, EvalRunConfig
from posttrain.data import load_tasks
from posttrain.data.config import DataConfig, SourceConfig
from posttrain.episodes import episode_of
from posttrain.loops.build import (
    Stage,
    check_playable,
    check_search,
    env_to_look_at,
    eval_params,
    load_renderer,
    make_spec,
    make_stage,
    prompt_limit,
    schemas_of,
)
from posttrain.loops.chat import answer_of
from posttrain.loops.samplers import close_sampler, ready_sampler
from posttrain.loops.target import Target, check_place
from posttrain.rollout import RolloutSpec, rollout_group
from posttrain.runs.rng import seed_everything
from posttrain.task import Invalid, Task
from posttrain.trajectory import Source, Trajectory

TASKS_AT_ONCE = 128
KEY = ("id", "sample", "model")  # of an answer: whose, which one, by whom
BEGINNING = b'{"id": "'  # of an answer
OTHER_FILES = (".parquet", ".json", ".csv", ".gz")  # whoever reads these would not find lines of JSON
GENERATION_STEP = 0  # part of the seeds, as in an evaluation

Watch = Callable[[int, int], None]  # told (tasks done, tasks in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was done; `kept` episodes stood in the file before. unanswered: of the written ones, those that gave no
    answer in a form that says so; their last turn is in `text`."""

    out: Path
    written: int = 0
    kept: int = 0
    invalid: int = 0
    unanswered: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


def generate(target: Target, file: str, out: Path, *, samples: int = 1, watch: Watch | None = None) -> Generated:
    """Answers the rows of `file` (as the config's data would read them) and adds them to `out`.

    Raises ConfigError for an `out` that holds answers of another model, or something else than answers.
    """
    config = target.config
    done = _read(out, config.model.named)
    renderer = load_renderer(config)
    source = source_of(file, config)
    limit, key = prompt_limit(config)
    envs = cache(lambda name: env_to_look_at(name, config))
    tools = cache(lambda name: schemas_of(name, envs(name), renderer))
    tools(source.env or config.env.name)
    tasks = load_tasks(
        DataConfig(eval=(source,), max_prompt_tokens=limit, overlong=config.data.overlong),
        "eval",
        measure=lambda task: len(renderer.prompt(task.prompt, tools(task.env or config.env.name))),
        check_task=lambda task: check_playable(task, task.env or config.env.name, envs),
        limit_key=key,
    )
    stage = make_stage(config, renderer, [*tasks])
    try:
        check_search(stage)
        seed_everything(config.run.seed)
        sampler = ready_sampler(config, stage.tokenizer, target.load_policy)
        try:
            spec = make_spec(config, stage, sampler, eval_params(config))
            writer = _Writer(out, config, samples, done)
            return asyncio.run(_answer([*tasks], spec, writer, stage, watch))
        finally:
            close_sampler(sampler)
    finally:
        stage.close()


def source_of(file: str, config: EvalRunConfig) -> SourceConfig:
    """`file` read like the config's first evaluation source (else training source), all rows, no answers needed."""
    first = next(iter((*config.data.eval, *config.data.train)), None)
    own = {"path": (file,), "name": Path(file).name.split(".")[0], "where": {}, "limit": None, "weight": None}
    if first is None:
        return SourceConfig(path=(file,), ground_truth_required=False)
    return first.model_copy(update={**own, "options": {}, "ground_truth_required": False})


async def _answer(
    tasks: Sequence[Task], spec: RolloutSpec, writer: _Writer, stage: Stage, watch: Watch | None
) -> Generated:
    try:
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            chunk = [task for task in tasks[start : start + TASKS_AT_ONCE] if writer.lacks(task)]
            groups = await asyncio.gather(
                *(
                    rollout_group(
                        task,
                        spec,
                        group_id=task.id,
                        group_size=writer.samples,
                        run_seed=writer.config.run.seed,
                        step=GENERATION_STEP,
                    )
                    for task in chunk
                )
            )
            writer.add([line for task, found in zip(chunk, groups, strict=True) for line in _lines(task, found, spec)])
            if watch is not None:
                watch(min(start + TASKS_AT_ONCE, len(tasks)), len(tasks))
    finally:
        await stage.release()
    return writer.report()


def _lines(task: Task, trajectories: Sequence[Trajectory], spec: RolloutSpec) -> Iterator[dict[str, Any]]:
    """One per episode, by the number of the sample."""
    by_episode: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_episode.setdefault(trajectory.episode_id, []).append(trajectory)
    for number, parts in enumerate(by_episode.values()):
        episode, outcome = episode_of(parts, spec.renderer), parts[-1].outcome
        said = [s for s in episode.segments if s.source not in (Source.PROMPT, Source.TEMPLATE)]
        yield {
            "id": task.id,
            "sample": number,
            "prompt": list(task.prompt),
            "answer": answer_of(episode, untagged=False),
            "text": episode.final_text.strip(),
            "turns": [{"by": segment.source.name.lower(), "text": segment.text} for segment in said],
            "calls": [
                {"name": call.name, "arguments": call.arguments, "status": call.status.value} for call in episode.calls
            ],
            "stop_reason": None if episode.stop_reason is None else episode.stop_reason.value,
            "policy_tokens": episode.policy_token_count,
            "invalid": f"{outcome.reason}: {outcome.detail}" if isinstance(outcome, Invalid) else None,
            "extra": dict(task.extra),
        }


class _Writer:
    """Adds lines to a file that may hold some already."""

    def __init__(self, out: Path, config: EvalRunConfig, samples: int, done: set[tuple[str, int]]) -> None:
        self.config = config
        self.samples = samples
        self._out = out
        self._done = done
        self._kept = 0
        self._written = self._invalid = self._unanswered = 0

    def lacks(self, task: Task) -> bool:
        """Whether some sample of the task is still to be made; then all are made, and only the missing ones added."""
        have = sum((task.id, number) in self._done for number in range(self.samples))
        self._kept += have
        return have < self.samples

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        with self._out.open("a", encoding="utf-8") as file:
            for line in lines:
                if (line["id"], line["sample"]) not in self._done:
                    file.write(
                        json.dumps({**line, "model": self.config.model.named}, ensure_ascii=False, default=str) + "\n"
                    )
                    self._written += 1
                    self._invalid += line["invalid"] is not None
                    self._unanswered += line["invalid"] is None and line["answer"] is None

    def report(self) -> Generated:
        return Generated(
            out=self._out,
            written=self._written,
            kept=self._kept,
            invalid=self._invalid,
            unanswered=self._unanswered,
        )


def _read(out: Path, model: str) -> set[tuple[str, int]]:
    """(id, sample) of the answers in `out`; a last line that was cut off by a kill is taken away.

    Bytes: what was cut may end within a character, and a text may hold what Python takes for the end of a line.
    Raises ConfigError, and leaves the file as it is, when anything else is in it.
    """
    strange = out.exists() and not out.is_file()  # a pipe or a device, which may never end
    if strange or out.suffix in OTHER_FILES:
        seen = "a folder" if out.is_dir() else "no regular file" if strange else f"named {out.suffix}"
        raise ConfigError([f"--out is a file of JSON lines, such as answers.jsonl, and {out} is {seen}"])
    check_place(out.parent)
    if not out.exists():
        return set()
    whole, newline, torn = out.read_bytes().rpartition(b"\n")
    done: set[tuple[str, int]] = set()
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        key = _key_of(line)
        if key is None:
            raise _no_answer(out, number)
        task, sample, by = key
        if by != model:
            raise ConfigError([f"{out} holds answers of {by}, and now {model} is asked; choose another --out"])
        done.add((task, sample))
    if torn:
        if not _is_cut(torn):
            raise _no_answer(out, len(whole.split(b"\n")) + 1 if newline else 1)
        os.truncate(out, len(whole) + len(newline))
    return done


def _key_of(line: bytes) -> tuple[str, int, str] | None:
    """Task, sample and model of an answer; None where one of them is missing, or is not what `_Writer` writes."""
    try:
        answer = read_json(line)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    task, sample, model = (answer.get(name) for name in KEY)
    if not (isinstance(task, str) and type(sample) is int and isinstance(model, str)):  # True is no number
        return None
    return task, sample, model


def _is_cut(line: bytes) -> bool:
    """Whether it may be the beginning of an answer, or an answer without the end of its line."""
    try:
        read_json(line)
    except ValueError:
        return line.startswith(BEGINNING) or BEGINNING.startswith(line)
    return _key_of(line) is not None


def _no_answer(out: Path, number: int) -> ConfigError:
    wanted = 'a JSON object with the text "id", the whole number "sample" and the text "model"'
    return ConfigError([f"{out}:{number} is no answer of posttrain generate ({wanted}); choose another --out"])
