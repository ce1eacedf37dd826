"""What every backend that divides a model among ranks owes: the steps of one process, and its state in the same files.

DeepSpeed has an environment of its own, see scripts/test_deepspeed; without it its cases are skipped.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cluster.fleet import on_ranks
from posttrain.packing import Batch, select
from posttrain.trainer.loading import ModelError, pick_device
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig, Stepper
from posttrain.trainer.policy import Policy
from posttrain.trainer.ranks import ALONE, Ranks, TrainerConfig, join_ranks, leave_ranks
from posttrain.trainer.sharding import copy_weights
from posttrain.trainer.zero import ZeroOptimizer

from .batches import ragged_batch
from .models import tiny_config

DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "zero2": {"backend": "deepspeed", "deepspeed": {"stage": 2}},
    "zero3": {"backend": "deepspeed", "deepspeed": {"stage": 3, "persistent_below": 40}},
    "zero3_offload": {"backend": "deepspeed", "offload": True},
}
CASES = {"tied": "qwen3", "half_frozen": "llama", "bfloat16": "qwen3"}
WHICH = {name: ["bfloat16"] if name == "zero3_offload" else list(CASES) for name in TRAINERS}
BACKENDS = [
    pytest.param(name, case, marks=() if name == "fsdp2" else DEEPSPEED) for name in TRAINERS for case in WHICH[name]
]
CLOSE = {"tied": 2e-6, "half_frozen": 2e-6, "bfloat16": 1e-2}  # of bfloat16 weights: a spacing or two
RATES = OptimizerConfig(
    lr=0.02,
    betas=(0.8, 0.9),
    eps=1e-3,
    weight_decay=0.1,
    warmup_optimizer_steps=2,
    schedule="linear",
    max_grad_norm=0.5,
    min_lr_ratio=0.5,
)
STEPS, POISONED, RESUMED = 5, 1, 3


def policy_of(case: str) -> Policy:
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    policy = Policy.random(tiny_config(CASES[case]), seed=0, dtype=dtype)
    if case == "half_frozen":
        policy.module.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
        policy.decoder.layers[1].requires_grad_(False)  # type: ignore[index]
        policy.checkpoint_activations()
    return policy


def divided(policy: Policy, trainer: TrainerConfig, ranks: Ranks) -> Stepper:
    if ranks.size > 1:
        policy.shard(ranks, trainer)
    if ranks.size > 1 and trainer.zero is not None:
        return ZeroOptimizer(policy, RATES, STEPS, trainer, ranks)
    half = policy.dtype is torch.bfloat16
    mastered = {name for name, _ in policy.parameters()} if half and ranks.size > 1 else set[str]()
    return Optimizer(policy.parameters(), RATES, STEPS, mastered=mastered)


def micro_batches(batch: Batch, ranks: Ranks) -> list[Batch]:
    """Two for each of two ranks, all four for one process, of one segment each or two."""
    parts = [select(batch, segments) for segments in ([2, 6], [3, 5], [4], [7, 1])]
    return parts[ranks.rank :: ranks.size]


def take_steps(policy: Policy, optimizer: Stepper, ranks: Ranks, first: int, last: int) -> list[dict[str, float]]:
    """A loss of log-probs and entropies under changing weights; one step has a loss that is not finite on one rank."""
    rows = []
    for step in range(first, last):
        total = 0.0
        for number, part in enumerate(micro_batches(ragged_batch(), ranks)):
            logprobs, entropy = policy.logprobs_and_entropy(part)
            poison = float("inf") if step == POISONED and number == 1 and ranks.rank == ranks.size - 1 else 1.0
            loss = ((logprobs - 0.1 * (step + 1) * entropy) * part.positions / 100).sum()
            (loss * poison).backward()
            total += float(loss.detach())
        report = optimizer.step()
        loss = float(ranks.sum(torch.tensor(total, dtype=torch.float64)))
        rows.append({"loss": loss, "norm": report.grad_norm, "lr": report.lr, "skipped": report.skipped})
    return rows


def drill(case: str, trainer: TrainerConfig, ranks: Ranks, folder: Path) -> None:
    """Steps, what they left, and the rest of them once more from what was left half-way."""
    folder.mkdir(parents=True, exist_ok=True)
    policy, copy = policy_of(case), policy_of(case)
    optimizer = divided(policy, trainer, ranks)
    with torch.no_grad():
        policy.logprobs(ragged_batch())  # forwards without a backward come between
    rows = take_steps(policy, optimizer, ranks, 0, RESUMED)
    copy_weights(policy.module, copy.module)
    states = {"half": optimizer.state_tensors()}
    rows += take_steps(policy, optimizer, ranks, RESUMED, STEPS)
    states["end"] = optimizer.state_tensors()
    if ranks.leads:
        for name, state in states.items():
            save_file(state, folder / f"{name}.safetensors")
        save_file(weights_of(copy.module), folder / "half_weights.safetensors")
        (folder / "rows.json").write_text(json.dumps(rows))
    copy_weights(policy.module, copy.module)
    if ranks.leads:
        save_file(weights_of(copy.module), folder / "weights.safetensors")


def go_on(case: str, trainer: TrainerConfig, ranks: Ranks, source: Path, folder: Path) -> None:
    """The second half of the steps from the state in `source`, whoever wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    policy, copy = policy_of(case), policy_of(case)
    policy.module.load_state_dict(load_file(source / "half_weights.safetensors"), strict=False)
    optimizer = divided(policy, trainer, ranks)
    optimizer.load_state_tensors(load_file(source / "half.safetensors"))
    rows = take_steps(policy, optimizer, ranks, RESUMED, STEPS)
    copy_weights(policy.module, copy.module)
    if ranks.leads:
        save_file(weights_of(copy.module), folder / "weights.safetensors")
        (folder / "rows.json").write_text(json.dumps(rows))


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in module.named_parameters()}


