"""The demo is the recipe's run, watched: same numbers, and everything it promises to leave and to print."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from posttrain.cli import main
from posttrain.config import RLConfig, load_config
from posttrain.demo.clock import process_seconds
from posttrain.demo.command import demo, show_end
from posttrain.demo.display import Display, cells_of
from posttrain.demo.plot import PlotError, plot_run, read_metrics
from posttrain.demo.train import RECIPE, DemoError, evaluate_again, run_demo
from posttrain.loops import rl
from posttrain.trajectory import Source

SMALL = ("run.steps=2", "batch.prompts_per_step=4", "eval.every=1", "eval.max_tasks=12")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """By the command, as a pipe sees it."""
    out, screen, said = tmp_path_factory.mktemp("demo") / "out", StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(screen), redirect_stdout(said):
        patched.setattr(sys, "argv", ["posttrain", "demo", "--seed", "3", "--out", str(out), "--json", *SMALL])
        patched.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    (line,) = said.getvalue().splitlines()
    return SimpleNamespace(out=out, screen=screen.getvalue(), record=json.loads(line))


def test_the_record_has_every_promised_number(small: SimpleNamespace):
    record = small.record
    for key in ("em_before", "em_after", "em_after_search_off", "searches_per_question", "em_before_sampled"):
        assert 0 <= record[key] <= 4, key
    assert record["em_1hop"] == record["em_after"]
    assert record["em_2hop"] is None  # the first 12 questions have one hop: missing is not zero
    assert record["seconds"] > 0
    assert (record["seed"], record["steps"]) == (3, 2)
    assert record["columns"]["after"]["questions"] == 12


def test_it_leaves_report_curves_and_run(small: SimpleNamespace):
    assert json.loads((small.out / "report.json").read_text()) == small.record
    assert (small.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((small.out / "run" / "checkpoints" / "step-2").glob("model*.safetensors"))


def test_it_prints_a_line_per_step_the_table_and_three_episodes(small: SimpleNamespace):
    lines = small.screen.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0", "1", "2"]
    assert all("KL" in line and "searches" in line for line in steps)
    assert "searches per question" in small.screen
    assert "exact match" in small.screen
    assert "two hops" in small.screen
    for word in ("question  ", "before  ", "after  "):
        assert sum(line.startswith(word) for line in lines) == 3, word


def test_the_demo_changes_no_number_of_the_run(small: SimpleNamespace, tmp_path: Path):
    """`posttrain rl` with the same settings writes the same metrics, byte for byte."""
    settings = [f"run.dir={tmp_path / 'plain'}", "run.seed=3", "run.sinks=[]", *SMALL]
    run = rl.start(load_config(RLConfig, RECIPE, settings))
    try:
        rl.train(run)
    finally:
        run.close()
    plain = (tmp_path / "plain" / "metrics.jsonl").read_bytes()
    assert plain == (small.out / "run" / "metrics.jsonl").read_bytes()


def test_the_kl_from_the_start_policy_is_measured_at_every_step(small: SimpleNamespace):
    rows = {row["step"]: row for row in read_metrics(small.out / "run")}
    assert abs(rows[1]["ref/kl"]) < 1e-5  # nothing has been learnt before the first update
    assert "ref/kl" in rows[2]
    assert "train/kl_loss" not in rows[2]


def test_search_off_hides_every_passage(tmp_path: Path):
    settings = [f"run.dir={tmp_path / 'run'}", "run.sinks=[]", "eval.max_tasks=48"]
    run = rl.start(load_config(RLConfig, RECIPE, settings))
    try:
        shown, hidden = (
            [
                run.parts.renderer.decode([i for i, s in zip(t.token_ids, t.source, strict=True) if s is Source.ENV])
                for t in evaluate_again(run, temperature=1.0, search_enabled=on).trajectories
            ]
            for on in (True, False)
        )
    finally:
        run.close()
    assert any("Title" in text for text in shown)
    assert not any("Title" in text for text in hidden)


def test_a_folder_with_a_demo_is_not_overwritten(small: SimpleNamespace):
    with pytest.raises(DemoError, match="already holds a demo"):
        run_demo(0, small.out)


@pytest.mark.parametrize("override", ["run.dir=elsewhere", "run.seed=2"])
def test_what_the_demo_sets_itself_is_refused(override: str, tmp_path: Path):
    with pytest.raises(DemoError, match="--seed, --out"):
        run_demo(0, tmp_path / "out", [override])


def test_without_matplotlib_there_is_a_clear_message(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'posttrain\[viewer\]'"):
        plot_run(small.out / "run", small.out / "none.png")
    screen = StringIO()
    show_end(small.out, Console(file=screen, width=200))
    assert "pip install 'posttrain[viewer]'" in screen.getvalue()  # the brackets are no markup


def test_a_missing_number_is_a_dash():
    assert cells_of({"reward/mean": 0.5}) == ("0.500", "-", "-", "-")


def test_on_a_terminal_the_table_lives():
    screen = StringIO()
    with Display(Console(file=screen, force_terminal=True, width=80), steps=2) as display:
        display(1, {"reward/mean": 0.25, "rollout/searches": 1.5, "ref/kl": 0.1})
        display(2, {"reward/mean": 0.75, "eval/reward": 0.9})
    text = screen.getvalue()
    assert "0.750" in text
    assert "0.900" in text
    assert "2/2" in text


def test_seconds_count_from_the_start_of_the_process():
    code = (
        "import time; start = time.monotonic(); time.sleep(0.3)\n"
        "from posttrain.demo.clock import process_seconds\n"
        "print(process_seconds() - (time.monotonic() - start))"
    )
    before_the_first_line = float(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert -0.05 < before_the_first_line < 30  # the clock of the kernel ticks in hundredths
    assert process_seconds() > 0


def test_seconds_leave_out_the_installation():
    """With `exec` the demo would be the process that installed everything."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "demo"
    assert "exec " not in script.read_text(encoding="utf-8")


def test_the_recipe_is_the_packages_own_file():
    """One text, so that an installed package runs what the recipe says."""
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "tiny_search.yaml"
    assert recipe.resolve() == RECIPE


WHOLE = 20
SEEDS = [pytest.param(0, 10), *[pytest.param(seed, WHOLE, marks=pytest.mark.slow) for seed in (0, 1, 2)]]


@pytest.mark.parametrize(("seed", "steps"), SEEDS)
def test_the_agent_learns_to_search(seed: int, steps: int, tmp_path: Path):
    """Half of the demo's steps and a third of its questions are enough; the whole demo is a slow test."""
    settings = [f"run.steps={steps}"]
    if steps < WHOLE:
        world = "{path: 'posttrain.envs.tiny_world:eval_rows', options: {seed: 0, per_kind: 40}}"
        settings.append(f"data.eval=[{world}]")
    record = demo(seed, tmp_path / "out", settings, Console(file=StringIO()))
    assert record["em_before"] <= 0.25
    assert record["em_after"] >= 0.95
    assert record["em_2hop"] >= 0.92
    assert record["em_after_search_off"] <= 0.10
