"""docs/algorithms.md says what the code does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.algorithms import ADVANTAGES, LOSSES
from posttrain.runs.catalogue import TABLES, Row, as_text, rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithms.md"


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_generated_part_is_that_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    assert script("scripts/algorithms_page.py").page(text) == text, "run python scripts/algorithms_page.py"


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.key}-{row.name}")
def test_every_row_has_an_equation_and_a_source_and_is_recommended_for_something(row: Row):
    assert row.equation
    assert not row.equation.endswith(".")
    assert any(character.isdigit() for character in row.source), f"{row.name}: {row.source!r} names no year"
    assert len(row.source) < 140
    by_hand = PAGE.read_text(encoding="utf-8").split("<!-- Made by")[0]
    assert f"`{row.name}`" in by_hand


def test_the_command_lists_every_row_once():
    text = as_text(rows())
    for table in TABLES.values():
        for name in table:
            assert f"\n  {name} " in text
    assert len(rows()) == sum(map(len, TABLES.values()))


def test_the_table_of_what_learns_has_every_advantage_and_every_loss():
    text = PAGE.read_text(encoding="utf-8")
    header = f"| advantage | {' | '.join(sorted(LOSSES))} |"
    assert header in text
    table = text.split(header)[1].split("\n\n")[0]
    assert [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]] == sorted(ADVANTAGES)
