"""`posttrain index` and `posttrain serve-search` from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain import cli
from posttrain.retrieval.index import load_index


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    rows = [{"id": "a", "contents": '"Tower"\nThe tower is in Paris.'}, {"id": "b", "contents": '"Bridge"\nIn Rome.'}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_index_builds_what_load_index_opens(corpus: Path, tmp_path: Path):
    done = CliRunner().invoke(cli.app, ["index", str(corpus), str(tmp_path / "index"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["counts"]["passages"] == 2
    assert load_index(tmp_path / "index").search(["tower"], 1)[0][0].id == "a"


def test_an_index_is_replaced_only_on_demand(corpus: Path, tmp_path: Path):
    arguments = ["index", str(corpus), str(tmp_path / "index")]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 1
    assert "exists already" in again.output
    assert CliRunner().invoke(cli.app, [*arguments, "--overwrite"]).exit_code == 0


def test_serving_a_folder_that_is_no_index_is_refused(tmp_path: Path):
    done = CliRunner().invoke(cli.app, ["serve-search", str(tmp_path)])
    assert done.exit_code == 1
    assert "build it with `posttrain index`" in done.output
