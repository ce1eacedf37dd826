"""Options of the reward `model`, apart from the model: reading a config must not take a deep-learning library."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class ModelRewardConfig(BaseModel):
    """Options of the reward `model`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="a directory or hub id of a sequence classifier")
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    label: int | None = Field(default=None, ge=0, description="of several classes: the one whose probability counts")
    squash: bool = Field(default=False, description="sigmoid of the score, into 0..1")
    reads: Literal["final", "whole"] = Field(
        default="final", description="final: the last turn without thoughts; whole: all turns and tool output as one"
    )
    max_tokens: PositiveInt = Field(default=4096, description="a longer conversation is Invalid, never cut")
    tokens_per_batch: PositiveInt = Field(default=16384, description="with padding")
