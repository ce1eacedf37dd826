from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain import cli
from posttrain.retrieval.command import build, nested, open_for_serving, token_of
from posttrain.retrieval.config import RetrievalConfig, make_retriever
from posttrain.retrieval.dense import DenseRetriever
from posttrain.retrieval.hybrid import HybridRetriever
from posttrain.retrieval.rerank import RerankedRetriever

from .models import write_encoder, write_reranker
from .servers import PEOPLE


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PEOPLE))
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def test_settings_are_nested_yaml():
    given = ["a.b=1", "a.c=text", "d=[1, 2]", "e.f.g=true", "h=x=y"]
    assert nested(given) == {"a": {"b": 1, "c": "text"}, "d": [1, 2], "e": {"f": {"g": True}}, "h": "x=y"}
    with pytest.raises(ValueError, match="expected key=value, got 'k1'"):
        nested(["k1"])


def test_every_method_from_the_shell(corpus: Path, tmp_path: Path, encoder: str):
    shared = ["--set", "encoder.device=cpu", "--set", "vectors.passages_per_shard=3"]
    done = run("index", str(corpus), str(tmp_path / "b"), "--set", "bm25.k1=0.9", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["parameters"]["k1"] == 0.9
    done = run("index", str(corpus), str(tmp_path / "e"), "--set", "bm25.b=1e-1", "--json")
    assert json.loads(done.output.splitlines()[-1])["parameters"]["b"] == 0.1
    done = run("index", str(corpus), str(tmp_path / "d"), "--method", "dense", "--encoder", encoder, *shared)
    assert "4 passages, 16 dimensions" in done.output
    done = run("index", str(corpus), str(tmp_path / "h"), "--method", "hybrid", "--encoder", encoder, *shared)
    assert "4 passages, 17 terms, 16 dimensions" in done.output
    kinds = [type(open_for_serving(tmp_path / name, ["encoder.device=cpu"])[0]) for name in "dh"]
    assert kinds == [DenseRetriever, HybridRetriever]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "bm52"], "unknown index method 'bm52'; known: bm25, dense, hybrid"),
        (["--encoder", "x"], "needs no encoder"),
        (["--method", "dense"], "method dense needs an encoder"),
        (["--set", "k1=3"], "unknown setting 'k1' here; known: bm25"),
        (["--set", "bm25.k2=3"], "unknown setting 'k2' here; known: k1, b, unspaced"),
        (["--set", "bm25.b=3"], "0 <= b <= 1"),
        (["--set", "bm25.k1=inf"], "got k1=inf"),
        (["--set", "bm25.k1=nan"], "got k1=nan"),
        (["--set", "bm25.k1=x"], "bm25.k1 is a number, got 'x'"),
        (["--set", "bm25.k1="], "bm25.k1 is a number, got None"),
        (["--set", "bm25.b=true"], "bm25.b is a number, got True"),
        (["--set", "bm25.unspaced=3"], "bm25.unspaced is true, false or null, got 3"),
        (["--set", "bm25=5"], "expected settings such as k1=..., got 5"),
        (["--set", "bm25=5", "--set", "bm25.k1=1"], "'bm25.k1=1': another setting makes bm25 a int"),
        (["--set", "bm25.k1=["], "the value of 'bm25.k1=[' is no YAML"),
        (["--set", "bm25.k1=2020-99-99"], "the value of 'bm25.k1=2020-99-99' is no YAML: month must be"),
        (["--set", "bm25.k1=" + "[" * 5000], "is no YAML"),
        (["--method", "dense", "--encoder", "x", "--set", "encoder=5"], "expected settings such as pooling=..., got 5"),
        (["--method", "dense", "--encoder", "x", "--set", "encoder.model=y"], "unknown setting 'model' here"),
        (["--method", "dense", "--encoder", "x", "--set", "vectors=[]"], "expected settings such as kind=..., got []"),
        (["--method", "dense", "--encoder", "no/such", "--set", "encoder.poling=cls"], "poling"),
    ],
)
def test_mistakes_are_named(corpus: Path, tmp_path: Path, arguments: list[str], message: str):
    done = run("index", str(corpus), str(tmp_path / "index"), *arguments)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "index").exists()


def test_an_index_is_served_as_the_settings_say(corpus: Path, tmp_path: Path):
    build(corpus, tmp_path / "b", "bm25", None, [], empty="error", overwrite=False, on_progress=None)
    reranker = write_reranker(tmp_path / "reranker")
    served, about = open_for_serving(tmp_path / "b", [f"rerank.model={reranker}", "rerank.candidates=7"])
    assert isinstance(served, RerankedRetriever)
    assert served.candidates == 7
    assert about == {"method": "bm25", "passages": 4}
    with pytest.raises(ValueError, match="rerunk"):
        open_for_serving(tmp_path / "b", ["rerunk.model=x"])
    with pytest.raises(ValueError, match="leave the setting 'index' out"):
        open_for_serving(tmp_path / "b", ["index=x"])


def test_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert token_of(None) is None
    monkeypatch.setenv("A_TOKEN", " abc ")
    assert token_of("A_TOKEN") == "abc"
    monkeypatch.setenv("A_TOKEN", " ")
    with pytest.raises(ValueError, match="environment variable A_TOKEN holds no token"):
        token_of("A_TOKEN")


def test_bm25_is_built_and_opened_without_torch(corpus: Path, tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from posttrain.retrieval.command import build, open_for_serving\n"
        "build(Path(sys.argv[1]), Path(sys.argv[2]), 'bm25', None, [])\n"
        "open_for_serving(Path(sys.argv[2]), [])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(corpus), str(tmp_path / "index")]
    assert subprocess.check_output(command, text=True).split() == ["False", "False"]


def test_kinds_of_the_config(corpus: Path, encoder: str, tmp_path: Path):
    settings = {"corpus": corpus, "encoder": {"model": encoder, "device": "cpu"}}
    dense = make_retriever(RetrievalConfig.model_validate({**settings, "kind": "dense"}))
    hybrid = make_retriever(RetrievalConfig.model_validate({**settings, "kind": "hybrid", "hybrid": {"depth": 5}}))
    assert isinstance(dense, DenseRetriever)
    assert isinstance(hybrid, HybridRetriever)
    assert hybrid.depth == 5
    build(corpus, tmp_path / "d", "dense", encoder, ["encoder.device=cpu"])
    with pytest.raises(ValueError, match=r"is an index of kind dense, retrieval.kind is bm25"):
        make_retriever(RetrievalConfig(index=tmp_path / "d", kind="bm25"))
