"""What every backend that divides a model among ranks owes: the steps of one process, and its state in the same files.

DeepSpeed has an environment of its own, see scripts/test_deepspeed; without it its cases are skipped. So are those on
GPUs without as many of them as ranks; there steps are compared with those of one process on a GPU. With GPUs at hand
DeepSpeed computes nowhere else: its cases on a CPU are skipped then.
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
from posttrain.trainer import megatron
from posttrain.trainer.distributed_optimizer import DistributedOptimizer
from posttrain.trainer.loading import ModelError, pick_device
from posttrain.trainer.megatron_core import check_model
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig, Stepper
from posttrain.trainer.policy import Policy
from posttrain.trainer.ranks import ALONE, Ranks, TrainerConfig, join_ranks, leave_ranks
from posttrain.trainer.sharding import copy_weights
from posttrain.trainer.zero import ZeroOptimizer
from posttrain.weights.gather import gathered_state

from .batches import ragged_batch
from .models import tiny_config, tiny_policy

GPUS = torch.cuda.device_count()
TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "ddp": {"backend": "ddp"},
    "zero2": {"backend": "deepspeed", "deepspeed": {"stage": 2}},
    "zero3": {"backend": "deepspeed", "deepspeed": {"stage": 3, "persistent_below": 40}},
    "zero3_offload": {"backend": "deepspeed", "offload": True},
    "megatron_dp": {"backend": "megatron"},
    "megatron_tp": {"backend": "megatron", "tensor_parallel": 2},
    "megatron_ep": {"backend": "megatron", "megatron": {"expert_parallel": 2}},
    "megatron_tp_ep": {"backend": "megatron", "tensor_parallel": 2, "megatron": {"expert_parallel": 2}},
    "megatron_on_4": {"backend": "megatron", "tensor_parallel": 2, "megatron": {"expert_parallel": 4}},
    "megatron_dp_on_4": {"backend": "megatron", "tensor_parallel": 2},
}
TRAINERS |= {f"{name}_nccl": TRAINERS[name] for name in ("fsdp2", "ddp", "zero2", "zero3", "zero3_offload")} | {
    "fsdp2_offload_nccl": {"offload": True}
}
CASES = {"tied": "qwen3", "half_frozen": "llama", "bfloat16": "qwen3"}
ON_GPU = {"gpu_tied": "qwen3", "gpu_frozen": "llama", "gpu_words": "qwen2", "gpu_bfloat16": "qwen3", "gpu_moe": "moe"}
WHICH = {
    "fsdp2": list(CASES),
    "ddp": list(CASES),
    "zero2": list(CASES),
    "zero3": list(CASES),
    "zero3_offload": ["bfloat16"],
    "megatron_dp": ["gpu_tied", "gpu_bfloat16", "gpu_moe"],
    "megatron_tp": list(ON_GPU),
    "megatron_ep": ["gpu_moe"],
    "megatron_tp_ep": ["gpu_moe"],
    "megatron_on_4": ["gpu_moe"],
    "megatron_dp_on_4": ["gpu_words", "gpu_moe"],
}
WHICH |= {f"{name}_nccl": ["gpu_tied", "gpu_frozen", "gpu_bfloat16"] for name in ("fsdp2", "ddp", "zero2", "zero3")}
WHICH |= {"zero3_offload_nccl": ["gpu_bfloat16"], "fsdp2_offload_nccl": ["gpu_tied", "gpu_bfloat16"]}
RANKS = {name: 4 if name.endswith("on_4") else 2 for name in TRAINERS}


def on_gpus(backend: str) -> bool:
    return WHICH[backend][0] in ON_GPU


CLOSE = {name: 1e-2 if "bfloat16" in name else 2e-6 for name in CASES}  # of bfloat16 weights: a spacing or two
CLOSE |= {name: 3e-2 if "bfloat16" in name else 1e-5 for name in ON_GPU}  # whose partial sums are rounded, too


def there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def lacks(name: str) -> str | None:
    """What a backend cannot be run here for."""
    package = "deepspeed" if name.startswith("zero") else "megatron" if name.startswith("megatron") else None
    if package is not None and not there(package):
        return f"{package} is not installed"
    if on_gpus(name):
        return f"it needs {RANKS[name]} GPUs, here are {GPUS}" if RANKS[name] > GPUS else None
    return "with a GPU at hand DeepSpeed computes nowhere else" if package is not None and GPUS else None


def needs(name: str) -> pytest.MarkDecorator:
    reason = lacks(name)
    return pytest.mark.skipif(reason is not None, reason=reason or "all is there")


BACKENDS = [pytest.param(name, case, marks=needs(name)) for name in TRAINERS for case in WHICH[name]]
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
    dtype = torch.bfloat16 if case.endswith("bfloat16") else torch.float32
    words: dict[str, Any] = {"vocab_size": 64} if case == "gpu_words" else {}  # two ranks divide them
    config = tiny_config((CASES | ON_GPU)[case], **words)
    if case == "gpu_moe":
        config._experts_implementation = "eager"  # in float32, on any GPU
    policy = Policy.random(config, seed=0, dtype=dtype, device="cuda" if case in ON_GPU else "cpu")
    if case.endswith("frozen"):
        policy.module.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
        policy.decoder.layers[1].requires_grad_(False)  # type: ignore[index]
        policy.checkpoint_activations()
    return policy


def divided(policy: Policy, trainer: TrainerConfig, ranks: Ranks) -> Stepper:
    if ranks.size > 1:
        policy.shard(ranks, trainer)
    if ranks.size > 1 and trainer.zero is not None:
        return ZeroOptimizer(policy, RATES, STEPS, trainer, ranks)
    if policy.megatron is not None:
        return policy.megatron.optimizer(policy.parameters(), RATES, STEPS)
    if ranks.size > 1 and trainer.backend == "ddp":
        return DistributedOptimizer.of_whole(policy.parameters(), RATES, STEPS)
    half = policy.dtype is torch.bfloat16
    mastered = {name for name, _ in policy.parameters()} if half and ranks.size > 1 else set[str]()
    return Optimizer(policy.parameters(), RATES, STEPS, mastered=mastered)


def micro_batches(batch: Batch, ranks: Ranks, together: int) -> list[Batch]:
    """Two for each of two teams of so many ranks, all four for one, of one segment each or two."""
    parts = [select(batch, segments) for segments in ([2, 6], [3, 5], [4], [7, 1])]
    return parts[ranks.rank // together :: ranks.size // together]


def take_steps(
    policy: Policy, optimizer: Stepper, ranks: Ranks, first: int, last: int, *, together: int = 1
) -> list[dict[str, float]]:
    """A loss of log-probs and entropies under changing weights; one step has a loss that is not finite on one rank."""
    rows = []
    for step in range(first, last):
        total = 0.0
        parts = micro_batches(ragged_batch(), ranks, together)
        for number, part in enumerate(parts):
            logprobs, entropy = policy.logprobs_and_entropy(part)
            last_one = number == len(parts) - 1 and ranks.rank >= ranks.size - together
            poison = float("inf") if step == POISONED and last_one else 1.0
            weights = part.positions.to(logprobs.device) / 100
            loss = ((logprobs - 0.1 * (step + 1) * entropy) * weights).sum()
            (loss * poison).backward()
            total += float(loss.detach())
        report = optimizer.step()
        loss = float(ranks.sum(torch.tensor(total / together, dtype=torch.float64)))
        rows.append({"loss": loss, "norm": report.grad_norm, "lr": report.lr, "skipped": report.skipped})
    return rows


def drill(case: str, trainer: TrainerConfig, ranks: Ranks, folder: Path) -> None:
    """Steps, what they left, and the rest of them once more from what was left half-way."""
    folder.mkdir(parents=True, exist_ok=True)
    policy, copy = policy_of(case), policy_of(case)
    optimizer = divided(policy, trainer, ranks)
    with torch.no_grad():
        policy.logprobs(ragged_batch())  # forwards without a backward come between
    rows = take_steps(policy, optimizer, ranks, 0, RESUMED, together=trainer.team)
    copy_weights(policy, copy.module)
    gathered = gathered_state(policy, keep=ranks.leads)
    assert all(torch.equal(gathered[name], value.cpu()) for name, value in copy.module.state_dict().items() if gathered)
    states = {"half": optimizer.state_tensors()}
    rows += take_steps(policy, optimizer, ranks, RESUMED, STEPS, together=trainer.team)
    states["end"] = optimizer.state_tensors()
    if ranks.leads:
        for name, state in states.items():
            save_file(state, folder / f"{name}.safetensors")
        save_file(weights_of(copy.module), folder / "half_weights.safetensors")
        (folder / "rows.json").write_text(json.dumps(rows))
    copy_weights(policy, copy.module)
    if ranks.leads:
        save_file(weights_of(copy.module), folder / "weights.safetensors")


def go_on(case: str, trainer: TrainerConfig, ranks: Ranks, source: Path, folder: Path) -> None:
    """The second half of the steps from the state in `source`, whoever wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    policy, copy = policy_of(case), policy_of(case)
    policy.module.load_state_dict(load_file(source / "half_weights.safetensors"), strict=False)
    optimizer = divided(policy, trainer, ranks)
    optimizer.load_state_tensors(load_file(source / "half.safetensors"))
    rows = take_steps(policy, optimizer, ranks, RESUMED, STEPS, together=trainer.team)
    copy_weights(policy, copy.module)
    if ranks.leads:
        save_file(weights_of(copy.module), folder / "weights.safetensors")
        (folder / "rows.json").write_text(json.dumps(rows))


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in module.named_parameters()}


