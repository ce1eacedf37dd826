"""The training part of one step under the magnifying glass: FLOP/s, peak memory, and the largest thing allocated.

Model FLOPs of one update, counted on the tokens that the layers really compute (a prompt that a group shares counts
once where it is computed once; recomputation counts nothing):

    layers       6 x (parameters of the layers, without embeddings and head) x (computed tokens)
    attention    12 x layers x heads x head size x (pairs of a query and a key it sees)
    head         6 x vocabulary x hidden size x (loss positions)

each 2 per multiply-add, once forward and twice backward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from benchmarks.ours import Ours
from benchmarks.work import Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.loops.collect import usable
from posttrain.loops.credit import assign_credit
from posttrain.loops.update import update
from posttrain.trajectory import Trajectory

BF16_PEAK = 989.4e12  # FLOP/s, dense, H100 SXM by its datasheet


@dataclass(frozen=True, slots=True)
class Training:
    """Of one update at `micro_tokens` per micro-batch."""

    micro_tokens: int
    seconds: float  # credit, forward, backward, optimizer
    computed_tokens: int  # rows that went through the layers
    all_tokens: int  # of the trajectories
    loss_positions: int
    flops: float
    peak_bytes: int  # of the device, all that lives there included (0 on a CPU)
    held_bytes: int  # before the update: weights, masters, moments, the sampler's cache
    largest_bytes: int  # the largest single allocation of the update
    tokens_x_vocabulary_bytes: int  # what the logits of one micro-batch's loss positions would take in bfloat16

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "train_tflops": self.tflops,
            "bf16_peak_tflops": BF16_PEAK / 1e12,
            "share_of_bf16_peak": self.tflops * 1e12 / BF16_PEAK,
            "update_bytes": self.peak_bytes - self.held_bytes,
            "logits_were_never_held": self.largest_bytes < self.tokens_x_vocabulary_bytes,
        }


def flops(config: Any, layer_parameters: int, work: Work, computed: int) -> float:
    """See the module's docstring. Whoever computes fewer tokens than there are has computed shared prompts once."""
    prompt, new = work.prompt_tokens, work.turn_tokens[0]
    prompts = (computed - work.episodes * new) / prompt  # how many times a prompt was computed
    pairs = prompts * prompt * (prompt + 1) / 2 + work.episodes * (new * prompt + new * (new + 1) / 2)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    layers = 6 * layer_parameters * computed + 12 * config.num_hidden_layers * width * pairs
    return layers + 6 * config.vocab_size * config.hidden_size * work.episodes * new


def measure_training(ours: Ours, micro_tokens: int, repeats: int) -> Training:
    """The updates of `repeats` rollouts after a warm-up; the median's seconds, and the memory of one more. (Another
    update of the same rollout would do more: its old log-probs would have to be computed.)"""
    batch = ours.config.batch.model_copy(update={"tokens_per_micro_batch": micro_tokens, "cpu_workers": 1})
    learner = replace(ours.learner, config=ours.config.model_copy(update={"batch": batch}))
    work, policy = ours.work, learner.policy
    on_gpu = policy.device.type == "cuda"

    def rolled_out(round_: int) -> list[Trajectory]:
        return usable(asyncio.run(ours.rollout(round_)))

    def train(trajectories: list[Trajectory]) -> float:
        started = time.perf_counter()
        done = update(learner, assign_credit(trajectories, learner), step=0)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        assert done[0].report is not None
        assert not done[0].report.skipped
        return seconds

    seconds = median([train(rolled_out(round_)) for round_ in range(1 + repeats)][1:])
    trajectories = rolled_out(0)
    held = peak = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with counted_rows(policy.decoder) as rows, watched(on_gpu) as largest:
        train(trajectories)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
    config = policy.config
    layers = sum(p.numel() for p in policy.decoder.parameters()) - config.vocab_size * config.hidden_size
    positions = sum(t.policy_token_count for t in trajectories)
    total = positions + work.episodes * work.prompt_tokens
    in_one = min(positions, micro_tokens * positions // total)
    return Training(
        micro_tokens=micro_tokens,
        seconds=seconds,
        computed_tokens=rows[0],
        all_tokens=total,
        loss_positions=positions,
        flops=flops(config, layers, work, rows[0]),
        peak_bytes=peak,
        held_bytes=held,
        largest_bytes=largest[0],
        tokens_x_vocabulary_bytes=in_one * config.vocab_size * 2,
    )


@contextmanager
def counted_rows(decoder: Any) -> Iterator[list[int]]:
    """Counts the tokens that are embedded, into a list of one number."""
    rows = [0]

    def count(module: Any, arguments: tuple[Tensor, ...]) -> None:
        rows[0] += arguments[0].numel()

    hook = decoder.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield rows
    finally:
        hook.remove()


@contextmanager
def watched(on_gpu: bool) -> Iterator[list[int]]:
    """The bytes of the largest allocation, in a list of one number: from the allocator's own history on a GPU, from
    the results of all operations on a CPU (one thread)."""
    largest = [0]
    if not on_gpu:
        with LargestResult(largest):
            yield largest
        return
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    try:
        yield largest
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    largest[0] = max(entry["size"] for trace in traces for entry in trace if entry["action"] == "alloc")


class LargestResult(TorchDispatchMode):
    """Notes the storage of the largest tensor that an operation returns."""

    def __init__(self, largest: list[int]) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor):
                self.largest[0] = max(self.largest[0], result.untyped_storage().nbytes())
        return out
