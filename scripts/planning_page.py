"""Writes the tables of docs/planning.md for 64 to 1024 GPUs from the planner and the simulator. A test compares them.

python scripts/planning_page.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.runs.layout import Layout, MicroBatch, Roles, SamplerRoom
from posttrain.runs.memory import GIB, ProcessSetup, estimate
from posttrain.runs.model_shape import ModelShape
from posttrain.runs.model_sizes import shape_like
from posttrain.runs.schedule import Episode, Machine, Outcome, Turn, Work, simulate
from posttrain.sampler.native import CUDA_KV_SHARE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
MARK = "<!-- Made by `python scripts/planning_page.py` from here on; edit the script instead. -->\n"

# Measured on one H100 (docs/performance.md), by a model of 0.5 billion parameters
TRAIN_FLOPS = 307e12  # FLOP/s of the training part, on the tokens computed
DECODE_BYTES = 1.05e12  # bytes/s of decoding: 0.99 GB of weights and 1.0 GB of keys in 1.92 ms, 128 sequences
# Public numbers of H100 SXM machines, and how much of them a collective gets
GPU_GIB = 80
NODE = 8  # GPUs
NVLINK = 450e9  # bytes/s in each direction, a GPU
NETWORK = 50e9  # bytes/s, a GPU: 400 Gb/s InfiniBand
SHARE = 0.8
GPUS = (64, 256, 1024)
EPISODES = 4096  # of a step: 512 prompts x 8
PROMPT, TURNS, OBSERVATION = 1024, 3, 512
TURN_TOKENS = (128, 1024)  # drawn evenly
TOOL_SECONDS = 1.5  # mean of an exponential distribution
LONGEST = PROMPT + TURNS * TURN_TOKENS[1] + (TURNS - 1) * OBSERVATION
MICRO_TOKENS = 16384
STEPS, WARM_UP = 6, 2
SIMULATED = 256  # episodes of a step that are simulated; more of them are alike

QWEN: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 152_064, "tie_word_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": QWEN
    | {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    | {"num_attention_heads": 40, "num_key_value_heads": 8},
    "235B, 22B active": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


@cache
def shape(name: str) -> ModelShape:
    return shape_like(SIZES[name])


@dataclass(frozen=True, slots=True)
class Split:
    """How GPUs are shared out: trainers, and samplers in groups that hold the weights together."""

    trainers: int
    samplers: int  # GPUs
    together: int  # of them, with a copy of the weights

    @property
    def copies(self) -> int:
        return self.samplers // self.together


# -- memory ------------------------------------------------------------------------------------------------------------


def on_a_gpu(name: str, ranks: int, *, sampler: bool, loads: bool = True) -> str:
    """The first of the layouts that fits, or what stops the last. sampler: with a copy of the policy, and its cache.
    loads: as models are loaded now, whole on every GPU."""
    worst = None
    for changes in layouts():
        found = estimate(setup(name, ranks, changes, sampler=sampler))
        moments = [moment for moment in found.moments if loads or moment.name != "loading"]
        worst = max(moments, key=lambda moment: moment.bytes)
        needs = worst.bytes + sum(found.outside.values())
        if needs <= GPU_GIB * GIB:
            return f"{needs / GIB:.0f} GiB: {_named(changes)}"
    assert worst is not None
    return f"does not fit: {worst.bytes / GIB:.0f} GiB ({worst.name})"


def setup(name: str, ranks: int, changes: dict[str, Any], *, sampler: bool) -> ProcessSetup:
    rows = changes["rows"]
    layout = Layout(ranks=ranks, **{key: value for key, value in changes.items() if key != "rows"})
    batch = MicroBatch(rows=rows, tokens=rows * 2, read=rows // 2)
    cached = min(256, int(CUDA_KV_SHARE * GPU_GIB * GIB) // (2 * shape(name).key_value_width * LONGEST))
    room = SamplerRoom(rows=cached, capacity=LONGEST, batch=cached, tokens_per_step=16384, graphs=True)
    return ProcessSetup(
        policy=shape(name),
        layout=layout,
        micro_batches=(batch, batch),
        roles=Roles(copy=sampler),
        sampler=room if sampler else SamplerRoom(),
        batch_tokens=EPISODES * LONGEST,
    )


def layouts() -> Iterator[dict[str, Any]]:
    """By price: smaller micro-batches, activations again, sequences over GPUs, offload."""
    for offload in (False, True):
        for team in (1, 2, 4):
            for again in (False, True):
                for rows in (MICRO_TOKENS, 8192):
                    yield {
                        "rows": rows, "gradient_checkpointing": again, "sequence_parallel": team, "offload": offload
                    }  # fmt: skip


def _named(changes: dict[str, Any]) -> str:
    words = [f"micro-batches of {changes['rows']:,}"]
    words += ["activations again"] if changes["gradient_checkpointing"] else []
    words += [f"sequence over {changes['sequence_parallel']}"] if changes["sequence_parallel"] > 1 else []
    words += ["offload"] if changes["offload"] else []
    return ", ".join(words)


def memory_rows() -> Iterator[str]:
    for name in SIZES:
        for ranks in GPUS:
            here, apart = (on_a_gpu(name, ranks, sampler=sampler) for sampler in (True, False))
            yield _row([name, f"{ranks}", here, apart, on_a_gpu(name, ranks, sampler=False, loads=False)])


# -- time --------------------------------------------------------------------------------------------------------------


def gather_seconds(size: ModelShape, ranks: int) -> float:
    """Traffic of a micro-batch: weights gathered forward and again backward, float32 gradients reduced: 8 P bytes."""
    bandwidth = SHARE * (NVLINK if ranks <= NODE else min(NVLINK, NODE * NETWORK))
    return 8 * size.parameters * (ranks - 1) / ranks / bandwidth


def compute_seconds(size: ModelShape, rows: float) -> float:
    """6 operations per parameter that a token meets, the head included; attention left out."""
    return 6 * (size.active_parameters + size.embedding) * rows / TRAIN_FLOPS


def balance_rows(size: ModelShape, ranks: int) -> float:
    """Rows of a micro-batch at which gathering takes as long as computing: below, the network is what limits."""
    return gather_seconds(size, ranks) / compute_seconds(size, 1.0)


def group_of(size: ModelShape) -> int:
    """GPUs that hold one copy of the weights for sampling: at most half of their memory."""
    together = 1
    while 2 * size.parameters / together > GPU_GIB * GIB / 2:
        together *= 2
    return together


def slots_of(size: ModelShape, together: int) -> int:
    """Sequences that fit beside the weights, at their full length; at most 256."""
    free = 0.9 * GPU_GIB * GIB * together - 2 * size.parameters
    return max(1, min(256, int(free // (2 * size.key_value_width * LONGEST))))


def machine_of(size: ModelShape, split: Split, publish: float) -> Machine:
    """A decode step reads the weights once, those of the experts too, and the keys of every sequence."""
    reads = DECODE_BYTES * split.together
    return Machine(
        samplers=max(1, min(split.copies, round(SIMULATED * split.copies / EPISODES))),
        slots=slots_of(size, split.together),
        step_seconds=2 * size.parameters / reads,
        sequence_seconds=2 * size.key_value_width * (LONGEST / 2) / reads,
        publish_seconds=publish,
    )


def publish_seconds(size: ModelShape) -> float:
    """One broadcast from one GPU to all samplers (`weights/buckets.py`): its network card is what limits."""
    return 2 * size.parameters / (SHARE * NETWORK)


def episode(chance: random.Random) -> Episode:
    turns = [Turn(chance.randint(*TURN_TOKENS), chance.expovariate(1 / TOOL_SECONDS)) for _ in range(TURNS - 1)]
    return (*turns, Turn(chance.randint(*TURN_TOKENS)))


def computed_rows() -> float:
    """Of an episode: its share of the prompt, and what follows."""
    return PROMPT / 8 + TURNS * sum(TURN_TOKENS) / 2 + (TURNS - 1) * OBSERVATION


def train_seconds(size: ModelShape, trainers: int) -> float:
    """Of a step. Traffic hides behind computing while it takes less."""
    rows = EPISODES * computed_rows() / trainers
    parts = max(1, round(rows / MICRO_TOKENS))
    return max(compute_seconds(size, rows), parts * gather_seconds(size, trainers))


@cache
def simulated(name: str, split: Split, bound: int) -> Outcome:
    size, chance = shape(name), random.Random(0)
    machine = machine_of(size, split, publish_seconds(size))
    each = max(1, round(EPISODES / split.copies))
    train = train_seconds(size, split.trainers)
    works = [Work([episode(chance) for _ in range(each * machine.samplers)], train) for _ in range(STEPS)]
    return simulate(works, machine, bound, warm_up=WARM_UP)


def best_split(name: str, gpus: int, bound: int) -> tuple[Split, Outcome]:
    """The fastest of a few shares of samplers."""
    together = group_of(shape(name))
    shares = [gpus * eighths // 8 for eighths in range(2, 7)]
    splits = [Split(gpus - samplers, samplers, together) for samplers in shares if samplers % together == 0]
    return min(((s, simulated(name, s, bound)) for s in splits), key=lambda found: found[1].mean_step)


def limits_rows() -> Iterator[str]:
    for name in SIZES:
        size = shape(name)
        together = group_of(size)
        alone = machine_of(size, Split(1, together, together), 0.0)
        yield _row([
            name, f"{size.parameters / 1e9:.1f}", f"{gather_seconds(size, 64):.2f}",
            f"{compute_seconds(size, MICRO_TOKENS):.2f}", f"{balance_rows(size, 64):,.0f}",
            f"{publish_seconds(size):.1f}", f"{together}", f"{alone.slots}",
            f"{1e3 * alone.step(alone.slots):.0f}", f"{alone.slots / alone.step(alone.slots) / together:,.0f}",
        ])  # fmt: skip


def schedule_rows() -> Iterator[str]:
    for name in SIZES:
        for gpus in GPUS:
            yield schedule_row(name, gpus)


def schedule_row(name: str, gpus: int) -> str:
    (_, turns), (split, ahead) = best_split(name, gpus, 0), best_split(name, gpus, 1)
    train, publish = train_seconds(shape(name), split.trainers), publish_seconds(shape(name))
    idle = [f"{100 * share:.0f} %" for share in (ahead.trainer_idle, ahead.samplers_idle)]
    shares = f"{split.trainers} + {split.samplers}"
    seconds = [f"{value:.1f}" for value in (turns.mean_step, ahead.mean_step)]
    limit = first_limit(ahead, train, publish)
    return _row([name, f"{gpus}", *seconds, shares, f"{train:.1f}", *idle, f"{ahead.staleness:.2f}", limit])


def first_limit(done: Outcome, train: float, publish: float) -> str:
    """What most of a step goes to, one step ahead."""
    if publish > 0.25 * done.mean_step:
        return "weights to samplers"
    if done.trainer_idle > 0.25:
        return "tools and stragglers" if done.samplers_idle > 0.25 else "decoding"
    return "training"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(heads: Sequence[str], rows: Iterator[str]) -> str:
    return "\n".join([_row(heads), _row(["---"] * len(heads)), *rows])


def made() -> str:
    memory = ("model", "GPUs", "sampler on the same GPU", "samplers apart: a trainer", "the same, once it has loaded")
    limits = (
        "model", "P, 10^9", "gathers, s", "computing, s", "rows where equal", "publish, s", "GPUs a copy", "slots",
        "decode step, ms", "tokens/s a GPU",
    )  # fmt: skip
    schedule = (
        "model", "GPUs", "in turns, s", "1 ahead, s", "trainers + samplers", "training, s", "trainer idle",
        "samplers idle", "staleness", "what limits",
    )  # fmt: skip
    return (
        "### What fits\n\n" + _table(memory, memory_rows())
        + "\n\n### What a micro-batch, a transfer and a decode step cost\n\n" + _table(limits, limits_rows())
        + "\n\n### A step, in turns and one step ahead\n\n" + _table(schedule, schedule_rows()) + "\n"
    )  # fmt: skip


def page(text: str) -> str:
    """The page with its generated part as the code has it now."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name} lacks the line {MARK.strip()}")
    return f"{head}{MARK}\n{made()}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
