"""GGUF files written here, with the format's own library, and imported."""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from posttrain.trainer import gguf as importer
from posttrain.trainer.gguf import GgufError, import_gguf, read_header
from posttrain.trainer.policy import Policy

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 2, 4, 2, 64
CONTROL = ("<unk>", "<s>", "</s>")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def pieces() -> list[str]:
    """A SentencePiece vocabulary: control tokens, all bytes, single characters."""
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.-"]
    return [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]


def tensors(rng: np.random.Generator, vocabulary: int) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.2, (rows, columns)).astype(np.float32)

    head = HIDDEN // HEADS
    found = {"token_embd": matrix(vocabulary, HIDDEN), "output": matrix(vocabulary, HIDDEN)}
    found["output_norm"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        found |= {f"blk.{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"blk.{layer}.{name}": np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
    return found


def write(path: Path, weights: dict[str, np.ndarray], *, drop: str = "", architecture: str = "llama") -> Path:
    """A Llama with its matrices in Q8_0, but for the embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = pieces()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    for name, weight in weights.items():
        if name == drop:
            continue
        if weight.ndim == 2 and name.startswith("blk"):
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name + ".weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name + ".weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return tensors(np.random.default_rng(0), len(pieces()))


@pytest.fixture(scope="module")
def file(weights, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights)


@pytest.fixture(scope="module")
def imported(file) -> importer.Imported:
    return import_gguf(str(file), file.parent / "models" / "tiny")


def test_header_tells_what_the_file_holds(file, weights):
    header = read_header(file)
    assert (header.name, header.architecture, header.has_chat_template) == ("tiny", "llama", False)
    assert header.parameters == sum(weight.size for weight in weights.values())
    assert header.tensors == {"Q8_0": 14, "F32": 7}
    assert header.fields["tokenizer.ggml.tokens"] == len(pieces())


def test_what_is_written_loads_as_a_policy_with_the_unpacked_weights(imported, weights):
    module = Policy.load(imported.directory, "cpu").module
    state = module.state_dict()
    torch.testing.assert_close(state["model.embed_tokens.weight"], torch.tensor(weights["token_embd"]))
    packed = gguf.quants.quantize(weights["blk.1.ffn_down"], gguf.GGMLQuantizationType.Q8_0)
    unpacked = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    torch.testing.assert_close(state["model.layers.1.mlp.down_proj.weight"], torch.tensor(unpacked))
    assert imported.max_gap < 1e-4
    assert imported.perplexity > 1
    assert not hasattr(module.config, "quantization_config")


def test_report_says_what_was_done(imported):
    text = imported.render()
    for part in ("tiny (llama", "14 Q8_0", "float32 safetensors", "loaded again", "no chat template"):
        assert part in text
    assert imported.as_dict()["parameters"] == imported.header.parameters
    assert imported.bytes_written == sum(path.stat().st_size for path in imported.directory.iterdir())


def test_texts_begin_with_bos_where_the_file_asks_for_it(imported):
    tokenizer = AutoTokenizer.from_pretrained(imported.directory)
    assert tokenizer.encode("abc")[0] == 1
    assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == "abc"


def test_bfloat16(file, tmp_path):
    done = import_gguf(str(file), tmp_path / "half", dtype="bfloat16")
    assert Policy.load(done.directory, "cpu", "bfloat16").dtype == torch.bfloat16
    assert load_file(done.directory / "model.safetensors").popitem()[1].dtype == torch.bfloat16
    assert json.loads((done.directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert done.max_gap < 1e-4  # compared in float32, where only a wrong weight shows


def test_nothing_is_left_behind_but_the_model(imported):
    assert [path.name for path in imported.directory.parent.iterdir()] == ["tiny"]
    assert not list(imported.directory.glob("*.gguf"))


# -- packages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(file, tmp_path, monkeypatch):
    """An installed package `tiny_model_gguf` that assembles the file from two parts."""
    folder = tmp_path / "site" / "tiny_model_gguf"
    folder.mkdir(parents=True)
    data = file.read_bytes()
    for number, part in enumerate((data[:1000], data[1000:])):
        (folder / f"part{number}").write_bytes(part)
    (folder / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def chunk_paths():\n    return sorted(Path(__file__).parent.glob('part?'))\n"
        "def assemble(path):\n    path.write_bytes(b''.join(p.read_bytes() for p in chunk_paths()))\n    return path\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield folder
    sys.modules.pop("tiny_model_gguf", None)


def test_a_package_is_assembled_and_imported(package, imported, tmp_path):
    done = import_gguf("tiny-model-gguf", tmp_path / "out")
    assert done.header == imported.header
    assert (tmp_path / "out/model.safetensors").read_bytes() == (imported.directory / "model.safetensors").read_bytes()


def test_a_package_that_is_not_installed_names_the_command(tmp_path):
    with pytest.raises(GgufError, match="pip install no-such-model-gguf"):
        import_gguf("no-such-model-gguf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_package_without_a_file_in_it(tmp_path):
    with pytest.raises(GgufError, match="no function `assemble`"):
        import_gguf("numpy", tmp_path / "out")


def test_a_package_whose_sum_is_wrong(package, tmp_path):
    with (package / "__init__.py").open("a") as module:
        module.write("def assemble(path):\n    raise ValueError('sha256 did not match')\n")
    with pytest.raises(GgufError, match=r"incomplete \(sha256 did not match\).*--force-reinstall tiny-model-gguf"):
        import_gguf("tiny-model-gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- refusals -----------------------------------------------------------------------------------------------------


def test_the_target_is_never_overwritten(file, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(GgufError, match="exists already"):
        import_gguf(str(file), tmp_path / "out")


def test_no_such_file(tmp_path):
    with pytest.raises(GgufError, match=r"no file .*absent\.gguf"):
        import_gguf(str(tmp_path / "absent.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"PK\x03\x04" + data[4:], "does not begin with the letters GGUF"),
        (lambda data: data[:4] + b"\x01" + data[5:], "GGUF version 1"),
        (lambda data: data[:300], "cut short"),
        (lambda data: data[:26] + b"\xff\xff" + data[28:], "cut short or damaged"),
    ],
)
def test_damaged_headers(file, tmp_path, damage, message):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(damage(file.read_bytes()))
    with pytest.raises(GgufError, match=message):
        import_gguf(str(broken), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_room_is_known_before_anything_is_written(file, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1, 1, 1000))
    with pytest.raises(GgufError, match=r"needs .* MB on the disk"):
        import_gguf(str(file), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_file_that_lacks_a_weight(weights, tmp_path):
    path = write(tmp_path / "lacking.gguf", weights, drop="blk.1.ffn_up")
    with pytest.raises(GgufError, match="lacks weights"):
        import_gguf(str(path), tmp_path / "out")


def test_an_architecture_that_transformers_does_not_know(weights, tmp_path):
    path = write(tmp_path / "odd.gguf", weights, architecture="nonesuch")
    with pytest.raises(GgufError, match=r"cannot read odd\.gguf"):
        import_gguf(str(path), tmp_path / "out")


def test_the_extra_is_named_when_it_is_missing(file, tmp_path, monkeypatch):
    monkeypatch.setattr(importer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GgufError, match=r"pip install 'posttrain\[gguf\]'"):
        import_gguf(str(file), tmp_path / "out")


def test_an_unknown_dtype(file, tmp_path):
    with pytest.raises(GgufError, match="float32, bfloat16"):
        import_gguf(str(file), tmp_path / "out", dtype="int4")


def test_a_transformers_that_misreads_tokenizers_is_refused(file, tmp_path, monkeypatch):
    """Case: 5.17 split "When" into four tokens; the weights were right, and every log-prob wrong."""
    monkeypatch.setattr(importer.transformers, "__version__", "5.17.0")
    with pytest.raises(GgufError, match=r"5\.17\.0 misreads the tokenizers.*or give the model's tokenizer"):
        import_gguf(str(file), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_may_come_from_a_directory(file, imported, tmp_path, monkeypatch):
    monkeypatch.setattr(importer.transformers, "__version__", "5.17.0")
    done = import_gguf(str(file), tmp_path / "out", tokenizer=str(imported.directory))
    assert AutoTokenizer.from_pretrained(done.directory).encode("abc") == [1, *done_ids(imported, "abc")]


def done_ids(imported: importer.Imported, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(imported.directory).encode(text, add_special_tokens=False)


def test_a_tokenizer_that_is_not_there_or_of_another_model(file, imported, tmp_path):
    with pytest.raises(GgufError, match="no tokenizer at"):
        import_gguf(str(file), tmp_path / "out", tokenizer=str(tmp_path / "absent"))
    tokenizer = AutoTokenizer.from_pretrained(imported.directory)
    tokenizer.add_tokens([f"more{i}" for i in range(5)])
    tokenizer.save_pretrained(tmp_path / "larger")
    with pytest.raises(GgufError, match="another model's"):
        import_gguf(str(file), tmp_path / "out", tokenizer=str(tmp_path / "larger"))
