"""The README says what is there: tree, links, example; and the pages made from the code are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from cli_runs import command_in
from posttrain.config import AlgorithmConfig, DataConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def test_it_is_short_and_begins_with_the_two_commands():
    assert len(README.splitlines()) <= 150
    first_screen = "\n".join(README.splitlines()[:20])
    assert "scripts/demo" in first_screen
    assert "scripts/test" in first_screen


def test_the_tree_is_what_is_on_disk():
    tree = re.search(r"^src/posttrain/\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert tree
    entries = re.findall(r"^( *)(\S+) ", tree[1], re.MULTILINE)
    inside = {name for indent, name in entries if indent}
    outside = {name for indent, name in entries if not indent}
    package = ROOT / "src" / "posttrain"
    on_disk = {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    on_disk |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert inside == on_disk
    assert all((ROOT / name).is_dir() for name in outside)
    assert {"recipes/", "tests/", "docs/", "scripts/"} <= outside


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([^)#]+)\)", README))
    assert linked >= {page.name for page in PAGES[1:]} - {"results_270m.md"}


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """The very files of the README, by the very command."""
    (tmp_path / "guess.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "guess.yaml").write_text(block("yaml"), encoding="utf-8")
    done = command_in(tmp_path, monkeypatch, capfd)("rl", "guess.yaml", "run.steps=3", "--json")
    assert done.code == 0, done.err[-2000:]
    rows = (tmp_path / "runs" / "guess" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    assert '"rollout/invalid": 0.0' in rows[-1]


def test_algorithms_of_the_page_are_configs():
    rows = re.findall(r"\| `(\{.*?\})`", (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"))
    assert len(rows) >= 6
    for row in rows:
        AlgorithmConfig.model_validate(yaml.safe_load(row))


def test_data_section_of_the_page_is_a_config():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for text in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        DataConfig.model_validate(yaml.safe_load(text)["data"])


def test_pages_made_from_the_code_are_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()
    for name, text in made.items():
        stored = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert stored == text, f"docs/{name} is out of date: run `python scripts/reference.py`"
