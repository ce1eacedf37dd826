"""Shared fixtures, and the order of files. Tests that read real data skip where the data folder is absent."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# Before transformers. No test needs the hub, and where there is no network each question to it is asked for 40 seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Or asking whether there is a GPU begins to use it, after which no process can be forked that does.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

gc.disable()  # until everything is collected: millions of objects come into being, and none of them is garbage
torch.set_num_threads(1)  # small operations stall with two OpenMP threads beside a busy process

TESTS = Path(__file__).parent
LONGEST_FIRST = (  # a long file that begins late has one core work alone in the end
    "sampler/test_compiled_decoder.py",  # not long: it compiles what all others then find compiled
    "test_types.py",  # beside it, since it needs none of that
    "cluster/test_restart.py",
    "invariants/test_layouts.py",
    "loops/test_algorithms.py",
    "invariants/test_resume.py",
    "invariants/test_lora_runs.py",
    "cluster/test_commands.py",
    "cluster/test_apart.py",
    "invariants/test_ranks.py",
    "trainer/test_tensor.py",
    "algorithms/test_mutations.py",
    "cluster/test_ahead_on_ray.py",
    "demo/test_demo.py",
    "test_cli.py",
    "cluster/test_on_ray.py",
    "trainer/test_backends.py",
    "loops/test_ahead.py",
    "loops/test_chat.py",
    "architecture/test_repository.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--no-loadscope-reorder` the workers of xdist take the files in this order."""
    place = {TESTS / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout, or $POSTTRAIN_SHARED_DATA."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("POSTTRAIN_SHARED_DATA", default))
    if not path.is_dir():
        pytest.skip(f"real data folder {path} is absent")
    return path
