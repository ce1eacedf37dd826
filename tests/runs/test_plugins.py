"""Names in a config become functions, or errors that name what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.runs.algorithm import AlgorithmConfig
from posttrain.runs.config_file import ConfigError
from posttrain.runs.plugins import check_options, options_for, resolve

TABLE = {"grpo": max, "gae": min}


def test_a_row_of_the_table():
    assert resolve(TABLE, "grpo") is max


def test_unknown_name_gives_nearest_and_all():
    with pytest.raises(ConfigError, match=r"unknown advantage 'grop'. Did you mean 'grpo'\? Known: gae, grpo."):
        resolve(TABLE, "grop", "advantage")


def test_module_function():
    import posixpath

    assert resolve(TABLE, "posixpath:join") is posixpath.join


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:fn", "there is no module 'no' on the import path"),
        ("posixpath:jion", r"posixpath has no 'jion'. Did you mean 'join'\?"),
        ("missing.py:fn", r"there is no file 'missing.py'"),
    ],
)
def test_what_cannot_be_found(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(TABLE, name, "loss")


def test_function_in_a_file_is_loaded_once(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\ndef fn(): return A()\n")
    fn = resolve(TABLE, f"{path}:fn")
    assert resolve(TABLE, f"{path}:fn") is fn
    assert fn().x == 1
    with pytest.raises(ConfigError, match=r"Did you mean 'fn'\?"):
        resolve(TABLE, f"{path}:fnn")


def test_errors_inside_user_code_are_told_with_their_place(tmp_path: Path, monkeypatch):
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: .*nothing_like_this.*broken.py:1"):
        resolve(TABLE, f"{tmp_path / 'broken.py'}:fn")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: .*nothing_like_this.*broken.py:1"):
        resolve(TABLE, "broken:fn")


def test_options_go_to_those_who_take_them():
    def loss(a, b, *, clip_low=0.2, clip_high=0.2): ...
    def anything(a, **options): ...

    assert options_for(loss, {"clip_low": 0.1, "gamma": 0.9}) == {"clip_low": 0.1}
    assert options_for(anything, {"gamma": 0.9}) == {"gamma": 0.9}
    assert check_options(loss, {"clip_low": 0.1}, "loss") == {"clip_low": 0.1}
    with pytest.raises(ConfigError, match=r"unknown option of loss 'cliplow'. Did you mean 'clip_low'\?"):
        check_options(loss, {"cliplow": 0.1}, "loss")


MINE = """
def four(rewards, mask, episodes, groups, values): ...
def three(rewards, mask, episodes): ...
def many(*given, **options): ...
def named(*, mask, episode_index): ...
class Made:
    def __init__(self, mask, episode_index): ...
number = 3
"""


@pytest.mark.parametrize(
    ("key", "name", "refused"),
    [
        ("advantage", "four", None),
        ("advantage", "many", None),
        ("aggregate", "Made", None),
        ("aggregate", "three", None),  # its third may be an option
        (
            "advantage",
            "three",
            r"is called with \(rewards, mask, episode_index, group_index\) and options by name; it takes",
        ),
        ("loss", "many", None),
        ("loss", "three", r"is called with \(logprobs, old_logprobs, advantages, mask, segment_ids\)"),
        ("kl_estimator", "Made", r"is called with \(logprobs, ref_logprobs, mask\)"),
        ("correction", "named", r"is called with \(old_logprobs, rollout_logprobs, mask, episode_index\)"),
        ("loss", "number", "is no function but a int"),
    ],
)
def test_functions_of_an_algorithm_take_what_they_are_given(tmp_path: Path, key: str, name: str, refused: str | None):
    (tmp_path / "mine.py").write_text(MINE)
    given = {key: f"{tmp_path / 'mine.py'}:{name}"}
    if refused is None:
        assert AlgorithmConfig.model_validate(given).functions[key].__name__ == name
    else:
        with pytest.raises(ValueError, match=refused):
            AlgorithmConfig.model_validate(given)
