"""What a step rolled out can be read back as it was, and asked with SQL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.runs.trajectories import read_trajectories, step_file, write_trajectories
from posttrain.task import Abstain, Invalid, Outcome, Score
from posttrain.trajectory import CallStatus, Source, StopReason, ToolCall, Trajectory, Turn

CALL = ToolCall(name="search", arguments={"query": "Où ?", "k": 3}, status=CallStatus.OK, seconds=0.25)


def trajectory(episode: str = "e1", outcome: Outcome | None = None, reward: float = 0.0) -> Trajectory:
    one = Trajectory(task_id="t1", group_id="g1", episode_id=episode, outcome=outcome or Score(reward, {"em": reward}))
    one.add_context([1, 2, 3], Source.PROMPT)
    one.add_sampled([4, 5], [-0.1, -1e-17], version=7)
    one.add_context([6], Source.ENV)
    one.add_sampled([7], [-2.5], version=[8])
    one.turns = [
        Turn(who=Source.POLICY, start=3, end=5, stop_reason=StopReason.STOP_STRING, calls=(CALL,), seconds=1.5),
        Turn(who=Source.ENV, start=5, end=6, tokens_cut=9, bytes_cut=40),
        Turn(who=Source.POLICY, start=6, end=7, stop_reason=StopReason.LENGTH),
    ]
    one.rewards = [0.0] * 6 + [reward]
    one.streams = {"advantages": [0.1] * 7, "ref_logprobs": [-0.3] * 7, "experts": [[1, 2]] * 7}
    one.info = {"question": "Où ?", "n": 3, "nested": {"a": [None, True]}}
    return one


def test_trajectories_come_back_equal(tmp_path: Path):
    unscored = Trajectory(task_id="t2", group_id="g2", episode_id="e9", outcome=Abstain("no opinion"))
    written = [
        trajectory(reward=1.0),
        trajectory("e2", Invalid("timeout", "after 60 s")),
        trajectory("e3", Score(0.5, {}, "Paris", (0.25, None))),
        unscored,
    ]
    path = write_trajectories(tmp_path, 3, written)
    assert path == step_file(tmp_path, 3) == tmp_path / "step-000003.parquet"
    assert read_trajectories(path) == written
    assert [file.name for file in tmp_path.iterdir()] == ["step-000003.parquet"]


LOGPROBS = st.lists(st.floats(max_value=0.0, allow_nan=False, allow_infinity=False), max_size=20)
TEXT = st.text(max_size=15).filter(lambda text: max(text, default="a") < "\ud800" or max(text, default="a") > "\udfff")


@given(logprobs=LOGPROBS, reward=st.floats(min_value=-1e30, max_value=1e30), detail=TEXT)
@settings(max_examples=40, deadline=None)
def test_any_numbers_and_text_come_back_bit_by_bit(tmp_path_factory, logprobs, reward, detail):
    one = Trajectory(task_id=detail, group_id="g", episode_id="e", outcome=Score(reward, {detail: reward}, detail))
    one.add_sampled(list(range(len(logprobs))), logprobs, version=0)
    one.rewards = [reward] * len(logprobs)
    one.info = {"detail": detail}
    assert read_trajectories(write_trajectories(tmp_path_factory.mktemp("t"), 1, [one])) == [one]


def test_rewriting_a_step_replaces_it(tmp_path: Path):
    write_trajectories(tmp_path, 1, [trajectory("a")])
    write_trajectories(tmp_path, 1, [trajectory("b")])
    assert [one.episode_id for one in read_trajectories(step_file(tmp_path, 1))] == ["b"]


def test_an_empty_step_can_be_written(tmp_path: Path):
    assert read_trajectories(write_trajectories(tmp_path, 1, [])) == []


def test_info_that_json_lacks_is_kept_readable(tmp_path: Path):
    one = trajectory()
    one.info = {"array": np.arange(3), "set": {"b", "a"}, "object": Path("x"), "scalar": np.float32(0.5)}
    (read,) = read_trajectories(write_trajectories(tmp_path, 1, [one]))
    assert read.info == {"array": [0, 1, 2], "set": ["a", "b"], "object": "PosixPath('x')", "scalar": 0.5}


def test_what_no_json_can_hold_is_written_all_the_same(tmp_path: Path):
    one = trajectory()
    one.info = {"steps": [{(1, 2): "tuple", np.int64(3): "number"}]}
    one.info["itself"] = one.info
    (read,) = read_trajectories(write_trajectories(tmp_path, 1, [one]))
    assert read.info["steps"] == [{"(1, 2)": "tuple", "3": "number"}]


def test_texts_must_match(tmp_path: Path):
    with pytest.raises(ValueError, match="zip"):
        write_trajectories(tmp_path, 1, [trajectory()], texts=[])


def test_one_query_away(tmp_path: Path):
    duckdb = pytest.importorskip("duckdb")
    write_trajectories(
        tmp_path, 1, [trajectory("a", reward=0.0), trajectory("b", Invalid("timeout"))], ["no", "<search>"]
    )
    write_trajectories(tmp_path, 2, [trajectory("c", reward=1.0)], ["<search> Où ? </search>"])
    rows = duckdb.sql(
        f"select step, episode_id, reward, len(list_filter(source, lambda s: s = 1)) as policy_tokens, "
        f"turns->'$[0].calls[0].arguments.query' as query from '{tmp_path}/*.parquet' "
        "where invalid_reason is null and text like '%<search>%' order by reward desc"
    ).fetchall()
    assert rows == [(2, "c", 1.0, 3, '"Où ?"')]
    counts = duckdb.sql(f"select outcome, count(*) from '{tmp_path}/*.parquet' group by 1 order by 1").fetchall()
    assert counts == [("invalid", 1), ("score", 2)]
