"""After putting the state back, every generator goes on with the same numbers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from posttrain.runs.rng import rng_state, seed_everything, set_rng_state


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_state_survives_json():
    seed_everything(3)
    draw()
    saved = json.loads(json.dumps(rng_state(), allow_nan=False))
    expected = [draw() for _ in range(3)]
    seed_everything(99)
    set_rng_state(saved)
    assert [draw() for _ in range(3)] == expected


def test_seeding_fixes_every_generator():
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(2**40 + 1)
    assert draw() != first


def test_a_state_of_a_gpu_is_refused_where_there_is_none():
    state = rng_state()
    state["cuda"] = [*state["cuda"], state["torch"]]
    with pytest.raises(ValueError, match="resume where it was written"):
        set_rng_state(state)
