"""The source tree, parsed once."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` without the leading `posttrain.`."""

    path: Path

    @cached_property
    def name(self) -> str:
        parts = self.path.relative_to(SOURCE).with_suffix("").parts[1:]
        return ".".join(part for part in parts if part != "__init__")

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def shown(self) -> str:
        return str(self.path.relative_to(ROOT))


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    modules = [Module(path) for path in sorted((SOURCE / "posttrain").rglob("*.py"))]
    gc.disable()  # hundreds of thousands of nodes come into being, and none of them is garbage
    for module in modules:
        _ = module.nodes
    gc.freeze()
    gc.enable()
    return modules
