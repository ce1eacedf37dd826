"""Files and overrides become a frozen config, or an error that says where and what."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from posttrain.runs.config_file import ConfigError, Section, config_yaml, key_error, load_config, parse_config


class Part(Section):
    weight: float = 1.0
    path: str = "p"


class Inner(Section):
    steps: int = Field(default=3, ge=1)
    lr: float = 1e-6
    name: str = "x"
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = False
    folder: Path | None = None


class Outer(Section):
    train: Inner = Inner()
    parts: tuple[Part, ...] = ()
    options: dict[str, Any] = Field(default={})
    optional: Inner | None = None

    @model_validator(mode="after")
    def _compare(self) -> Outer:
        if self.train.steps == 13:
            raise key_error("train.steps", "13 steps bring bad luck; use 12")
        return self


@pytest.fixture
def load(tmp_path: Path):
    def run(text: str, *overrides: str) -> Outer:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(Outer, path, overrides)

    return run


def refused(load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_p126_misspelt_key_names_the_nearest_key_and_its_line(load):
    message = refused(load, "train:\n  lr: 0.1\n  stepps: 5\n")
    assert "run.yaml:3: unknown key 'train.stepps'. Did you mean 'train.steps'?" in message


def test_p126_misspelt_section_and_abbreviation(load):
    assert "run.yaml:2: unknown key 'trian'. Did you mean 'train'?" in refused(load, "\ntrian: {lr: 1}\n")
    assert "Did you mean 'options'?" in refused(load, "opt: {}\n")


def test_p126_key_in_the_wrong_section_is_found_where_it_belongs(load):
    assert "run.yaml:1: unknown key 'lr'. Did you mean 'train.lr'?" in refused(load, "lr: 3\n")


def test_p126_key_like_no_other_lists_what_there_is(load):
    assert "Known here: flag, folder, lr, mode, name, steps." in refused(load, "train: {qqqq: 1}\n")


def test_misspelt_keys_in_lists_and_optional_sections(load):
    assert "run.yaml:3: unknown key 'parts[1].wieght'. Did you mean 'parts[1].weight'?" in refused(
        load, "parts:\n- weight: 1\n- wieght: 2\n"
    )
    assert "'optional.steps'" in refused(load, "optional: {stepz: 1}\n")


def test_misspelt_override_is_reported_as_such(load):
    message = refused(load, "train: {lr: 1}\n", "train.stepps=4")
    assert message == "override 'train.stepps=4': unknown key 'train.stepps'. Did you mean 'train.steps'?"
    assert "override 'opt.x=1': unknown key 'opt'" in refused(load, "train: {}\n", "opt.x=1")


def test_every_problem_is_reported_at_once(load):
    message = refused(load, "train:\n  steps: many\n  mode: quick\nparts: 3\n", "train.lr=high")
    assert "run.yaml:2: train.steps: Input should be a valid integer" in message
    assert '(got "many")' in message
    assert "run.yaml:3: train.mode: Input should be 'fast' or 'slow'" in message
    assert "run.yaml:4: parts: Input should be a list, as in [a, b]" in message
    assert "override 'train.lr=high': train.lr: Input should be a valid number" in message
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("text", ["train: {steps: 0}", "train: {steps: 2.5}", "train: {steps: null}", "train: 3"])
def test_wrong_values_have_a_line(load, text: str):
    assert "run.yaml:1: train" in refused(load, text)


@pytest.mark.parametrize("given", [".inf", "1e400", "-.inf", ".nan", "nan"])
def test_numbers_are_finite(load, given: str):
    assert "run.yaml:1: train.lr: Input should be a finite number" in refused(load, f"train: {{lr: {given}}}")


def test_not_a_number_is_refused_wherever_it_stands(load):
    assert "run.yaml:1: options.a[0]: a number is needed, not NaN" in refused(load, "options: {a: [.nan]}")


def test_a_bool_is_no_number_but_stays_a_bool_elsewhere(load):
    assert "run.yaml:1: train.steps: a number is needed, not a bool" in refused(load, "train: {steps: true}")
    assert load("train: {flag: true}\noptions: {a: true}").options == {"a": True}


def test_a_number_where_text_is_needed_says_to_quote_it(load):
    assert "quote it to make it text: '7'" in refused(load, "train: {name: 7}")
    assert load("train: {name: '7'}").train.name == "7"


def test_missing_required_key_and_section():
    class Needs(Section):
        inner: Part
        name: str

    class Root(Section):
        needs: Needs

    with pytest.raises(ConfigError, match=r"config: section 'needs' is missing"):
        parse_config(Root, {})
    with pytest.raises(ConfigError, match=r"'needs.name' is missing; add it under 'needs'"):
        parse_config(Root, {"needs": {"inner": {}}})


def test_comparisons_between_keys_are_reported_at_the_key(load):
    assert "run.yaml:2: train.steps: 13 steps bring bad luck" in refused(load, "train:\n  steps: 13\n")
    assert refused(load, "train: {steps: 4}", "train.steps=13").startswith("override 'train.steps=13': train.steps: 13")


def test_missing_file_names_a_near_one(tmp_path: Path):
    (tmp_path / "tiny_search.yaml").write_text("train: {}")
    with pytest.raises(ConfigError, match=r"no such config file. Did you mean .*tiny_search.yaml"):
        load_config(Outer, tmp_path / "tiny_serach.yaml")
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(Outer, tmp_path / "nowhere" / "a.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(Outer, tmp_path)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_empty_file(load, text: str):
    assert "empty" in refused(load, text) or "holds a null" in refused(load, text)


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "seq"), ("just words\n", "str")])
def test_file_that_is_no_mapping(load, text: str, kind: str):
    assert f"a config is a mapping of sections, but the file holds a {kind}" in refused(load, text)


def test_broken_yaml_has_a_line(load):
    assert "run.yaml:3: not valid YAML" in refused(load, "train:\n  lr: 1\n lr: [\n")
    assert "not valid YAML" in refused(load, "a: \x07\n")


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "[" * 3000, "{a: " * 500 + "1" + "}" * 500])
def test_what_is_nested_too_deeply_is_refused(load, text: str):
    assert "run.yaml" in refused(load, f"options: {text}")
    said = refused(load, "train: {}\n", f"options.deep={text}")
    assert "nested too deeply" in said or "cannot be applied" in said


def test_not_utf8(tmp_path: Path):
    (tmp_path / "a.yaml").write_bytes(b"train: {name: \xff}\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(Outer, tmp_path / "a.yaml")


def test_duplicate_keys_are_refused_with_both_lines(load):
    message = refused(load, "train:\n  lr: 1\n  steps: 2\n  lr: 3\n")
    assert "run.yaml:4: train.lr is written twice (first on line 2); keep one" in message
    assert "run.yaml:2: train is written twice" in refused(load, "train: {lr: 1}\ntrain: {lr: 2}\n")


def test_overrides_replace_values_and_extend_sections(load):
    config = load(
        "train: {steps: 5, lr: 0.1}\nparts: [{weight: 2}]\n",
        "train.steps=7",
        "train={lr: 1e-4}",
        "parts[0].weight=3",
        "optional.name=new",
        "options.deep.list=[1, two]",
    )
    assert (config.train.steps, config.train.lr) == (7, 1e-4)
    assert config.parts == (Part(weight=3),)
    assert config.optional == Inner(name="new")
    assert config.options == {"deep": {"list": [1, "two"]}}


def test_lists_in_overrides_replace(load):
    assert load("parts: [{weight: 2}, {weight: 3}]\n", "parts=[{path: q}]").parts == (Part(path="q"),)


def test_a_value_of_another_shape_replaces_what_stood_there(load):
    text = "options: {a: [{b: 1}], c: {d: 2}, e: 3}"
    config = load(text, "options.a={b: 2}", "options.c=[1, 2]", "options.e={f: 4}")
    assert config.options == {"a": {"b": 2}, "c": [1, 2], "e": {"f": 4}}
    assert load(text, "options.c=null", "options.a=x").options == {"a": "x", "c": None, "e": 3}
    assert "parts: " in refused(load, "parts: [{path: a}]", "parts={path: b}")
    assert load("optional: null", "optional={steps: 4}").optional == Inner(steps=4)


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps=", " =1"])
def test_malformed_override(load, override: str):
    assert "write key=value, like run.steps=100" in refused(load, "train: {}\n", override)


def test_override_through_a_number_or_past_a_list(load):
    assert "override 'train.steps.x=1'" in refused(load, "train: {steps: 5}\n", "train.steps.x=1")
    assert "override 'parts[4].weight=1'" in refused(load, "parts: [{}]\n", "parts[4].weight=1")


def test_keys_that_yaml_takes_for_something_else(load):
    assert "run.yaml:1: YAML reads the key on as bool; write it in quotes" in refused(load, "options: {on: 1}\n")
    assert load("options: {'on': 1}\n").options == {"on": 1}


def test_null_override(load):
    assert load("optional: {lr: 1}\n", "optional=null").optional is None


def test_interpolations_are_resolved(load, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_TEST_NAME", "from-env")
    config = load("train:\n  name: ${oc.env:POSTTRAIN_TEST_NAME}\n  steps: 4\noptions:\n  n: ${train.steps}\n")
    assert config.train.name == "from-env"
    assert config.options == {"n": 4}


def test_bad_interpolation_and_unfilled_value_have_a_line(load):
    assert "run.yaml:2: train.name" in refused(load, "train:\n  name: ${nothing.here}\n")
    assert "run.yaml:2: train.lr" in refused(load, "train:\n  lr: ???\n")


def test_yaml_numbers_read_as_numbers(load):
    config = load("train: {lr: 1e-4, name: 2024-01-01}\n")
    assert config.train.lr == 1e-4
    assert config.train.name == "2024-01-01"


def test_anchors_and_merge_keys(load):
    config = load("train: &base\n  lr: 0.5\n  steps: 9\noptional:\n  <<: *base\n  steps: 2\n")
    assert config.optional == Inner(lr=0.5, steps=2)


def test_a_config_is_frozen(load):
    config = load("train: {steps: 2}\n")
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3
    assert config.train.steps == 2


def test_saved_config_loads_equal(load, tmp_path: Path):
    config = load(
        "train: {lr: 1e-7, name: '1e-3', folder: a/b, flag: true}\n"
        "parts: [{weight: 0.1}]\noptions: {a: '\\${not.a.key}', b: [null, 'on', '007', ''], c: .inf}\n"
    )
    assert config.options["a"] == "${not.a.key}"
    (tmp_path / "saved.yaml").write_text(config_yaml(config))
    assert load_config(Outer, tmp_path / "saved.yaml") == config
    assert math.isinf(config.options["c"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(
    name=st.text(max_size=30),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    options=st.dictionaries(st.text(min_size=1), VALUES),
)
@settings(max_examples=60, deadline=None)
def test_any_text_survives_saving(name: str, lr: float, options: dict[str, Any]):
    config = Outer(train=Inner(name=name, lr=lr), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_text(config_yaml(config), encoding="utf-8")
        assert load_config(Outer, path) == config
