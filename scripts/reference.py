"""Writes the pages that are made from the code: docs/config.md and docs/metrics.md. A test compares them.

python scripts/reference.py
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.config import RLConfig
from posttrain.runs.metrics import dictionary_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- Made by `python scripts/reference.py`; edit the code instead. -->\n"
CONFIG_HEAD = """# Config reference

A config is one YAML file; `key=value` arguments override it (`run.seed=1`, `algorithm.kl_coef=1e-3`). `${run.seed}`
refers to another key that the file or an override sets. An unknown key is an error that names the nearest valid one and
its line. The resolved config of a run is `RUN/config.yaml`. Only `model.path` and `data.train` have no default.
"""
METRICS_HEAD = """# Metrics

Every number that a run logs is declared once, in `posttrain.runs.metrics.METRICS`: what one value belongs to, and how
the values of a step become one number. A key that is not declared cannot be recorded. Reproducible metrics go to
`metrics.jsonl`; `time/*`, `speed/*`, `memory/*`, `sampler/*` and what else hangs on the machine to `timing.jsonl`.
`<name>` stands for any one word.

Look first at `gap/max` (sampler against trainer; above 1e-3 in float32 something is wrong), `rollout/invalid`, and
`group/no_signal` (at 1 nothing is learnt). A metric that is not there was not measured; it is not 0.
"""


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config models inside a type, e.g. of `tuple[SourceConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def comments(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> the comment on its lines and on the full-line comments right below."""
    source = textwrap.dedent(inspect.getsource(model))
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        below = last
        while below < len(lines) and lines[below].lstrip().startswith("#"):
            below += 1
        texts = [line.rpartition("  # ")[2] for line in lines[first:last] if "  # " in line]
        texts += [line.strip().lstrip("# ") for line in lines[last:below]]
        found[node.target.id] = " ".join(texts)
    return found


def type_text(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inside[0]) + bounds(inside[1:])
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, inside))
    if origin is Literal:
        return " or ".join(map(str, inside))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_text, inside))}]"
    names = {NoneType: "none", Ellipsis: "..."}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


def bounds(metadata: Iterable[Any]) -> str:
    """ ", > 0" and the like, of pydantic's constraints; a FieldInfo inside a type carries its own."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    flat = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    said = [(sign, getattr(one, key, None)) for one in flat for key, sign in signs.items()]
    return "".join(f", {sign} {value}" for sign, value in said if value is not None)


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if value is None or value == "":
        return "" if value == "" else "none"
    return f"`{'true' if value is True else 'false' if value is False else value}`"


def section(path: str, model: type[BaseModel], told: dict[type[BaseModel], str]) -> Iterator[str]:
    """The tables of a model and of the models in it, each under its dotted path; told: model -> where its table is."""
    if model in told:
        yield f"## {path}\n\nAs `{told[model]}`.\n"
        return
    told[model] = path
    about = (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ")
    said, inner = comments(model), []
    rows = []
    for name, field in model.model_fields.items():
        models = list(models_in(field.annotation))
        if models:
            inner += [(f"{path}.{name}" if path else name, found) for found in models]
            continue
        text = (field.description or said.get(name, "")).replace("|", "\\|")
        kind = (type_text(field.annotation) + bounds(field.metadata)).replace("|", "\\|")
        rows.append(f"| `{name}` | {kind} | {default_text(field)} | {text} |")
    yield f"## {path}\n\n{about}\n" if path else ""
    if rows:
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n"
    for place, found in inner:
        yield from section(place, found, told)


def pages() -> dict[str, str]:
    """File name -> text."""
    config = "\n".join(part for part in section("", RLConfig, {}) if part)
    return {
        "config.md": f"{MADE}{CONFIG_HEAD}\n{config}",
        "metrics.md": f"{MADE}{METRICS_HEAD}\n{dictionary_markdown()}",
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
