"""User code by its location: found, loaded once, and told apart from what is missing or broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.location import LocationError, at_home, did_you_mean, is_location, locate, rows_from


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pkg.mod:fn", True),
        ("a/b c.py:fn", True),
        ("/x/y.py:Class", True),
        ("file.py", False),
        ("file.py:", False),
        ("http://host:80/x", False),
        ("host:8000", False),
        (":fn", False),
        ("", False),
        ("C:\\data\\rows.jsonl", False),
    ],
)
def test_the_form_of_a_location(text: str, expected: bool) -> None:
    assert is_location(text) is expected


def test_a_file_is_run_once_and_its_dataclasses_can_be_pickled(here: Path) -> None:
    import pickle

    (here / "mine.py").write_text(
        "from dataclasses import dataclass\nruns = []\nruns.append(1)\n@dataclass\nclass Point:\n    x: int\n"
    )
    point = locate("mine.py:Point")
    assert locate(f"{here}/mine.py:Point") is point
    assert locate("mine.py:runs") == [1]
    assert pickle.loads(pickle.dumps(point(3))) == point(3)


def test_two_files_of_one_name_are_two_modules(here: Path) -> None:
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "rewards.py").write_text(f"name = {folder!r}\n")
    assert [locate("a/rewards.py:name"), locate("b/rewards.py:name")] == ["a", "b"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("gone.py:fn", r"there is no file 'gone.py' \(looked from '.+'\)"),
        ("no.such.module:fn", r"there is no module 'no' on the import path \(looked for 'no.such.module'\)"),
        ("json.nothing:fn", "there is no module 'json.nothing' on the import path"),
        ("json:dmups", r"json has no 'dmups'. Did you mean 'dumps'\?"),
        ("json:zzzzzz", "json has no 'zzzzzz'.$"),
        ("json", "'json' is no location; write 'package.module:name' or 'path/to/file.py:name'"),
    ],
)
def test_what_is_not_there(location: str, message: str) -> None:
    with pytest.raises(LocationError, match=message):
        locate(location)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_to_be_had\n", r"ModuleNotFoundError: No module named 'not_to_be_had', raised at .*broken.py:1$"),
        ("x = 1\ndef f():\n    return 1 / 0\nf()\n", r"ZeroDivisionError: division by zero, raised at .*broken.py:3$"),
        ("def f(:\n", r"SyntaxError: invalid syntax \(broken.py, line 1\)$"),
        ("raise SystemExit(3)\n", r"SystemExit: 3, raised at .*broken.py:1$"),
        ("import gone_too.inner\n", r"ModuleNotFoundError: No module named 'gone_too', raised at .*broken.py:1$"),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_code_that_fails_to_import_is_told_with_its_place_and_tried_again(
    code: str, message: str, as_module: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(here))
    file = here / "broken.py"
    file.write_text(code)
    location = "broken:fn" if as_module else "broken.py:fn"
    with pytest.raises(LocationError, match=r"^broken(\.py)? cannot be imported: " + message):
        locate(location)
    file.write_text("fn = 'mended, and longer than before, so that no cached bytecode is taken for it'\n")
    sys.modules.pop("broken", None)
    assert locate(location).startswith("mended")
    sys.modules.pop("broken", None)


def test_nothing_like_it_gives_no_hint() -> None:
    assert did_you_mean("grop", ["grpo", "gae"]) == " Did you mean 'grpo'?"
    assert did_you_mean("x", ["grpo"]) == did_you_mean("x", []) == ""


ROWS = """import numpy as np
def rows(limit=3):
    return [{"q": i} for i in range(limit)]
def breaks():
    yield {"q": 1}
    raise KeyError("no column")
def leaves():
    raise SystemExit(3)
def nothing():
    return None
async def late():
    return []
names = ["q"]
"""


def test_rows_of_a_function_and_what_is_wrong_with_others(here: Path) -> None:
    (here / "rows.py").write_text(ROWS)
    assert list(rows_from("rows.py:rows", {"limit": 2})) == [{"q": 0}, {"q": 1}]
    for name, options, said in (
        ("rows", {"many": 2}, r"rows.py:rows\(many\) cannot be called so: got an unexpected keyword argument 'many'"),
        ("breaks", {}, r"rows.py:breaks\(\) failed: KeyError: 'no column', raised at .*rows.py:6$"),
        ("leaves", {}, r"failed: SystemExit: 3, raised at .*rows.py:8$"),
        ("nothing", {}, r"returned None; expected rows: a list, or a generator"),
        ("late", {}, r"returned <coroutine object late .*; expected rows"),
        ("names", {}, r"cannot be called so"),
    ):
        with pytest.raises(LocationError, match=said):
            list(rows_from(f"rows.py:{name}", options))


def test_a_tilde_is_the_home_whatever_reads_the_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "mine.py").write_text("value = 3\n")
    assert locate("~/mine.py:value") == 3
    assert at_home(Path("~/runs")) == here / "runs"
    assert (at_home("~/model"), at_home("org/model")) == (f"{here}/model", "org/model")
