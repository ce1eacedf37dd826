"""What a person points at (a run, a checkpoint, a config, a model) -> a config with a model in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.config import ConfigError, EvalRunConfig, load_config
from posttrain.loops.learner import threads_for
from posttrain.runs.checkpoint import Checkpoint, KeepBest, best_of, checkpoints_in
from posttrain.trainer.loading import ADAPTER_CONFIG, model_path, pick_device
from posttrain.trainer.loading import load_config as load_model_config
from posttrain.trainer.lora import ADAPTER
from posttrain.trainer.policy import Policy

DATA_FILES = (".jsonl", ".parquet", ".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model and the config that says which world it lives in. `step` and `version` are 0 where no run made it."""

    config: EvalRunConfig
    run: Path | None = None  # the run directory that it belongs to
    step: int = 0
    version: int = 0  # optimizer steps behind the weights

    def load_policy(self) -> Policy:
        model = self.config.model
        if pick_device(model.device).type == "cpu":
            hidden_size = load_model_config(model_path(model.path)).get_text_config().hidden_size
            torch.set_num_threads(threads_for(hidden_size))
        return Policy.from_config(model, version=self.version, seed=self.config.run.seed)


def find_target(
    named: str, overrides: Sequence[str] = (), *, config: Path | None = None, checkpoint: str | None = None
) -> Target:
    """`named` is one of

    a run directory                 its `checkpoint` ("latest", "best" or a step; default latest) under its own config
    a checkpoint of a run           the same, of that step
    a config file (*.yaml)          the model that it names
    a model (directory, name, id)   under `config`, which is needed then
    an adapter (directory)          the same, on the model that `config` names

    With `config`, a run or checkpoint is put into that config instead of its own. `overrides` win over all of it.
    Raises ConfigError saying what was found instead.
    """
    path = Path(named)
    if path.is_file() and path.suffix in DATA_FILES:
        raise ConfigError(
            [f"{named} is a file of data; first comes a run directory, a checkpoint, a config or a model"]
        )
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if config is not None or checkpoint is not None:
            raise ConfigError([f"{named} is a config file: --config and --checkpoint go with a run or a model"])
        return Target(config=load_config(EvalRunConfig, path, overrides))
    run = path if (path / "config.yaml").is_file() else None
    chosen = None
    if run is not None:
        chosen = _choose(run, checkpoint or "latest")
    elif checkpoint is not None:
        raise ConfigError([f"{named} is no run directory, so it has no checkpoint {checkpoint!r} to choose"])
    elif path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        run = path.parent.parent
        chosen = _choose(run, path.name.removeprefix("step-"))
    source = config if config is not None else None if run is None else run / "config.yaml"
    if source is None:
        raise ConfigError(
            [
                f"{named} is neither a run directory nor a config file. If it is a model, say in which world it is to "
                "be put: add --config FILE.yaml"
            ]
        )
    key, model = _model_key(named if chosen is None else str(chosen.path))
    loaded = load_config(EvalRunConfig, source, [f"{key}={json.dumps(model)}", *overrides])
    if chosen is None or loaded.model.named != model:
        return Target(config=loaded)
    return Target(config=loaded, run=run, step=chosen.step, version=int(chosen.state()["policy_version"]))


def check_place(folder: Path, option: str = "--out") -> None:
    """Raises ConfigError for a folder that cannot be made or filled: before a model has worked for it, not after."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError([f"{folder} cannot be written: {there} is no folder that may be written to; set {option}"])


def _model_key(named: str) -> tuple[str, str]:
    """(config key, its value) for what `named` is: model.lora.path for an adapter folder, or a checkpoint that holds
    one; model.path for anything else."""
    place = Path(named)
    if not (place / "config.json").is_file():
        for folder in (place, place / ADAPTER):
            if (folder / ADAPTER_CONFIG).is_file():
                return "model.lora.path", str(folder)
    return "model.path", named


def _choose(run: Path, which: str) -> Checkpoint:
    """The verified checkpoint of a run by "latest", "best" or its step."""
    folder = run / "checkpoints"
    found = checkpoints_in(folder) if folder.is_dir() else []
    if not found:
        raise ConfigError([f"{run} has no checkpoint yet"])
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    if which == "latest":
        chosen = found[-1]
    elif which == "best":
        chosen = _best(run, found)
    else:
        by_step = {str(checkpoint.step): checkpoint for checkpoint in found}
        if which not in by_step:
            raise ConfigError([f"{run} has no checkpoint {which!r}; there are: {steps} (or say latest, best)"])
        chosen = by_step[which]
    chosen.verify()
    return chosen


def _best(run: Path, found: list[Checkpoint]) -> Checkpoint:
    settings = load_config(EvalRunConfig, run / "config.yaml").checkpoint
    if settings.keep_best is None:
        raise ConfigError([f"{run} did not compare its checkpoints: checkpoint.keep_best is not set in its config"])
    best = best_of(found, KeepBest(settings.keep_best, settings.mode))
    if best is None:
        raise ConfigError([f"{run} has not measured {settings.keep_best} at a checkpoint yet"])
    return best
