"""Shared fixtures. Tests that read real data skip where the data folder is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # small operations stall with two OpenMP threads beside a busy process


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout, or $POSTTRAIN_SHARED_DATA."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("POSTTRAIN_SHARED_DATA", default))
    if not path.is_dir():
        pytest.skip(f"real data folder {path} is absent")
    return path
