"""docs/planning.md says what the planner and the simulator say."""

from __future__ import annotations

import pytest

from .test_memory import loaded

script = loaded("scripts/planning_page.py")
TEXT = script.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_memory_and_costs_are_those_of_the_code():
    for row in (*script.memory_rows(), *script.limits_rows()):
        assert f"{row}\n" in TEXT, "run python scripts/planning_page.py"


@pytest.mark.parametrize(("model", "gpus"), [("7B", 256), ("32B", 1024)])
def test_rows_of_the_schedule_are_those_of_the_code(model: str, gpus: int):
    assert f"{script.schedule_row(model, gpus)}\n" in TEXT, "run python scripts/planning_page.py"


@pytest.mark.slow
def test_the_whole_page_is_that_of_the_code():
    assert script.page(TEXT) == TEXT, "run python scripts/planning_page.py"