def drills(backend: str, alone: Path, folder: Path) -> None:
    """On each of two ranks."""
    ranks = join_ranks(pick_device("cpu"))
    trainer = TrainerConfig.model_validate(TRAINERS[backend])
    for case in WHICH[backend]:
        drill(case, trainer, ranks, folder / case)
        go_on(case, trainer, ranks, alone / case, folder / f"{case} from one")
    leave_ranks()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("backends")
    here = TRAINERS if importlib.util.find_spec("deepspeed") is not None else ["fsdp2"]
    for case in CASES:
        drill(case, TrainerConfig(), ALONE, base / "one" / case)
    for name in here:
        on_ranks(2, base / f"log {name}", drills, name, base / "one", base / name)
        for case in WHICH[name]:
            go_on(case, TrainerConfig(), ALONE, base / name / case, base / "one" / f"{case} from {name}")
    return base


def gap(one: Path, other: Path) -> float:
    mine, yours = load_file(one), load_file(other)
    assert mine.keys() == yours.keys()
    assert all(mine[name].dtype == yours[name].dtype for name in mine)
    return max(float((mine[name].double() - yours[name].double()).abs().max()) for name in mine)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_two_ranks_take_the_steps_of_one_process(done: Path, backend: str, case: str) -> None:
    """Clipped, with a skipped update, decay, moments of its own; sums over micro-batches and ranks, no mean."""
    one, two = rows_of(done / "one" / case), rows_of(done / backend / case)
    close = 20 * CLOSE[case]
    for step, (mine, yours) in enumerate(zip(one, two, strict=True)):
        assert yours["lr"] == mine["lr"]
        assert yours["loss"] == pytest.approx(mine["loss"], rel=close, abs=close), step
        assert yours["skipped"] == mine["skipped"] == (step == POISONED)
        if step != POISONED:
            assert yours["norm"] == pytest.approx(mine["norm"], rel=close)
            assert mine["norm"] > 2 * RATES.max_grad_norm  # type: ignore[operator]
    assert gap(done / "one" / case / "weights.safetensors", done / backend / case / "weights.safetensors") < CLOSE[case]
    assert one[-1]["loss"] != pytest.approx(one[0]["loss"], abs=1e-2)


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_moments_and_masters_are_written_alike(done: Path, backend: str, case: str) -> None:
    for file in ("half.safetensors", "end.safetensors"):
        assert gap(done / "one" / case / file, done / backend / case / file) < 10 * CLOSE[case]


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_each_goes_on_from_what_the_other_has_written(done: Path, backend: str, case: str) -> None:
    """From one process to two ranks of the backend, and back."""
    end = done / "one" / case / "weights.safetensors"
    for there in (done / backend / f"{case} from one", done / "one" / f"{case} from {backend}"):
        assert gap(end, there / "weights.safetensors") < 2 * CLOSE[case], there
        assert [row["lr"] for row in rows_of(there)] == [row["lr"] for row in rows_of(done / "one" / case)[RESUMED:]]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_without_deepspeed_the_error_says_how_to_get_it() -> None:
    trainer = TrainerConfig.model_validate(TRAINERS["zero3"])
    with pytest.raises(ModelError, match=r"pip install 'posttrain\[deepspeed\]', or set fsdp2"):
        ZeroOptimizer(policy_of("tied"), RATES, STEPS, trainer, ALONE)
