"""Numbers mean what the dictionary says: counted per episode, weighted per token, equal whatever the order."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from posttrain.runs.config_file import ConfigError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import METRICS, MetricError, Metrics, dictionary_markdown, lookup, split_timing
from posttrain.runs.sinks import PACKAGES, Sinks, check_sinks


def test_p124_mean_reward_is_per_episode_not_per_row():
    metrics = Metrics()
    metrics.record("reward/mean", 1.0, id="A")  # one turn, one row
    for _ in range(3):
        metrics.record("reward/mean", 0.0, id="B")  # three turns, three rows
    assert metrics.reduce() == {"reward/mean": 0.5}


def test_an_episode_has_one_value():
    metrics = Metrics()
    metrics.record("reward/mean", 1.0, id="A")
    with pytest.raises(MetricError, match=r"episode A was recorded with 1.0, now with 0.5"):
        metrics.record("reward/mean", 0.5, id="A")


def test_token_means_are_weighted_by_tokens():
    metrics = Metrics()
    metrics.record("train/entropy", 1.0, count=1)
    metrics.record("train/entropy", 2.0, count=3)
    assert metrics.reduce() == {"train/entropy": 1.75}


@pytest.mark.parametrize(
    ("key", "values", "reduced"),
    [
        ("train/loss", [1.0, 2.0, 6.0], 3.0),
        ("rollout/invalid", [1.0, 2.0], 3.0),
        ("gap/max", [0.1, 0.3, 0.2], 0.3),
        ("train/lr", [1e-3, 1e-4], 1e-4),
    ],
)
def test_reducers(key: str, values: list[float], reduced: float):
    metrics = Metrics()
    for value in values:
        metrics.record(key, value)
    assert metrics.reduce() == {key: reduced}


def test_unknown_is_not_zero():
    metrics = Metrics()
    metrics.record("train/loss", None)
    assert metrics.reduce() == {}
    metrics.record("train/entropy", 1.0, count=0)
    assert math.isnan(metrics.reduce()["train/entropy"])


def test_an_undeclared_metric_names_the_nearest():
    with pytest.raises(MetricError, match="no metric is called 'reward/maen'; did you mean 'reward/mean'"):
        Metrics().record("reward/maen", 1.0, id="a")
    with pytest.raises(MetricError, match="METRICS"):
        lookup("zzz")


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("reward/mean", {}, "counts per episode: record it with an id"),
        ("train/loss", {"id": "a"}, "counts per step: record it without an id"),
        ("train/entropy", {}, "counts per token: record it with a count"),
        ("train/loss", {"count": 3}, "counts per step: record it without a count"),
    ],
)
def test_a_value_is_recorded_with_its_unit(key: str, options: dict, message: str):
    with pytest.raises(MetricError, match=message):
        Metrics().record(key, 1.0, **options)


def test_patterns_stand_for_one_word():
    assert lookup("reward/component/em").unit == "episode"
    assert lookup("eval/pass_at_8") is METRICS["eval/pass_at_<k>"]
    for key in ("reward/component/", "reward/component/a/b", "eval/pass_at_"):
        with pytest.raises(MetricError):
            lookup(key)


def test_order_of_recording_changes_no_bit():
    values = [(f"e{n}", random.Random(n).gauss(0, 1e3)) for n in range(50)]
    results = set()
    for seed in range(5):
        random.Random(seed).shuffle(values)
        metrics = Metrics()
        for id, value in values:
            metrics.record("reward/mean", value, id=id)
        metrics.record("train/loss", 1.0)
        results.add(json.dumps(metrics.reduce()))
    assert len(results) == 1


def test_every_row_of_the_dictionary_is_said_in_words_and_shown():
    table = dictionary_markdown()
    for key, metric in METRICS.items():
        assert "/" in key
        assert len(metric.says) > 5
        assert f"| `{key}` | {metric.unit} | {metric.reducer} |" in table


def test_rows_are_split_into_reproducible_and_timed(tmp_path: Path):
    row = {"reward/mean": 0.5, "time/step": 2.0, "train/grad_norm": float("inf")}
    assert split_timing(row)[1] == {"time/step": 2.0}
    with RunDirectory.create(tmp_path / "a", "run: {}", "") as run:
        sinks = Sinks(run, ())
        sinks.write(1, row)
        sinks.close()
        assert run.metrics.rows() == [{"step": 1, "reward/mean": 0.5, "train/grad_norm": None}]
        assert run.timing.rows() == [{"step": 1, "time/step": 2.0}]


def test_console_and_tensorboard_show_the_rows(tmp_path: Path, capsys):
    pytest.importorskip("tensorboard")
    with RunDirectory.create(tmp_path / "a", "run: {}", "") as run:
        sinks = Sinks(run, ("console", "tensorboard"))
        sinks.write(3, {"reward/mean": 0.125, "time/step": 2.0})
        sinks.close()
        assert "reward/mean 0.125" in capsys.readouterr().out
        assert any("tfevents" in path.name for path in (run.path / "tensorboard").iterdir())


def test_a_sink_whose_package_is_absent_says_what_to_install(monkeypatch):
    monkeypatch.setitem(PACKAGES, "a_package_of_nobody", "pip install it")
    check_sinks(("console",))
    with pytest.raises(ConfigError, match=r"run.sinks names a_package_of_nobody, .*: pip install it"):
        check_sinks(("console", "a_package_of_nobody"))


def test_a_sink_of_the_users_own_is_given_the_rows(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, run, first_step):\n"
        "        self.file = open(run.path / f'mine-{first_step}.txt', 'w')\n"
        "    def write(self, step, row):\n"
        "        self.file.write(f'{step} {row}')\n"
        "    def close(self):\n"
        "        self.file.close()\n"
    )
    with RunDirectory.create(tmp_path / "a", "run: {}", "") as run:
        sinks = Sinks(run, (f"{tmp_path / 'mine.py'}:Mine",), first_step=2)
        sinks.write(2, {"reward/mean": 0.5})
        sinks.close()
        assert (run.path / "mine-2.txt").read_text() == "2 {'reward/mean': 0.5}"
