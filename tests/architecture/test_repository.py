"""Recipes load, README code runs, and no text depends on one machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Program
from posttrain.config import RLConfig
from posttrain.runs.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
CLI = "from posttrain.cli import main; main()"
RECIPES = sorted((ROOT / "recipes").glob("**/*.y*ml"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".cfg", ""}


def tracked() -> list[Path]:
    """The files of the repository; all files below it where git is absent."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for part in ("src", "tests", "docs", "recipes", "scripts") for path in (ROOT / part).rglob("*")]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(path: Path):
    config = load_config(RLConfig, path)
    assert config.run.steps >= 1


def test_texts_name_no_machine():
    """No absolute path of somebody's machine, no private host."""
    machine = re.compile(r"(?<![\w.:/<{])/(?:home|Users|root|work|mnt|opt|scratch|data)/[\w.-]+")
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if machine.search(line) and path.name != "test_repository.py":
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "absolute paths:\n" + "\n".join(found)


def code_blocks(language: str) -> list[tuple[str, str]]:
    """(file:line, code) of the fenced blocks of the README and docs."""
    pages = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.is_file()]
    blocks = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: found.start()].count("\n") + 1
            blocks.append((f"{page.relative_to(ROOT)}:{line}", found[1]))
    return blocks


@pytest.mark.parametrize(("place", "code"), code_blocks("python"), ids=lambda value: value if "\n" not in value else "")
def test_python_blocks_run(place: str, code: str, tmp_path: Path):
    status, _, err = Program(tmp_path, code=code, inside=True).ended(SECONDS)
    assert status == 0, f"{place}:\n{err[-2000:]}"


def shell_commands() -> list[tuple[str, str]]:
    """(place, subcommand) of every `posttrain ...` line in bash blocks."""
    found = []
    for place, code in [*code_blocks("bash"), *code_blocks("sh"), *code_blocks("console")]:
        for line in code.splitlines():
            if command := re.match(r"\s*(?:\$ )?(?:\S*/)?posttrain\s+([a-z][a-z-]*)", line):
                found.append((place, command[1]))
    return found


def test_commands_in_bash_blocks_exist():
    named = shell_commands()
    if not named:
        pytest.skip("no bash block names a posttrain command")
    done = subprocess.run([sys.executable, "-c", CLI, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    offered = set(re.findall(r"^\W*([a-z][a-z-]+)\s", done.stdout, re.MULTILINE))
    missing = [f"{place}: posttrain {command}" for place, command in named if command not in offered]
    assert not missing, f"unknown commands: {missing}; offered: {sorted(offered)}"


def test_scripts_named_in_texts_exist():
    for place, code in [*code_blocks("bash"), *code_blocks("sh")]:
        for name in re.findall(r"(?<![\w/])((?:scripts|recipes|benchmarks)/[\w./-]+)", code):
            assert (ROOT / name).exists(), f"{place} names {name}, which does not exist"


def test_scripts_are_executable_and_strict():
    sourced = ROOT / "scripts" / "venv"
    commands = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix and path != sourced]
    for path in [*commands, ROOT / ".ci" / "run"]:
        assert path.stat().st_mode & 0o111, f"{path} cannot be executed"
        assert "set -euo pipefail" in path.read_text(encoding="utf-8"), f"{path} goes on after errors"


def test_the_script_for_gpus_runs_every_file_that_asks_for_one():
    asks = re.compile(r"torch\.cuda\.(device_count|is_available)\(\)")
    without = {"tests/loops/test_doctor.py", "tests/invariants/test_deepspeed.py"}  # which run where there is none
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    listed = set(re.findall(r"tests/\S+\.py", (ROOT / "scripts" / "test_gpu").read_text(encoding="utf-8")))
    assert asking - without - listed == set()
    assert [name for name in sorted(listed) if not (ROOT / name).is_file()] == []
