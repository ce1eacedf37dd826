"""The same on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.policy import Policy

from .tiny import CONFIGS, gap, play, prompt, together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_logprobs_equal_the_trainers_on_the_device(family: str, dtype: torch.dtype, allowed: float) -> None:
    model = Policy.random(CONFIGS[family](), seed=0, device="cuda", dtype=dtype)
    sampler = NativeSampler(model, kv_gib=0.1)
    observations = [prompt(7), prompt(12)]
    played = together(
        *(
            play(
                sampler,
                prompt((4, 23, 61)[i % 3]),
                SamplingParams(max_new_tokens=8),
                seed=i,
                session=str(i),
                observations=observations,
            )
            for i in range(9)
        )
    )
    assert gap(model, played) < allowed
