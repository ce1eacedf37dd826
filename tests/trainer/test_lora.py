"""LoRA through peft, where it is installed: trains adapters only, saves merged and apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from posttrain.trainer.loading import LoraConfig, ModelConfig, ModelError
from posttrain.trainer.lora import save_adapter
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.policy import Policy, base_below, keep

from .batches import ragged_batch
from .models import tiny_policy

peft = pytest.importorskip("peft")


def test_adapters_train_and_the_base_stays() -> None:
    plain = tiny_policy("qwen3")
    before = plain.logprobs(ragged_batch()).detach()
    policy = Policy(peft.get_peft_model(plain.module, peft.LoraConfig(r=4, target_modules="all-linear")))
    assert torch.allclose(policy.logprobs(ragged_batch()), before, atol=1e-6)
    assert all("lora_" in name for name, _ in policy.parameters())
    optimizer = Optimizer(policy.parameters(), OptimizerConfig(lr=1e-2))
    policy.logprobs(ragged_batch()).sum().backward()
    optimizer.step()
    after = policy.logprobs(ragged_batch())
    assert not torch.allclose(after, before, atol=1e-3)
    with policy.module.disable_adapter():
        assert torch.allclose(policy.logprobs(ragged_batch()), before, atol=1e-6)


def test_p121_the_saved_model_has_the_adapters_effect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy = Policy(peft.get_peft_model(tiny_policy("llama").module, config))
    expected = policy.logprobs(ragged_batch())
    policy.save(tmp_path)
    assert torch.equal(policy.logprobs(ragged_batch()), expected)
    assert torch.allclose(Policy.load(tmp_path, "cpu", "float32").logprobs(ragged_batch()), expected, atol=1e-4)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


# ---------------------------------------------------------------- by config


def configured(seed: int = 0, dtype: str = "float32", **lora: Any) -> Policy:
    config = ModelConfig.model_validate(
        {"path": "tiny_search_base", "device": "cpu", "dtype": dtype, "lora": {"rank": 4} | lora}
    )
    return Policy.from_config(config, seed=seed)


def moved(policy: Policy) -> Policy:
    """Trained somewhere."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    return policy.logprobs(ragged_batch())


def test_fresh_adapters_change_no_bit_and_are_drawn_by_the_seed() -> None:
    base = Policy.load("tiny_search_base", "cpu", "float32")
    state = torch.get_rng_state()
    policy, same, other = configured(), configured(), configured(seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was used"
    assert torch.equal(logprobs(policy), logprobs(base))
    mine, yours, others = (dict(p.parameters()) for p in (policy, same, other))
    assert len(mine) == 2 * 7 * base.config.num_hidden_layers
    assert all(torch.equal(mine[name], yours[name]) for name in mine)
    for name, parameter in mine.items():
        assert bool(parameter.any()) == ("lora_A" in name) == (not torch.equal(parameter, others[name]))


def test_adapters_have_the_dtype_of_their_layers_and_the_optimizer_their_masters() -> None:
    policy = configured(dtype="bfloat16", target_modules="q_proj")
    assert {p.dtype for _, p in policy.parameters()} == {torch.bfloat16}
    masters = Optimizer(policy.parameters(), OptimizerConfig()).masters
    assert {p.dtype for p in masters} == {torch.float32}
    assert sum(p.numel() for p in masters) == sum(p.numel() for _, p in policy.parameters())


def test_the_base_below_shares_the_weights_and_never_trains() -> None:
    policy, base = moved(configured()), Policy.load("tiny_search_base", "cpu", "float32")
    below = base_below(policy, ModelConfig(path="tiny_search_base"))
    assert torch.equal(logprobs(below), logprobs(base))
    assert not torch.allclose(logprobs(policy), logprobs(base), atol=1e-2)
    assert below.parameters() == []
    own = {p.data_ptr() for p in policy.module.parameters()}
    assert all(p.data_ptr() in own for p in below.module.parameters())


@pytest.mark.parametrize("how", [{}, {"alpha": 12, "rslora": True}, {"target_modules": ["q_proj", "mlp.up_proj"]}])
def test_what_is_saved_is_what_is_loaded(how: dict[str, Any], tmp_path: Path) -> None:
    policy = moved(configured(**how))
    keep(policy, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["adapter"]
    again = configured(seed=9, path=str(tmp_path / "kept" / "adapter"), **how)
    assert torch.equal(logprobs(again), logprobs(policy))
    keep(again, tmp_path / "again")
    kept, kept_again = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "adapter").iterdir()} for name in ("kept", "again")
    )
    assert kept == kept_again
    given = ModelConfig(path="tiny_search_base", device="cpu", lora=LoraConfig(path=str(tmp_path / "kept" / "adapter")))
    assert torch.equal(logprobs(Policy.from_config(given)), logprobs(policy)), "what is not said is the adapter's own"
    plain = Policy.load("tiny_search_base", "cpu", "float32").module
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "kept" / "adapter")
    assert torch.allclose(logprobs(Policy(theirs)), logprobs(policy), atol=1e-5), "as peft reads it"


