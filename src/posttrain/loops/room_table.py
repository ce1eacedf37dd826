"""The estimate of memory for people: a table of parts and moments, and whether they fit."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from posttrain.loops.room import Room
from posttrain.runs.layout import Layout
from posttrain.runs.memory import GIB


def room_table(room: Room) -> RenderableType:
    """Of a process, by part and moment of a step."""
    estimate = room.estimate
    unit, name = (GIB, "GiB") if estimate.bytes >= GIB else (2**20, "MiB")
    moments, worst = estimate.moments, estimate.worst
    where = "GPU" if room.layout.device == "cuda" else "process"
    table = Table(title=f"{name} on each {where}: {described(room.layout)}", title_justify="left")
    table.add_column("")
    for moment in moments:
        table.add_column(moment.name, justify="right", style="bold" if moment is worst else "")
    for part in dict.fromkeys(name for moment in moments for name in moment.parts):
        table.add_row(part, *(_in(unit, moment.parts.get(part)) for moment in moments))
    for part, size in estimate.outside.items():
        table.add_row(part, *(_in(unit, size) for _ in moments))
    table.add_section()
    outside = sum(estimate.outside.values())
    table.add_row("sum", *(_in(unit, moment.bytes + outside) for moment in moments))
    lines: list[RenderableType] = [table]
    if estimate.host:
        parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in estimate.host.items())
        lines.append(Text(f"host memory of each process, GiB: {parts}"))
    return Group(*lines, Text(room.verdict, style="green" if room.fits else "red"))


def described(layout: Layout) -> str:
    """A layout in words."""
    words = [f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}", f"{8 * layout.dtype_bytes}-bit"]
    words += [f"layers over {layout.tensor_parallel}"] if layout.tensor_parallel > 1 else []
    words += [f"sequence over {layout.sequence_parallel}"] if layout.sequence_parallel > 1 else []
    words += ["activations computed again"] if layout.gradient_checkpointing else []
    words += ["offloaded"] if layout.offload and layout.sharded else []
    words += ["layers stay gathered"] if layout.sharded and not layout.reshard_after_forward else []
    return ", ".join(words)


def _in(unit: int, size: int | None) -> str:
    return "" if not size else f"{size / unit:.2f}"
