"""Where the time of a step goes, by kind of operation, and a picture of it.

python -m benchmarks.profile_step --work 64+64 --work 256+128 --json FILE --picture docs/images/step_cpu.png

On a CPU, one thread does everything, so that kinds add up to the wall time; `python and waiting` is what no operation
of torch accounts for. On a GPU, kernels by their own clock, and `idle` is the rest of the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.ours import Ours
from benchmarks.step import facts
from benchmarks.tiny import write_model
from benchmarks.work import USUAL, WORKS, Work
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from posttrain.loops.collect import usable
from posttrain.loops.credit import assign_credit
from posttrain.loops.update import update

REST = {"cpu": "python and waiting", "cuda": "idle"}
KINDS = {  # the first kind of which a word is in the operation's or kernel's name
    "attention": ("scaled_dot", "flash", "attend", "attention", "bmm", "softmax"),  # on a CPU written out as products
    "matrix products": ("::mm", "addmm", "linear", "gemm", "gemv", "nvjet", "cutlass", "xmma", "addmv", "::mv"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "log-probs, drawing": (
        "logprob",
        "logsumexp",
        "multinomial",
        "draw",
        "sort",
        "topk",
        "cumsum",
        "gather",
        "scatter",
    ),
    "copies": ("copy", "cat", "index", "clone", "fill", "zero", "memcpy", "memset", "embedding"),
    "by element": ("mul", "add", "silu", "exp", "sub", "div", "neg", "pow", "sqrt", "sum", "norm", "mean", "triton"),
}


def profiled(act: Callable[[], Any], device: str) -> tuple[Any, dict[str, float]]:
    """What `act` returns, and its seconds by kind."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as seen:
        started = time.perf_counter()
        result = act()
        if device == "cuda":
            torch.cuda.synchronize()
        wall = time.perf_counter() - started
    return result, by_kind(seen.key_averages(), wall, device)


def by_kind(events: EventList, wall: float, device: str) -> dict[str, float]:
    """Seconds by kind; all kinds together are the wall time."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if device == "cuda":
            is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            spent = event.self_device_time_total if is_kernel else 0.0
        else:
            spent = event.self_cpu_time_total
        if spent:
            seconds[kind_of(event.key)] += spent / 1e6
    seconds[REST[device]] = max(0.0, wall - sum(seconds.values()))
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(w in name.lower() for w in words)), "other operations")


def step_by_kind(work: Work, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """{rollout, train: {kind: seconds}} of one step after some warm-up."""
    alone: dict[str, Any] = {"batch": {"cpu_workers": 1}, "sampler": {"workers": 1}} if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(write_model(Path(folder), work.model, device), work, **alone)
        for round_ in range(rounds):
            ours.step(round_)
        trajectories, rollout = profiled(lambda: asyncio.run(ours.rollout(rounds)), device)

        def train() -> None:
            update(ours.learner, assign_credit(usable(trajectories), ours.learner), step=rounds)

        return {"rollout": rollout, "train": profiled(train, device)[1]}


def picture(works: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """One bar per work and half of its step, seconds by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{work}\n{half}", kinds) for work, halves in works.items() for half, kinds in halves.items()]
    names = list(dict.fromkeys([*KINDS, "other operations", *REST.values()]))
    names = [name for name in names if any(kinds.get(name) for _, kinds in bars)]
    figure, axes = pyplot.subplots(figsize=(9, 0.7 + 0.55 * len(bars)))
    left = [0.0] * len(bars)
    for name, colour in zip(names, pyplot.get_cmap("tab10").colors, strict=False):  # type: ignore[attr-defined]
        widths = [kinds.get(name, 0.0) for _, kinds in bars]
        axes.barh([label for label, _ in bars], widths, left=left, label=name, color=colour, height=0.65)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(USUAL), default="cpu")
    parser.add_argument("--work", action="append", choices=WORKS, help="default: those of the device")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the one that is looked at")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--picture", type=Path, help="file to draw, .png or .svg")
    options = parser.parse_args(arguments)
    names = options.work or USUAL[options.device]
    works = {name: step_by_kind(WORKS[name], options.device, options.warmup) for name in names}
    where = facts(options.device)
    for name, halves in works.items():
        for half, kinds in halves.items():
            print(f"{name} {half}: {sum(kinds.values()):.2f} s;", ", ".join(f"{k} {s:.3f}" for k, s in kinds.items()))
    if options.json:
        options.json.write_text(json.dumps({**where, "device": options.device, "works": works}, indent=1))
    if options.picture:
        picture(works, f"{where['machine']}; commit {where['commit']}; {where['date']}", options.picture)


if __name__ == "__main__":
    main()
