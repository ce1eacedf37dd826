"""Every metric that the code records is in the metric dictionary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from posttrain.runs.metrics import METRICS

WORD = r"[^/]+"


def recorded(nodes: Iterable[ast.AST]) -> list[tuple[str, int]]:
    """(key as a pattern, line) of calls `metrics.record("a/b", ...)`; the parts of f-strings stand for any word."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("metrics.record") and node.args:
            found.append((as_pattern(node.args[0]), node.lineno))
    return [(pattern, line) for pattern, line in found if pattern is not None]


def as_pattern(key: ast.expr) -> str | None:
    if isinstance(key, ast.Constant):
        return re.escape(str(key.value))
    if isinstance(key, ast.JoinedStr):
        parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else WORD for part in key.values]
        return "".join(parts)
    return None  # a variable: checked when it is recorded


def test_recorded_metrics_are_declared(modules):
    declared = [re.sub(r"<\w+>", "x", key) for key in METRICS]
    keys = [(module.shown, *entry) for module in modules for entry in recorded(module.nodes)]
    unknown = [
        f"{path}:{line}: {key}" for path, key, line in keys if not any(re.fullmatch(key, one) for one in declared)
    ]
    assert not unknown, "declare in posttrain.runs.metrics.METRICS:\n" + "\n".join(unknown)
