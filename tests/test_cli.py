"""The public commands: what they print, their exit codes, and what they say about bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import Command, command_in, write_config
from forked import COMMAND, Program

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    write_config(tmp_path / "run.yaml")
    return command_in(tmp_path, monkeypatch, capfd)


def commands() -> list[str]:
    shown = subprocess.run([sys.executable, "-m", "posttrain", "--help"], capture_output=True, text=True, check=True)
    return re.findall(r"^│ ([a-z][\w-]+) ", shown.stdout, flags=re.MULTILINE)


def test_python_m_posttrain_lists_the_commands() -> None:
    assert {"plan", "rl", "resume"} <= set(commands())


def test_every_command_explains_itself_and_each_of_its_options(command: Command) -> None:
    for name in commands():
        shown = command(name, "--help")
        assert shown.code == 0
        assert shown.err == ""
        assert re.search(r"Usage: (?:.*\S.*\n)+\s*\n ?\w.{15,}", shown.out), (
            f"{name}: no sentence says what it does\n{shown.out}"
        )
        assert max(map(len, shown.out.splitlines())) <= 100


def test_no_command_shows_the_help_and_an_unknown_one_the_way_to_it(command: Command) -> None:
    assert "Usage: " in command().out + command().err
    wrong = command("trian")
    assert wrong.code == 2
    assert "No such command 'trian'" in wrong.err
    assert "--help" in wrong.err


def test_a_plan_as_json_is_one_line_of_json_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    planned = command("plan", "run.yaml", "run.steps=3", "--json")
    record = json.loads(planned.out)
    assert (planned.code, record["steps"], record["episodes_per_step"], record["optimizer_steps"]) == (0, 3, 4, 3)
    assert "4" in command("plan", "run.yaml").out
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_run_ends_in_one_line_of_json_and_a_finished_run_resumes_to_the_same(command: Command) -> None:
    ran = command("rl", "run.yaml", "run.dir=r", "run.sinks=[]", "--json")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert (record["run"], record["step"]) == ("r", 1)
    assert 0 <= record["eval/reward"] <= 1
    again = command("resume", "r", "--json")
    assert again.code == 0
    assert json.loads(again.out) == record
    assert "finished" in again.err


# ---------------------------------------------------------------- bad input, found before anything starts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["batch.promts_per_step=2"],
            "'batch.promts_per_step=2': unknown key .* Did you mean 'batch.prompts_per_step'",
        ),
        (["batch.prompts_per_step=two"], r"batch.prompts_per_step: .* valid integer.*\(got \"two\"\)"),
        (["run.steps=0"], "run.steps: .* greater than 0"),
        (["optimizer.lr=fast"], r"optimizer.lr: .*number.*\(got \"fast\"\)"),
        (["run.steps"], "write key=value"),
        (["env.name=serch"], "unknown env 'serch'. Did you mean 'search'"),
        (["reward.name=emm"], "unknown reward 'emm'. Did you mean 'em'"),
        (["algorithm.advantage=grppo"], "unknown advantage 'grppo'. Did you mean 'grpo'"),
        (["algorithm.loss=ppoclip"], "unknown loss 'ppoclip'. Did you mean 'ppo_clip'"),
        (["algorithm.aggregate=tokenmean"], "unknown aggregate 'tokenmean'. Did you mean 'token_mean'"),
        (["env.options={max_turn: 3}"], "unknown option of search 'max_turn'. Did you mean 'max_turns'"),
        (["env.options={max_turns: -1}"], "env search cannot be made with .*-1.*: ValueError: .*max_turns >= 0"),
        (["data.train=gone.jsonl"], r"data file 'gone.jsonl' does not exist \(looked at .*gone.jsonl\)"),
        (["data.train=empty.jsonl"], "source 'empty' is empty: empty.jsonl has no rows"),
        (
            ["data.train=no_answer.jsonl"],
            "1 of 2 rows cannot be used.*no_answer.jsonl line 2, column 'answer': is missing",
        ),
        (["data.train=broken.jsonl"], "1 of 2 rows cannot be used.*broken.jsonl line 2: is no JSON"),
        (
            ["data.train={path: misrouted.jsonl, columns: {env: env}}"],
            "misrouted.jsonl line 1: .*unknown env 'serch'. Did you mean 'search'",
        ),
        (["data.max_prompt_tokens=3"], "prompts have more than 3 tokens; raise data.max_prompt_tokens"),
        (["limits.max_prompt_tokens=3"], "prompts have more than 3 tokens; raise limits.max_prompt_tokens"),
        (["limits.max_episode_tokens=4"], "prompts have more than 3 tokens; raise limits.max_episode_tokens"),
        (["retrieval.corpus=gone.jsonl"], "gone.jsonl: no such file"),
        (["retrieval.corpus=twins.jsonl"], "twins.jsonl, row 2: id '1' was used by row 1 already"),
        (["retrieval.corpus=empty.jsonl"], "empty.jsonl holds no passage"),
        (["retrieval.corpus=posttrain.envs.tiny_world:pasages"], "has no 'pasages'. Did you mean 'passages'"),
        (
            ["retrieval.corpus=null", "retrieval.index=gone"],
            "gone is no index: manifest.json is missing; build it with",
        ),
        (["retrieval.url=http://127.0.0.1:9"], "exactly one of corpus, index and url; got ..corpus., .url.."),
        (
            ["retrieval.corpus=null", "retrieval.url=localhost:8"],
            "expected a URL such as http://127.0.0.1:8000",
        ),
        (["model.path=gone"], "no model directory gone; model.path must hold config.json and .*safetensors"),
        (["model.path=empty.jsonl"], "empty.jsonl is a file; model.path must be the directory"),
        (["model.path=pickled"], "pickled holds pickled weights .pytorch_model.bin., which can run code"),
        (["model.path=no_tokenizer"], "no tokenizer could be loaded from model.path = no_tokenizer .*tokenizer.json"),
        (["model.path=bad_tokenizer"], "no tokenizer could be loaded from model.path = bad_tokenizer .*tokenizer.json"),
        (["model.path=cut"], "the model at cut cannot be read: .*"),
        (["run.dir=empty.jsonl"], "the run directory empty.jsonl cannot be written: File exists; set run.dir"),
        (["run.dir=empty.jsonl/x"], "the run directory empty.jsonl/x cannot be written: Not a directory; set run.dir"),
        (["run.dir=pickled"], "pickled is not empty .it holds 'config.json'.; set run.name or run.dir to a new folder"),
    ],
)
def test_bad_input_is_told_before_a_run_exists(
    changes: list[str], message: str, command: Command, tmp_path: Path
) -> None:
    lay_out_bad_things(tmp_path)
    said = command("rl", "run.yaml", "run.dir=r", *changes).refused()
    assert re.search(message, said, flags=re.DOTALL), said
    assert len(said) < 1500
    assert not (tmp_path / "r" / "config.yaml").exists()


def lay_out_bad_things(folder: Path) -> None:
    good = {"id": "1", "question": "Where is it?", "answer": "Paris", "contents": '"T"\nalpha'}
    files = {
        "empty.jsonl": "",
        "no_answer.jsonl": json.dumps(good) + '\n{"id": "2", "question": "What is it?"}\n',
        "broken.jsonl": json.dumps(good) + '\n{"id": \n',
        "misrouted.jsonl": json.dumps(good | {"env": "serch"}) + "\n",
        "twins.jsonl": json.dumps(good) + "\n" + json.dumps(good) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02")
    model = ROOT / "src" / "posttrain" / "assets" / "tiny_search_base"
    for name in ("no_tokenizer", "bad_tokenizer", "cut"):
        (folder / name).mkdir()
        for file in model.iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    (folder / "bad_tokenizer" / "tokenizer.json").write_text("{}")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def test_rows_that_are_dropped_on_request_are_counted_on_the_terminal(command: Command, tmp_path: Path) -> None:
    lay_out_bad_things(tmp_path)
    assert command("plan", "run.yaml").err == ""
    planned = command("plan", "run.yaml", "data.train=no_answer.jsonl", "data.invalid=drop")
    assert planned.code == 0
    assert "data.train, no_answer: 1 tasks (2 rows read, 0 filtered out, 1 invalid dropped; " in planned.err


def test_a_typing_error_in_a_file_is_told_with_its_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text((tmp_path / "run.yaml").read_text() + "smok: {run.steps: 1}\n")
    line = len((tmp_path / "typo.yaml").read_text().splitlines())
    assert f"typo.yaml:{line}: unknown key 'smok'. Did you mean 'smoke'?" in command("plan", "typo.yaml").refused()
    assert "ru.yaml: there is no such config file. Did you mean run.yaml?" in command("rl", "ru.yaml").refused()
    (tmp_path / "link.yaml").symlink_to("gone.yaml")
    assert "link.yaml: is a link to gone.yaml, which is not there" in command("rl", "link.yaml").refused()
    (tmp_path / "odd.yaml").write_text("run: [unclosed\n")
    assert re.search(r"odd.yaml:\d: not valid YAML", command("rl", "odd.yaml").refused())


def test_every_problem_of_a_config_is_told_at_once(command: Command) -> None:
    said = command("rl", "run.yaml", "run.steps=-1", "batch.epochs=x", "env.nmae=search").refused()
    assert all(key in said for key in ("run.steps", "batch.epochs", "env.name"))


def test_smoke_without_small_numbers_does_not_start_the_large_run(command: Command, tmp_path: Path) -> None:
    assert (
        "run.yaml: --smoke takes its small numbers from the section `smoke`"
        in command("rl", "run.yaml", "--smoke").refused()
    )
    assert not (tmp_path / "runs").exists()


def test_a_place_that_cannot_be_written_is_told_without_a_traceback(command: Command, tmp_path: Path) -> None:
    said = command("eval", "run.yaml", "--out", "run.yaml/out").refused()
    assert f"run.yaml/out cannot be written: {tmp_path}/run.yaml is no folder" in said, "before anything is answered"
    said = command("serve", "run.yaml", "--record", "run.yaml").refused()
    assert "run.yaml is no folder that may be written to; set --record" in said
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "two words"}\n')
    said = command("index", "corpus.jsonl", "run.yaml/idx").refused()
    assert f"run.yaml/idx cannot be written: {tmp_path}/run.yaml is no folder" in said
    said = command("index", "corpus.jsonl", "run.yaml", "--overwrite").refused()
    assert "run.yaml is a file, and an index is a folder, so it is not overwritten" in said
    assert "choose another name" in command("eval", "x" * 300).refused()


# ---------------------------------------------------------------- indexes


def test_a_damaged_index_is_refused_by_whoever_opens_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "T\\nalpha beta"}\n')
    assert "1 passages" in command("index", "corpus.jsonl", "idx").out
    assert "idx exists already" in command("index", "corpus.jsonl", "idx").refused()
    assert "gone.jsonl: no such file" in command("index", "gone.jsonl", "other").refused()
    assert (
        "empty must be one of error, drop, got 'keep'"
        in command("index", "corpus.jsonl", "other", "--empty", "keep").refused()
    )
    assert not (tmp_path / "other").exists()
    scores = tmp_path / "idx" / "data.npy"
    scores.write_bytes(scores.read_bytes()[:-1] + b"x")
    said = "idx/data.npy was changed since it was built .sha256 differs.; build the index again"
    for arguments in (
        ["rl", "run.yaml", "run.dir=r", "retrieval.corpus=null", "retrieval.corpus_options={}", "retrieval.index=idx"],
        ["serve-search", "idx"],
    ):
        assert re.search(said, command(*arguments).refused())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("port", ["-1", "65536"])
@pytest.mark.parametrize(
    "served", [["serve", "run.yaml"], ["serve-search", "i"], ["serve-reward", "m"], ["serve-tools"]]
)
def test_a_port_that_there_is_not_is_refused_before_anything_is_loaded(
    command: Command, served: list[str], port: str
) -> None:
    done = command(*served, "--port", port)
    assert done.code == 2
    assert "equal to" in done.err
    assert "--port" in done.err


def test_a_syntax_that_there_is_not_is_refused_before_the_model_is_loaded(command: Command) -> None:
    said = command("serve", "run.yaml", "model.path=gone", "--syntax", "hermez").refused()
    assert "--syntax: there is no syntax 'hermez'. Did you mean" in said


def test_a_setting_of_a_served_reward_model_without_a_value_is_refused(command: Command) -> None:
    assert "expected key=value, got 'squash'" in command("serve-reward", "model", "--set", "squash").refused()


# ---------------------------------------------------------------- run directories


def test_a_folder_that_holds_a_run_is_not_written_over(command: Command, tmp_path: Path) -> None:
    assert command("rl", "run.yaml", "run.dir=r").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    said = command("rl", "run.yaml", "run.dir=r").refused()
    assert "r already holds a run. Go on with it: `posttrain resume r`" in said
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gone", "gone does not exist; give the folder that the run was started with"),
        ("empty", "empty is no run directory .it has no config.yaml."),
        ("run.yaml", "run.yaml is no run directory"),
    ],
)
def test_there_is_nothing_to_resume(target: str, message: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert re.search(message, command("resume", target).refused())
    assert not list((tmp_path / "empty").iterdir())


def test_a_run_that_could_not_begin_leaves_its_folder_free(command: Command, tmp_path: Path) -> None:
    lay_out_bad_things(tmp_path)
    assert "cannot be read" in command("rl", "run.yaml", "run.dir=r", "model.path=cut").refused()
    assert command("rl", "run.yaml", "run.dir=r").code == 0


def test_a_damaged_checkpoint_is_not_resumed_from(command: Command, tmp_path: Path) -> None:
    assert command("rl", "run.yaml", "run.dir=r", "run.steps=2", "checkpoint.every=1").code == 0
    weights = tmp_path / "r" / "checkpoints" / "step-2" / "optimizer.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = command("resume", "r").refused()
    assert re.search(r"step-2/optimizer.safetensors differs from what was written .checksum.*delete the folder", said)
    for file in weights.parent.iterdir():
        file.unlink()
    weights.parent.rmdir()
    assert command("resume", "r").code == 0
    assert weights.is_file()


def test_a_disk_that_is_full_is_told_and_the_run_can_go_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    import posttrain.loops.learner

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(posttrain.loops.learner, "save_file", full)
        said = command("rl", "run.yaml", "run.dir=r").refused()
    assert "No space left on device; choose another place" in said
    assert "posttrain resume r" in said
    assert command("resume", "r").code == 0
    assert (tmp_path / "r" / "checkpoints" / "step-1" / "manifest.json").is_file()


def test_ctrl_c_leaves_a_run_that_goes_on_where_its_last_checkpoint_is(command: Command, tmp_path: Path) -> None:
    write_config(tmp_path / "run.yaml", {"run": {"steps": 60, "dir": "r"}, "checkpoint": {"every": 1}})
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    run = Program(tmp_path, "rl", "run.yaml", code=f"{heard}; {COMMAND}", inside=True)
    ends = time.monotonic() + 120
    while not any((tmp_path / "r" / "checkpoints").glob("step-*")) and time.monotonic() < ends:
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    status, _, err = run.ended(60)
    assert status == 130
    done = re.search(r"interrupted. (\d+) of 60 steps are done; .*: posttrain resume r\n", err)
    assert done, err
    assert "Traceback" not in err
    config = (tmp_path / "r" / "config.yaml").read_text()
    (tmp_path / "r" / "config.yaml").write_text(config.replace("steps: 60", f"steps: {int(done[1]) + 1}"))
    again = command("resume", "r", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out.splitlines()[-1])["step"] == int(done[1]) + 1
