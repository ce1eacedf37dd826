"""A run's learning curves as a PNG: reward, evaluation, searches per question, KL. Needs the extra `viewer`."""

from __future__ import annotations

import json
from pathlib import Path

# title -> the metrics in it and their names in the legend
PANELS = {
    "reward in training": {"reward/mean": "mean of the step"},
    "exact match on held-out questions": {
        "eval/reward": "all",
        "eval/source/1-hop": "one hop",
        "eval/source/2-hop": "two hops",
    },
    "searches per question": {"rollout/searches": "training", "eval/searches": "held-out"},
    "KL from the start policy": {"ref/kl": "nats per token"},
}


class PlotError(RuntimeError):
    """No plot can be drawn here; says what to do."""


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plot_run(run_dir: Path, png: Path) -> None:
    """Draws the curves of `run_dir` into `png`. Raises PlotError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise PlotError(f"no plot: matplotlib is missing ({error}); pip install 'posttrain[viewer]'") from error
    rows = read_metrics(run_dir)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for key, name in curves.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        if len(axes.lines) > 1:
            axes.legend()
    figure.savefig(png, dpi=120)