def drills(backend: str, alone: Path, folder: Path) -> None:
    """On each of two ranks, or of four."""
    ranks = join_ranks(pick_device("cuda" if on_gpus(backend) else "cpu"))
    trainer = TrainerConfig.model_validate(TRAINERS[backend])
    for case in WHICH[backend]:
        drill(case, trainer, ranks, folder / case)
        go_on(case, trainer, ranks, alone / case, folder / f"{case} from one")
    leave_ranks()


class Drills:
    """What was done, each when it is first asked for: by one process, and by the ranks of a backend."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._done: set[str] = set()

    def one(self, case: str) -> Path:
        if case not in self._done:
            drill(case, TrainerConfig(), ALONE, self.base / "one" / case)
            self._done.add(case)
        return self.base / "one" / case

    def of(self, backend: str, case: str) -> Path:
        if backend not in self._done:
            for each in WHICH[backend]:
                self.one(each)
            on_ranks(
                RANKS[backend], self.base / f"log {backend}", drills, backend, self.base / "one", self.base / backend
            )
            self._done.add(backend)
        return self.base / backend / case

    def one_from(self, backend: str, case: str) -> Path:
        """One process that goes on from what the backend has written."""
        folder = self.base / "one" / f"{case} from {backend}"
        go_on(case, TrainerConfig(), ALONE, self.of(backend, case), folder)
        return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("backends"))


def gap(one: Path, other: Path) -> float:
    mine, yours = load_file(one), load_file(other)
    assert mine.keys() == yours.keys()
    assert all(mine[name].dtype == yours[name].dtype for name in mine)
    return max(float((mine[name].double() - yours[name].double()).abs().max()) for name in mine)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_two_ranks_take_the_steps_of_one_process(done: Drills, backend: str, case: str) -> None:
    """Clipped, with a skipped update, decay, moments of its own; sums over micro-batches and ranks, no mean."""
    mine, yours = done.one(case), done.of(backend, case)
    one, two = rows_of(mine), rows_of(yours)
    close = 20 * CLOSE[case]
    for step, (alone, together) in enumerate(zip(one, two, strict=True)):
        assert together["lr"] == alone["lr"]
        assert together["loss"] == pytest.approx(alone["loss"], rel=close, abs=close), step
        assert together["skipped"] == alone["skipped"] == (step == POISONED)
        if step != POISONED:
            assert together["norm"] == pytest.approx(alone["norm"], rel=close)
            assert alone["norm"] > 2 * RATES.max_grad_norm  # type: ignore[operator]
    assert gap(mine / "weights.safetensors", yours / "weights.safetensors") < CLOSE[case]
    assert one[-1]["loss"] != pytest.approx(one[0]["loss"], abs=1e-2)


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_moments_and_masters_are_written_alike(done: Drills, backend: str, case: str) -> None:
    for file in ("half.safetensors", "end.safetensors"):
        assert gap(done.one(case) / file, done.of(backend, case) / file) < 10 * CLOSE[case]


@pytest.mark.parametrize(("backend", "case"), BACKENDS)
def test_each_goes_on_from_what_the_other_has_written(done: Drills, backend: str, case: str) -> None:
    """From one process to two ranks of the backend, and back."""
    end, written = done.one(case) / "weights.safetensors", done.of(backend, case)
    for there in (written.with_name(f"{case} from one"), done.one_from(backend, case)):
        assert gap(end, there / "weights.safetensors") < 2 * CLOSE[case], there
        assert [row["lr"] for row in rows_of(there)] == [row["lr"] for row in rows_of(done.one(case))[RESUMED:]]


@pytest.mark.skipif(there("deepspeed"), reason="deepspeed is installed")
def test_without_deepspeed_the_error_says_how_to_get_it() -> None:
    trainer = TrainerConfig.model_validate(TRAINERS["zero3"])
    with pytest.raises(ModelError, match=r"pip install 'posttrain\[deepspeed\]', or set fsdp2"):
        ZeroOptimizer(policy_of("tied"), RATES, STEPS, trainer, ALONE)


@pytest.mark.skipif(there("megatron"), reason="megatron-core is installed")
def test_without_megatron_the_error_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TrainerConfig.model_validate(TRAINERS["megatron_dp"])
    with pytest.raises(ModelError, match=r"trainer\.backend megatron needs a GPU, and the model is on cpu"):
        policy_of("tied").shard(ALONE, trainer)
    monkeypatch.setattr(megatron, "DEVICES", ("cpu",))
    with pytest.raises(ModelError, match=r"pip install 'posttrain\[megatron\]' \(Python 3.12, CUDA\), or set fsdp2"):
        policy_of("tied").shard(ALONE, trainer)


@pytest.mark.parametrize(
    ("name", "overrides", "trainer", "message"),
    [
        (
            "gemma3",
            {},
            {},
            r"no layers for Gemma3ForCausalLM \(model_type gemma3_text\), only for llama, mistral, qwen2",
        ),
        ("llama", {"attention_bias": True}, {}, "no layers for LlamaForCausalLM with attention_bias"),
        ("llama", {}, {"tensor_parallel": 4}, "do not divide num_key_value_heads = 2 by 4 of LlamaForCausalLM"),
        ("llama", {}, {"megatron": {"expert_parallel": 2}}, "expert_parallel: LlamaForCausalLM has no experts"),
        ("moe", {}, {"megatron": {"expert_parallel": 3}}, "do not divide num_experts = 4 by 3 of Qwen3MoeForCausalLM"),
    ],
)
def test_megatron_names_the_model_that_it_cannot_divide(
    name: str, overrides: dict[str, Any], trainer: dict[str, Any], message: str
) -> None:
    module = tiny_policy(name, **overrides).module
    with pytest.raises(ModelError, match=message):
        check_model(module, TrainerConfig.model_validate({"backend": "megatron"} | trainer))
