"""`posttrain show`: saved trajectories, found by what became of them, each token in the colour of who wrote it."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.text import Text

from posttrain.chat import Renderer
from posttrain.config import ConfigError
from posttrain.location import did_you_mean
from posttrain.loops.build import load_tokenizer
from posttrain.loops.show import STYLES, VISIBLE, colored, pieces
from posttrain.loops.watch import call_line
from posttrain.runs.checkpoint import checkpoints_in
from posttrain.runs.trajectories import read_columns, read_trajectories
from posttrain.task import Invalid, Score
from posttrain.trainer.loading import ModelError
from posttrain.trajectory import Source, Trajectory

Order = Literal["file", "best", "worst"]
LIGHT = ("step", "task_id", "group_id", "episode_id", "outcome", "reward", "invalid_reason", "text", "info")
TESTS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq
}  # fmt: skip
_BOUND = re.compile(r"(<=|>=|<|>|=)\s*(-?\d+(?:\.\d+)?)")
_KNOWN = 5  # names that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which trajectories; all that is said must hold. task, env, source: the whole name, or its end behind a `/`.

    reward: bounds such as ">=0.5" or ">0,<1". outcome: score, invalid or abstain, or the reason of an invalid one.
    """

    step: int | None = None
    task: str | None = None
    env: str | None = None
    source: str | None = None
    reward: str | None = None
    outcome: str | None = None
    order: Order = "file"
    most: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One trajectory and where it was found. `segments`: (who, text); one of "all" without a tokenizer."""

    step: int
    trajectory: Trajectory
    segments: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        t, outcome = self.trajectory, self.trajectory.outcome
        turns = [turn for turn in t.turns if turn.who is Source.POLICY]
        return {
            "step": self.step,
            "task_id": t.task_id,
            "group_id": t.group_id,
            "episode_id": t.episode_id,
            "source": t.info.get("source"),
            "env": t.info.get("env"),
            "outcome": type(outcome).__name__.lower(),
            "reward": outcome.value if isinstance(outcome, Score) else None,
            "components": dict(outcome.components) if isinstance(outcome, Score) else {},
            "reason": None if isinstance(outcome, Score) else outcome.reason,
            "detail": outcome.detail if isinstance(outcome, Invalid) else "",
            "tokens": len(t),
            "policy_tokens": t.policy_token_count,
            "turns": sum(turn.end > turn.start for turn in turns),
            "stop_reason": turns[-1].stop_reason.value if turns and turns[-1].stop_reason else None,
            "tokens_cut": sum(turn.tokens_cut for turn in t.turns),
            "advantage": _mean_advantage(t),
            "calls": [{"name": c.name, "arguments": c.arguments, "status": c.status.value} for c in _calls(t)],
            "segments": [{"source": who, "text": text} for who, text in self.segments],
        }

    @property
    def head(self) -> str:
        said = self.as_dict()
        worth = f"reward {said['reward']:g}" if said["reward"] is not None else f"{said['outcome']}: {said['reason']}"
        parts = "".join(f", {name} {value:g}" for name, value in said["components"].items() if value)
        advantage = "" if said["advantage"] is None else f", advantage {said['advantage']:+.3g}"
        earned = sum(self.trajectory.rewards or ())
        if said["reward"] is None and earned:
            worth += f", its turns earned {earned:g}"
        where = f"step {self.step}  {self.trajectory.episode_id}  task {self.trajectory.task_id}"
        size = f"{said['turns']} turns, {said['policy_tokens']} of {said['tokens']} tokens by the policy"
        return f"{where}\n{worth}{parts}{advantage}; {size}, ended by {said['stop_reason']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Those to be shown, of `matched` that are as wanted, of `total`. note: why there are no colours."""

    shown: tuple[Shown, ...]
    matched: int
    total: int
    files: int
    renderer: Renderer | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        found = [one.as_dict() for one in self.shown]
        return {"matched": self.matched, "total": self.total, "files": self.files, "trajectories": found}

    @property
    def summary(self) -> str:
        return f"{self.matched} of {self.total} trajectories in {self.files} files match, {len(self.shown)} shown"

    def render(self, *, by_token: bool = False) -> Iterator[Text]:
        """Piece by piece, each with its own end of line."""
        yield Text(self.summary + "\n")
        if self.note:
            yield Text(f"{self.note}\n", "yellow")
        else:
            yield Text.assemble("colours: ", *_joined([(s.name.lower(), style) for s, style in STYLES.items()]), "\n")
        for one in self.shown:
            yield Text(f"\n=== {one.head}\n".translate(VISIBLE), "bold")
            yield from self._body(one, by_token)

    def _body(self, one: Shown, by_token: bool) -> Iterator[Text]:
        if by_token:
            yield from _by_token(one.trajectory, self.renderer)
            return
        if self.renderer is None:
            yield Text(one.segments[0][1].translate(VISIBLE) if one.segments else "(no text was saved)")
        else:
            yield colored(one.trajectory, self.renderer)
        for call in _calls(one.trajectory):
            yield call_line(call)
        if one.as_dict()["detail"]:
            yield Text(f"\n{one.as_dict()['detail']}".translate(VISIBLE), "red")
        yield Text("\n")


