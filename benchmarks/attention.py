"""Attention of packed sequences alone on a GPU, forward and backward, by each version of FlashAttention that is there.

    python benchmarks/attention.py [--times 7] [--tokens 32768]

Prints a row per shape of heads, length and version: milliseconds of a call and TFLOP/s, by the device's clock, medians
of rounds. Ends with one JSON line. Half of the pairs of a query and a key count, since attention is causal: forward
2 x tokens x length x heads x head size operations, backward 2.5 times that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from posttrain.trainer.flash_attention import packed_flash_attention, version_on

HEADS = ((14, 2, 64), (32, 8, 128))  # queries, keys, size: those of Qwen2 0.5B, and those of Llama 8B
LENGTHS = (768, 4_096, 16_384, 32_768)
WARM_UP, CALLS = 2, 5  # rounds; calls of a round, which the host makes ahead of the device


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--times", type=int, default=7, help="rounds, of which the medians are shown")
    asked.add_argument("--tokens", type=int, default=32_768, help="of all sequences together, or of one")
    options = asked.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here, and FlashAttention computes nowhere else")
    rows = list(measured(options.tokens, options.times))
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


def measured(tokens: int, times: int) -> Iterator[dict[str, Any]]:
    versions = sorted({2, version_on(torch.device("cuda"))})
    for heads, key_heads, size in HEADS:
        for length in LENGTHS:
            count = max(1, tokens // length)
            operations = 2.0 * count * length**2 * heads * size
            for version in versions:
                forward, backward = timed(heads, key_heads, size, length, count, version, times)
                speeds = operations / forward / 1e9, 2.5 * operations / backward / 1e9
                print(
                    f"{heads} + {key_heads} heads of {size}, {count} x {length}, version {version}: "
                    f"{forward:.2f} + {backward:.2f} ms, {speeds[0]:.0f} + {speeds[1]:.0f} TFLOP/s"
                )
                yield {
                    "heads": [heads, key_heads, size],
                    "sequences": [count, length],
                    "version": version,
                    "ms": [forward, backward],
                    "tflops": speeds,
                }


def timed(
    heads: int, key_heads: int, size: int, length: int, count: int, version: int, times: int
) -> tuple[float, float]:
    """Milliseconds, forward and backward."""
    rows = count * length
    q, k, v = (
        torch.randn(rows, of, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for of in (heads, key_heads, key_heads)
    )
    ends = torch.arange(0, rows + 1, length, device="cuda", dtype=torch.int32)

    def attend() -> Tensor:
        options: dict[str, Any] = {"scaling": size**-0.5, "window": None, "version": version}
        return packed_flash_attention((q, k, v), (ends, ends), (length, length), **options)

    gradient, out = torch.randn(rows, heads, size, device="cuda", dtype=torch.bfloat16), attend()
    forward = milliseconds(lambda: attend().detach(), times)
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), times)
    return forward, backward


def milliseconds(work: Callable[[], Any], times: int) -> float:
    """The device's, not the host's."""
    found: list[float] = []
    for _ in range(WARM_UP + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    return median(found[WARM_UP:])


if __name__ == "__main__":
    main()
