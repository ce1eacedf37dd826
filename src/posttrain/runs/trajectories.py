"""Trajectories of a step as one parquet file, and back: nothing is lost, and everything can be asked with SQL.

    select task_id, reward from 'runs/NAME/trajectories/*.parquet' where invalid_reason is null order by reward

One row per trajectory. Lists are aligned with `token_ids`; `source` holds the numbers of `Source`; `turns`, `streams`,
`components` and `info` are JSON text. Advantages are the stream "advantages".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.runs.durable import sync_file
from posttrain.task import Abstain, Invalid, Outcome, Score
from posttrain.trajectory import CallStatus, Source, StopReason, ToolCall, Trajectory, Turn

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("episode_id", pa.string()),
        ("text", pa.string()),  # decoded tokens, for reading and searching; null when not given
        ("token_ids", pa.list_(pa.int32())),
        ("source", pa.list_(pa.int8())),
        ("rollout_logprobs", pa.list_(pa.float64())),
        ("policy_versions", pa.list_(pa.int32())),
        ("rewards", pa.list_(pa.float64())),
        ("advantages", pa.list_(pa.float64())),
        ("outcome", pa.string()),  # score, invalid or abstain
        ("reward", pa.float64()),  # the score; null without one
        ("components", pa.string()),
        ("prediction", pa.string()),
        ("turn_rewards", pa.list_(pa.float64())),  # of the reward function; null where it gave none
        ("invalid_reason", pa.string()),
        ("abstain_reason", pa.string()),
        ("detail", pa.string()),
        ("turns", pa.string()),
        ("streams", pa.string()),
        ("info", pa.string()),
    ]
)


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def write_trajectories(
    folder: Path, step: int, trajectories: Sequence[Trajectory], texts: Sequence[str] | None = None
) -> Path:
    """Writes `step-NNNNNN.parquet` in one piece, replacing an earlier one. texts: one per trajectory."""
    return write_file(step_file(folder, step), step, trajectories, texts)


def write_file(path: Path, step: int, trajectories: Sequence[Trajectory], texts: Sequence[str] | None = None) -> Path:
    """The same, to a file of any name."""
    decoded = list(texts) if texts is not None else [None] * len(trajectories)
    rows = [_row(step, one, text) for one, text in zip(trajectories, decoded, strict=True)]
    draft = path.with_name(f".{path.name}.draft")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), draft, compression="zstd")
    sync_file(draft)
    os.replace(draft, path)
    return path


def read_trajectories(path: Path, rows: Sequence[int] | None = None) -> list[Trajectory]:
    """The trajectories of one file, equal to those that were written (but for values in `info` that JSON lacks).

    rows: only these, by their place in the file; None = all.
    """
    table = pq.read_table(path, schema=SCHEMA)
    return [_trajectory(row) for row in (table if rows is None else table.take(list(rows))).to_pylist()]


def read_columns(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns of one file, a dict per row. Raises ValueError for a file that is none of these."""
    try:
        found = pq.read_schema(path)
        if missing := [name for name in SCHEMA.names if name not in found.names]:
            raise ValueError(f"it has no column {', '.join(missing[:3])}")
        return pq.read_table(path, columns=list(columns)).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} holds no trajectories: {str(error).splitlines()[0]}") from error


def _row(step: int, trajectory: Trajectory, text: str | None) -> dict[str, Any]:
    streams = dict(trajectory.streams)
    return {
        "step": step,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "episode_id": trajectory.episode_id,
        "text": text,
        "token_ids": trajectory.token_ids,
        "source": [int(source) for source in trajectory.source],
        "rollout_logprobs": trajectory.rollout_logprobs,
        "policy_versions": trajectory.policy_versions,
        "rewards": trajectory.rewards,
        "advantages": streams.pop("advantages", None),
        **_outcome_columns(trajectory.outcome),
        "turns": _json([_turn_record(turn) for turn in trajectory.turns]),
        "streams": json.dumps(streams),
        "info": _json(trajectory.info),
    }


def _outcome_columns(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Score):
        components = json.dumps(dict(outcome.components))
        return {
            "outcome": "score",
            "reward": outcome.value,
            "components": components,
            "prediction": outcome.prediction,
            "turn_rewards": outcome.turns,
        }
    if isinstance(outcome, Invalid):
        return {"outcome": "invalid", "invalid_reason": outcome.reason, "detail": outcome.detail}
    return {"outcome": "abstain", "abstain_reason": outcome.reason}


def _outcome(row: dict[str, Any]) -> Outcome:
    if row["outcome"] == "score":
        return Score(row["reward"], json.loads(row["components"]), row["prediction"], row["turn_rewards"])
    if row["outcome"] == "invalid":
        return Invalid(row["invalid_reason"], row["detail"])
    return Abstain(row["abstain_reason"])


def _turn_record(turn: Turn) -> dict[str, Any]:
    calls = [
        {"name": c.name, "arguments": c.arguments, "status": c.status, "detail": c.detail, "seconds": c.seconds}
        for c in turn.calls
    ]
    return {
        "who": turn.who.name,
        "start": turn.start,
        "end": turn.end,
        "stop_reason": turn.stop_reason,
        "calls": calls,
        "seconds": turn.seconds,
        "tokens_cut": turn.tokens_cut,
        "bytes_cut": turn.bytes_cut,
    }


def _turn(record: dict[str, Any]) -> Turn:
    stop_reason = record.pop("stop_reason")
    calls = tuple(ToolCall(**call | {"status": CallStatus(call["status"])}) for call in record.pop("calls"))
    return Turn(
        who=Source[record.pop("who")],
        **record,
        stop_reason=StopReason(stop_reason) if stop_reason is not None else None,
        calls=calls,
    )


def _trajectory(row: dict[str, Any]) -> Trajectory:
    streams = json.loads(row["streams"])
    if row["advantages"] is not None:
        streams["advantages"] = row["advantages"]
    return Trajectory(
        task_id=row["task_id"],
        group_id=row["group_id"],
        episode_id=row["episode_id"],
        token_ids=row["token_ids"],
        source=[Source(number) for number in row["source"]],
        rollout_logprobs=row["rollout_logprobs"],
        policy_versions=row["policy_versions"],
        turns=[_turn(record) for record in json.loads(row["turns"])],
        rewards=row["rewards"],
        outcome=_outcome(row),
        streams=streams,
        info=json.loads(row["info"]),
    )


def _json(value: object) -> str:
    """An env may give anything to read later; none of it shall end the run."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, what holds itself
        return json.dumps(_readable(value))


def _readable(value: object, depth: int = 16) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    if depth == 0:
        return f"{value!r:.200}"
    if isinstance(value, Mapping):
        return {str(key): _readable(part, depth - 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(part, depth - 1) for part in value]
    return _readable(_plain(value), depth - 1)


def _plain(value: object) -> object:
    """What JSON lacks, for people to read: arrays as lists, sets as sorted lists, anything else as its repr."""
    to_list = getattr(value, "tolist", None)  # numpy and torch
    if callable(to_list):
        return to_list()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)