def find(place: Path, wanted: Wanted, *, model: str | None = None) -> Found:
    """place: a run directory, a folder of parquet files, or one file. model: whose tokenizer reads the ids; default the
    run's own.

    Raises ConfigError for a place without trajectories and for names that nothing there has.
    """
    files = _files(place)
    test = _test(wanted.reward)
    rows = [(file, number, row) for file in files for number, row in enumerate(_light(file))]
    matching = [entry for entry in rows if _fits(entry[2], wanted, test)]
    if not matching:
        _explain(wanted, [row for _, _, row in rows])
    if wanted.order != "file":
        scored = [entry for entry in matching if entry[2]["reward"] is not None]
        matching = sorted(scored, key=lambda entry: entry[2]["reward"], reverse=wanted.order == "best")
    renderer, note = _renderer(place, model)
    shown: list[Shown] = []
    for file, number, row in matching[: wanted.most]:
        (trajectory,) = read_trajectories(file, [number])
        shown.append(Shown(step=row["step"], trajectory=trajectory, segments=_segments(trajectory, row, renderer)))
    return Found(
        shown=tuple(shown), matched=len(matching), total=len(rows), files=len(files), renderer=renderer, note=note
    )


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    folder = place / "trajectories" if (place / "trajectories").is_dir() else place
    found = sorted(folder.glob("*.parquet"))
    if not found:
        what = "holds no parquet files" if folder.is_dir() else "does not exist"
        raise ConfigError([f"{folder} {what}; give a run directory, a folder of trajectories, or a parquet file"])
    return found


def _light(file: Path) -> list[dict[str, Any]]:
    try:
        rows = read_columns(file, LIGHT)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    for row in rows:
        info = json.loads(row["info"])
        row |= {"env": info.get("env"), "source": info.get("source")}
    return rows


def _test(bounds: str | None) -> Callable[[float | None], bool]:
    """A test for rewards within `bounds`; without bounds all pass. Raises ConfigError for bounds that are none."""
    if bounds is None:
        return lambda reward: True
    made: list[tuple[Callable[[float, float], bool], float]] = []
    for bound in bounds.split(","):
        found = _BOUND.fullmatch(bound.strip())
        if not found:
            raise ConfigError([f"--reward {bounds}: write bounds such as '>=0.5', '=1' or '>0,<1'"])
        made.append((TESTS[found[1]], float(found[2])))
    return lambda reward: reward is not None and all(holds(reward, bound) for holds, bound in made)


def _fits(row: dict[str, Any], wanted: Wanted, test: Callable[[float | None], bool]) -> bool:
    named = (("task_id", wanted.task), ("env", wanted.env), ("source", wanted.source))
    return (
        wanted.step in (None, row["step"])
        and all(name is None or _is_called(row[key], name) for key, name in named)
        and test(row["reward"])
        and wanted.outcome in (None, row["outcome"], row["invalid_reason"])
    )


def _is_called(full: str | None, name: str) -> bool:
    return full is not None and (full == name or full.endswith(f"/{name}"))


