"""docs/field_cases.md and the tests name each other."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "field_cases.md"


def named_after_cases() -> dict[str, set[str]]:
    """Case -> "folder/file.py::test" of every test that is named after it."""
    found: dict[str, set[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for name, cases in re.findall(r"def (test_((?:p\d{2,3}_)+)\w*)", file.read_text(encoding="utf-8")):
            for case in re.findall(r"p(\d+)_", cases):
                found.setdefault(f"P{case}", set()).add(f"{file.relative_to(TESTS).as_posix()}::{name}")
    return found


def rows_of_the_page() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| P\d", line)]
    rows = {line.split(" | ")[0].removeprefix("| "): re.findall(r"`([^`\s]+\.py::\w+)`", line) for line in lines}
    assert len(rows) == len(lines), "a case has two rows"
    return rows


def test_every_test_that_the_page_names_is_there_and_is_of_that_case() -> None:
    existing = named_after_cases()
    gone = {case: set(tests) - existing.get(case, set()) for case, tests in rows_of_the_page().items()}
    assert not {case: names for case, names in gone.items() if names}


def test_every_case_with_a_test_has_a_row_and_every_row_a_test() -> None:
    rows = rows_of_the_page()
    assert set(rows) == set(named_after_cases())
    assert all(rows.values())
