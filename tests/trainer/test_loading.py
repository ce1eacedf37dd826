"""Save, load again, compare; and what a bad directory is told."""

from __future__ import annotations

import json
import lzma
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from posttrain.trainer.loading import ModelConfig, ModelError, check_directory, load_config, pick_device, pick_dtype
from posttrain.trainer.policy import Policy

from .batches import ragged_batch
from .models import tiny_config, tiny_policy


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_p121_saved_and_loaded_again_is_equal_to_the_bit(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tiny_policy(name)
    policy.save(tmp_path)
    assert capsys.readouterr().err == ""  # no progress bars
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    again = Policy.load(tmp_path, "cpu", "float32", version=7)
    assert again.version == 7
    assert torch.equal(again.logprobs(ragged_batch()), policy.logprobs(ragged_batch()))
    for (key, a), (_, b) in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), key


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    tiny_policy("gemma3").save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    module = Policy.load(tmp_path, "cpu", "float32").module
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


def test_the_saved_model_is_a_plain_transformers_model(tmp_path: Path) -> None:
    policy = tiny_policy("qwen3")
    policy.save(tmp_path)
    assert "posttrain" not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    policy.module.set_attn_implementation("sdpa")
    with torch.no_grad():  # with gradients the policy's norms round differently
        assert torch.allclose(plain(ids).logits, policy.module(ids).logits, atol=1e-6)


def test_p121_every_real_chat_template_survives_byte_for_byte(tmp_path: Path, shared_data: Path) -> None:
    policy = tiny_policy("llama")
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    templates = sorted((shared_data / "chat_templates").glob("*.jinja"))
    assert len(templates) == 17
    for template in templates:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        policy.save(tmp_path / template.stem, tokenizer)
        again = AutoTokenizer.from_pretrained(tmp_path / template.stem)
        assert again.chat_template == tokenizer.chat_template, template.name


def test_p121_a_real_tokenizer_encodes_the_same_after_save(tmp_path: Path, shared_data: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    packed = shared_data / "tokenizers" / "qwen3.tokenizer.json.xz"
    (source / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    shutil.copyfile(shared_data / "tokenizers" / "qwen3.tokenizer_config.json", source / "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tiny_policy("qwen3").save(tmp_path / "saved", tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
    text = "<|im_start|>user\nWhere is 巴黎? 12,5 \u20ac<|im_end|>"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_a_missing_directory() -> None:
    with pytest.raises(ModelError, match=r"no model directory /nowhere/at/all; model\.path must hold config\.json"):
        Policy.load("/nowhere/at/all")


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    with pytest.raises(ModelError, match="is a file"):
        check_directory(tmp_path / "model")


def test_no_config_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        check_directory(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"model_type": "of_next_year"}'])
def test_a_model_that_transformers_does_not_know_is_named_with_its_version(tmp_path: Path, content: str) -> None:
    tiny_policy("llama").save(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"transformers {version('transformers')} does not know the model at .*/m: "):
        load_config(tmp_path / "m")


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights"):
        Policy.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=r"pickled weights \(pytorch_model\.bin\), which can run code"):
        Policy.load(tmp_path)


def test_a_missing_tensor_is_not_filled_with_random_numbers(tmp_path: Path) -> None:
    tiny_policy("llama").save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        Policy.load(tmp_path)


def test_a_truncated_file_names_the_model(tmp_path: Path) -> None:
    tiny_policy("llama").save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"the model at {tmp_path} cannot be read"):
        Policy.load(tmp_path)


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    tiny_policy("llama").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="cannot be read"):
        Policy.load(tmp_path)


def test_device_and_dtype_are_chosen_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match="sees no CUDA device"):
        pick_device("cuda")
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(ModelError, match="unknown dtype 'half'"):
        pick_dtype("half", torch.device("cpu"))


def test_config_drives_loading_and_knows_its_keys(tmp_path: Path) -> None:
    tiny_policy("llama").save(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cpu", gradient_checkpointing=True)
    policy = Policy.from_config(config)
    assert policy.dtype is torch.bfloat16
    assert policy.module.training  # gradient checkpointing works in train mode only
    with pytest.raises(ValidationError, match="dtpye"):
        ModelConfig.model_validate({"path": "x", "dtpye": "auto"})