def _explain(wanted: Wanted, rows: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError when a name that was given is no row's; that nothing is as wanted is no error otherwise."""
    reasons = {row["invalid_reason"] for row in rows} | {row["outcome"] for row in rows}
    named = (
        ("task", wanted.task, {row["task_id"] for row in rows}),
        ("env", wanted.env, {row["env"] for row in rows}),
        ("source", wanted.source, {row["source"] for row in rows}),
        ("outcome", wanted.outcome, reasons),
        ("step", wanted.step, {row["step"] for row in rows}),
    )
    for what, name, there in named:
        known = sorted(str(one) for one in there if one is not None)
        if name is not None and not any(_is_called(one, str(name)) for one in known):
            has = ", ".join(known[:_KNOWN]) or "none: its rows do not say"
            near = did_you_mean(str(name), known)
            raise ConfigError([f"no trajectory has the {what} {name!r}.{near} There are {len(known)}: {has}"])


def _renderer(place: Path, model: str | None) -> tuple[Renderer | None, str]:
    """The tokenizer that reads the ids: the given one, the run's, or that of its last checkpoint."""
    asked = [model] if model is not None else _models_of(place)
    for path in asked:
        try:
            return Renderer(load_tokenizer(path)), ""
        except ModelError as error:
            if model is not None:
                raise ConfigError([f"--model {model}: {error}"]) from error
    looked = f"none of {', '.join(asked)} has one" if asked else "no config.yaml of a run is beside the file"
    return None, f"without colours: the tokenizer is not known ({looked}); say --model MODEL"


def _models_of(place: Path) -> list[str]:
    folders = [place, *place.resolve().parents[:4]]
    run = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    if run is None:
        return []
    checkpoints = checkpoints_in(run / "checkpoints") if (run / "checkpoints").is_dir() else []
    return [*_model_in(run / "config.yaml"), *(str(checkpoint.path) for checkpoint in checkpoints[-1:])]


def _model_in(config: Path) -> list[str]:
    """Its model.path. None where it has none, or can no longer be read: what was saved can still be shown."""
    try:
        said = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError):  # ValueError: no text, or a date that there is not
        return []
    model = said.get("model") if isinstance(said, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    return [path] if isinstance(path, str) else []


def _segments(trajectory: Trajectory, row: dict[str, Any], renderer: Renderer | None) -> tuple[tuple[str, str], ...]:
    if renderer is None:
        return () if row["text"] is None else (("all", row["text"]),)
    return tuple((source.name.lower(), text) for source, text in pieces(trajectory, renderer))


def _by_token(trajectory: Trajectory, renderer: Renderer | None) -> Iterator[Text]:
    """A line per token: place, who, id, log-prob, reward, advantage, text."""
    yield Text(f"{'':>6} {'by':<9}{'id':>8}{'logprob':>10}{'reward':>8}{'advantage':>10}  text\n", "bold")
    advantages = trajectory.streams.get("advantages")
    for i, (token, source) in enumerate(zip(trajectory.token_ids, trajectory.source, strict=True)):
        reward = (trajectory.rewards or [])[i : i + 1]
        advantage = advantages[i] if advantages and source is Source.POLICY else None
        numbers = (_number(trajectory.rollout_logprobs[i], 10), _number(reward[0] if reward else None, 8))
        text = "" if renderer is None else repr(renderer.decode([token]))
        line = f"{i:>6} {source.name.lower():<9}{token:>8}{numbers[0]}{numbers[1]}{_number(advantage, 10)}  {text}\n"
        yield Text(line, STYLES[source])


def _number(value: float | None, width: int) -> str:
    return f"{'' if value is None else format(value, '.4g'):>{width}}"


def _calls(trajectory: Trajectory) -> list[Any]:
    return [call for turn in trajectory.turns for call in turn.calls]


def _mean_advantage(trajectory: Trajectory) -> float | None:
    advantages = trajectory.streams.get("advantages")
    by_policy = [a for a, s in zip(advantages or (), trajectory.source, strict=False) if s is Source.POLICY]
    return sum(by_policy) / len(by_policy) if by_policy else None


def _joined(parts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str] | str]:
    for number, part in enumerate(parts):
        yield from ((", ", part) if number else (part,))