def test_a_state_of_before_is_saved_as_it_was(tmp_path: Path) -> None:
    policy = configured()
    state = policy.state()
    before = logprobs(policy)
    keep(moved(policy), tmp_path, state=state)
    assert torch.equal(logprobs(configured(path=str(tmp_path / "adapter"))), before)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_proj", "gate_prj"]}, r"target_modules: .* no linear layer 'gate_prj' .*'gate_proj'"),
        ({"target_modules": ["embed_tokens"]}, r"It has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ({"target_modules": ["lm_head"]}, r"no linear layer 'lm_head' below its head"),
        ({"exclude_modules": ["nothing"]}, r"exclude_modules: .* no linear layer 'nothing'"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "leaves no layer that gets adapters"),
        ({"path": "nowhere"}, r"model\.lora\.path = nowhere has no adapter_config\.json"),
    ],
)
def test_what_fits_no_layer_is_named(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        configured(**lora)


def test_layers_can_be_left_out() -> None:
    names = [name for name, _ in configured(exclude_modules=["down_proj", "self_attn.k_proj"]).parameters()]
    assert any("q_proj" in name for name in names)
    assert not any("down_proj" in name or "k_proj" in name for name in names)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, "rank\n.*greater than or equal to 1"),
        ({"alpha": 0}, "alpha\n.*greater than 0"),
        ({"dropout": 0.1}, "dropout\n.*0.1 would make the log-probs of trainer and sampler differ"),
        ({"r": 4}, "Extra inputs"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LoraConfig.model_validate(lora)


def test_an_adapter_that_is_not_as_said_or_of_another_model_is_refused(tmp_path: Path) -> None:
    policy, folder = configured(), tmp_path / "adapter"
    save_adapter(policy.module, folder)
    with pytest.raises(ModelError, match=r"model\.lora\.rank is 8, and that of the adapter at .* 4; leave it out"):
        configured(rank=8, path=str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    first, *rest = sorted(tensors)
    save_file({name: tensors[name] for name in rest} | {"other": tensors[first]}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"not of this model: it lacks {first}; the model has no other"):
        configured(path=str(folder))
    save_file(tensors | {first: torch.zeros(4, 3)}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=rf"{first} is \[4, 3\] in it"):
        configured(path=str(folder))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LOHA"}))
    with pytest.raises(ModelError, match="of the kind LOHA; only LORA trains here"):
        configured(path=str(folder))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        configured(path=str(folder))


def test_without_peft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"model\.lora needs peft.*pip install 'posttrain\[lora\]'"):
        configured()


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    save_adapter(configured().module, tmp_path)
    with pytest.raises(
        ModelError, match=r"is an adapter, without the model .* set model\.path to that model and model"
    ):
        Policy.load(tmp_path, "cpu")


def test_prompt_tuning_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ModelError, match="virtual tokens before the input"):
        Policy(peft.get_peft_model(tiny_policy("llama").module, config))
