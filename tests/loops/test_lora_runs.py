"""Runs that train adapters, from the config to a model that any program loads; needs peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cli_runs import SMALL_RUN, Command, command_in, write_config
from loops.toy import metric_rows, toy_config, trained, write_rows
from posttrain.config import ConfigError
from posttrain.loops import rl
from posttrain.loops.room import room_of
from posttrain.runs.model_sizes import shape_at
from posttrain.trainer.checks import plain_logprobs
from posttrain.trainer.loading import LoraConfig
from posttrain.trainer.policy import Policy

pytest.importorskip("peft")
LORA = {"lora": {"rank": 4, "alpha": 8}}
PPO = {"advantage": "gae", "std": None, "length": None, "aggregate": "token_mean"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rl.Run:
    settings: dict[str, Any] = {"algorithm": {"kl_coef": 0.01, "kl_in": "loss"}, "optimizer": {"lr": 1e-2}}
    return trained(toy_config(tmp_path_factory.mktemp("lora"), model=LORA, run={"steps": 3}, **settings))


def test_only_adapters_train_and_the_sampler_computes_with_them(run: rl.Run) -> None:
    learner, rows = run.learner, metric_rows(run)
    base = Policy.load("tiny_search_base", "cpu", "float32").module.state_dict()
    assert all("lora_" in name for name in learner.optimizer.named)
    for name, parameter in learner.policy.module.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        assert ("lora_" in name) == parameter.requires_grad
        assert "lora_" in name or torch.equal(parameter, base[plain])
    assert all(row["gap/max"] < 1e-4 for row in rows.values())
    assert rows[3]["ref/kl"] > 1e-3 > abs(rows[1]["ref/kl"])


def test_the_reference_is_no_second_copy(run: rl.Run) -> None:
    learner = run.learner
    assert learner.ref is not None
    own = {parameter.data_ptr() for parameter in learner.policy.module.parameters()}
    assert {parameter.data_ptr() for parameter in learner.ref.module.parameters()} < own
    assert "reference" not in room_of(run.config).estimate.worst.parts


def test_a_run_from_an_adapter_takes_that_one_as_its_reference(run: rl.Run, tmp_path: Path) -> None:
    adapter = run.directory.checkpoints / "step-3" / "adapter"
    model, algorithm = {"lora": {"path": str(adapter)}}, {"kl_coef": 0.01, "kl_in": "loss"}
    again = trained(toy_config(tmp_path, model=model, algorithm=algorithm))
    first, last = metric_rows(again).values()
    assert first["ref/kl"] < 1e-6 < last["ref/kl"]
    assert again.learner.ref is not None
    assert any("lora_" in name for name, _ in again.learner.ref.module.named_parameters())


def test_gradients_and_moments_are_planned_for_adapters_alone(run: rl.Run) -> None:
    trains = sum(parameter.numel() for parameter in run.learner.optimizer.named.values())
    shape = shape_at("tiny_search_base", run.config.model.lora)
    assert (shape.trained, shape.frozen) == (trains, shape_at("tiny_search_base").parameters)
    kept = LoraConfig(path=str(run.directory.checkpoints / "step-3" / "adapter"))
    assert shape_at("tiny_search_base", kept) == shape, "the same from an adapter's files"
    step = room_of(run.config).estimate.named("optimizer step").parts
    assert step["moments of AdamW"] == 8 * trains
    assert step["gradients"] == 4 * trains
    plan = room_of(toy_config(run.directory.path.parent, model=LORA, critic={}, algorithm=PPO))
    critic = shape_at("tiny_search_base").decoder_parameters
    assert plan.estimate.named("optimizer step").parts["critic, its masters and moments"] == 12 * critic


def test_an_export_loads_anywhere_and_every_command_takes_it(
    run: rl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By transformers; `eval`, `chat` and `generate` on the run, on the export, and on the adapter beside it."""
    command: Command = command_in(tmp_path, monkeypatch, capfd)
    said = json.loads(command("export", run.directory.path, "out", "--json").out)
    assert said["bytes"] > 3e6
    merged = AutoModelForCausalLM.from_pretrained("out").eval()
    ids = torch.arange(20, 40)
    with torch.no_grad():
        found, expected = plain_logprobs(merged, ids), plain_logprobs(run.learner.policy.module, ids)
        before = plain_logprobs(Policy.load("tiny_search_base", "cpu", "float32").module, ids)
    assert (found - expected).abs().max() < 1e-4 < 1e-2 < (found - before).abs().max()
    kept = run.directory.checkpoints / "step-3" / "adapter" / "adapter_model.safetensors"
    assert load_file("out/adapter/adapter_model.safetensors").keys() == load_file(kept).keys()
    assert "is there already" in command("export", run.directory.path, "out").refused()

    world = write_config(tmp_path / "world.yaml", SMALL_RUN)
    write_rows(tmp_path / "asked.jsonl", [{"question": "Where was Bafi Gole born?"}])
    texts: dict[str, str] = {}
    for target in ("out", "out/adapter", str(run.directory.checkpoints / "step-3")):
        assert json.loads(command("eval", target, "--config", world, "--json").out)["model"].startswith(target)
        command("generate", target, "asked.jsonl", "--config", world, "--out", "said.jsonl")
        (line,) = (tmp_path / "said.jsonl").read_text().splitlines()
        texts[target] = json.loads(line)["text"]
        (tmp_path / "said.jsonl").unlink()
        chat = command("chat", target, "Where was Bafi Gole born?", "--config", world, "--json")
        assert json.loads(chat.out)["question"] == "Where was Bafi Gole born?"
    assert len(set(texts.values())) == 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"ranks": 2, "tensor_parallel": 2}}, r"trainer\.tensor_parallel: layers with adapters are not"),
        (
            {"sampler": {"engine": "vllm", "options": {"enable_lora": False}}, "cluster": {"samplers": 1}},
            r"sampler\.options\.enable_lora: cluster\.samplers are given the adapters alone",
        ),
        ({"model": {"lora": {"rank": 0}}}, r"model\.lora\.rank.*greater than or equal to 1"),
        ({"model": {"lora": {"dropout": 0.1}}}, r"model\.lora\.dropout.*would make the log-probs"),
        ({"model": {"lora": {"lora_rank": 8}}}, r"model\.lora\.lora_rank"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        toy_config(tmp_path, **{"model": LORA} | sections)
