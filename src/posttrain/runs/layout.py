"""How a run is laid out, as far as memory goes: who holds what, and how much is worked on at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one process of a run holds and computes the models; a field for every way of dividing models or work."""

    device: Literal["cuda", "cpu"] = "cuda"
    dtype_bytes: int = 2  # of a number that the models compute with
    ranks: int = 1
    tensor_parallel: int = 1  # ranks that hold a part of every layer each
    sequence_parallel: int = 1  # ranks that share the rows of a micro-batch
    whole_weights: bool = False  # on every rank, which divide masters and moments alone
    offload: bool = False  # shards, gradients and moments in host memory
    reshard_after_forward: bool = True
    gradient_checkpointing: bool = False
    compiled: bool = True  # layers; on CUDA
    numba: bool = False  # whether training on a CPU is compiled by it, where there are rows enough
    grouped_keys: bool = True  # attention takes fewer key heads than query heads; else it gets copies of them
    workers: int = 1  # micro-batches at once on a CPU

    @property
    def sharded(self) -> bool:
        return self.ranks > 1 and not self.whole_weights

    @property
    def stretched(self) -> bool:
        """See `DistributedOptimizer`: masters, also of float32 weights, and moments are divided, gradients are not."""
        return self.ranks > 1 and self.whole_weights

    @property
    def teams(self) -> int:
        """How many groups of ranks there are; the ranks of a team work on the same micro-batch."""
        return max(1, self.ranks // (self.tensor_parallel * self.sequence_parallel))

    @property
    def wide(self) -> bool:
        """Whether weights are their own float32 masters."""
        return self.dtype_bytes >= 4

    @property
    def quick_norms(self) -> bool:
        """`trainer/norms.py`: x and y of a norm are kept, and nothing between them."""
        return self.compiled if self.device == "cuda" else self.wide

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prompt is computed once for its group: `trainer/prefix.py`, `trainer/prefix_varlen.py`."""
        return self.wide if self.device == "cpu" else not self.wide

    @property
    def narrows(self) -> bool:
        """Whether the last layer is computed only where its output is read: `trainer/last_layer.py`."""
        return self.device == "cpu" and self.wide and self.sequence_parallel == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The sizes of one forward and backward pass; tokens, unless said otherwise."""

    rows: int  # computed: a prompt that segments share counts once
    tokens: int  # of all segments: such a prompt counts for each of them
    read: int  # written by the policy: their log-probs are computed
    shared: int = 0  # rows of prompts that several segments share


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which models there are besides the policy."""

    ref: bool = False
    critic: bool = False
    copy: bool = False  # of the policy, for a sampler that cannot run it itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRoom:
    """What the sampler of a process holds besides the policy's weights, and how much it forwards at once."""

    rows: int = 0  # of the cache
    capacity: int = 0  # tokens of a row
    batch: int = 0  # sequences decoded at once
    tokens_per_step: int = 0  # prompts forwarded at once
    graphs: bool = False
    engine_bytes: int = 0  # of another engine, its weights included
    asleep_bytes: int | None = None  # of it in host memory while the trainer works; None: it stays awake
    processes: int = 0  # that hold it, beside the process itself
