"""Writes the generated part of docs/algorithms.md: a section for every row of every table. A test compares it.

python scripts/algorithms_page.py
"""

from __future__ import annotations

from pathlib import Path

from posttrain.runs.catalogue import as_markdown, rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
MARK = "<!-- Made by `python scripts/algorithms_page.py` from here on; edit the docstrings instead. -->\n"


def page(text: str) -> str:
    """The page with its generated part as the code has it now."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name} lacks the line {MARK.strip()}")
    return f"{head}{MARK}\n{as_markdown(rows())}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
