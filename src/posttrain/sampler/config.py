"""Which engine samples: the config section `sampler`."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OPTIONS: dict[str, tuple[str, ...] | None] = {  # None: the engine itself knows them
    "native": ("max_batch", "tokens_per_step", "kv_gib"),
    "vllm": None,
    "server": ("concurrency", "timeout_seconds"),
}


class SamplerConfig(BaseModel):
    """What generates tokens: the policy's own module, an engine with a copy of its weights, or a server (which does
    not train)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["native", "vllm", "server"] = "native"
    options: dict[str, Any] = Field(
        default={},
        description="of the engine. native: max_batch, tokens_per_step, kv_gib; vllm: its EngineArgs, by name; "
        "server: concurrency, timeout_seconds",
    )
    transport: Literal["auto", "memory", "disk", "broadcast"] = Field(
        default="auto", description="how weights get to vllm; auto: memory, and disk where it has several processes"
    )
    max_probe_gap: float | None = Field(
        default=None,
        gt=0,
        description="the most that a log-prob of vllm may differ from the trainer's after a transfer; none: 1e-3 in "
        "float32, 0.3 in bfloat16",
    )
    url: str | None = Field(default=None, description="of the server, with /v1: vLLM's, or that of `posttrain serve`")
    model: str | None = Field(default=None, description="the server's name for it; none: the first that it lists")
    token_env: str | None = Field(default=None, description="environment variable with the server's API key")

    @model_validator(mode="after")
    def _fits(self) -> SamplerConfig:
        known = OPTIONS[self.engine]
        for name in self.options:
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f" ({', '.join(known)})"
                raise ValueError(f"sampler.options.{name} is no option of the engine {self.engine}{hint}")
        if (self.url is not None) != (self.engine == "server"):
            raise ValueError("sampler.url goes with sampler.engine: server, and the other way round")
        if self.engine != "server" and (self.model or self.token_env):
            raise ValueError("sampler.model and sampler.token_env go with sampler.engine: server")
        if self.engine != "vllm" and (self.transport != "auto" or self.max_probe_gap is not None):
            raise ValueError("sampler.transport and sampler.max_probe_gap go with sampler.engine: vllm")
        return self
