"""Which engine samples: the config section `sampler`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError, model_validator

_Count: Any = PositiveInt
_Amount: Any = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_SERVER: dict[str, Any] = {"concurrency": _Count, "timeout_seconds": _Amount}
OPTIONS: dict[str, Mapping[str, Any] | None] = {  # name -> type; None: the engine itself knows them
    "native": {"max_batch": _Count, "tokens_per_step": _Count | None, "kv_gib": _Amount | None},
    "vllm": None,
    "vllm_server": _SERVER | {"patience_seconds": Annotated[float, Field(ge=0)], "host": str | None},
    "server": _SERVER,
}
SERVERS = ("vllm_server", "server")
PUBLISHED = ("vllm", "vllm_server")  # engines that get the policy's weights by a transfer


class SamplerConfig(BaseModel):
    """What generates tokens: the policy's own module (native); an engine or a server that gets copies of its weights
    (vllm, vllm_server); or a server with weights of its own, for evaluation only (server)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["native", "vllm", "vllm_server", "server"] = "native"
    options: dict[str, Any] = Field(
        default={},
        description="of the engine. native: max_batch, tokens_per_step, kv_gib; vllm: its EngineArgs, by name; "
        "vllm_server: concurrency, timeout_seconds, patience_seconds, host; server: concurrency, timeout_seconds",
    )
    transport: Literal["auto", "memory", "disk", "broadcast", "shared"] = Field(
        default="auto",
        description="how weights get to vllm and vllm_server (auto: memory, and disk where it has processes of its "
        "own), or to cluster.samplers (auto: broadcast, and where they are colocated shared: through memory that "
        "processes of one machine share)",
    )
    folder: str | None = Field(
        default=None,
        description="where weights that go by disk lie for the time of the transfer, seen by both sides; none: the "
        "system's temporary folder, for cluster.samplers the run directory",
    )
    sleep: Literal[0, 1, 2] = Field(
        default=0,
        description="vllm's sleep while the trainer works, to leave it the GPU's memory; 1: weights wait in host "
        "memory, 2: they are given up and come anew before each rollout; 0: awake",
    )
    max_probe_gap: float | None = Field(
        default=None,
        gt=0,
        description="the most that a log-prob may differ from the trainer's after a transfer; none: 1e-3 in "
        "float32 (3e-2 on a GPU), 0.3 in bfloat16",
    )
    url: str | None = Field(
        default=None, description="of the server, with /v1: vLLM's, or for `server` that of `posttrain serve`"
    )
    model: str | None = Field(default=None, description="the server's name for it; none: the first that it lists")
    token_env: str | None = Field(default=None, description="environment variable with the server's API key")

    @property
    def computes_as_trainer(self) -> bool:
        """Whether log-probs of the sampler are the trainer's, so that they need not be computed again."""
        return self.engine == "native"

    @property
    def moves_weights(self) -> bool:
        """Whether something is set that only matters where weights are transferred."""
        return self.transport != "auto" or self.max_probe_gap is not None or self.folder is not None

    @model_validator(mode="after")
    def _fits(self) -> SamplerConfig:
        known = OPTIONS[self.engine]
        if known is not None:
            _check_options(self.options, known, self.engine)
        if (self.url is not None) != (self.engine in SERVERS):
            raise ValueError("sampler.url goes with sampler.engine: vllm_server or server, and the other way round")
        if self.engine not in SERVERS and (self.model or self.token_env):
            raise ValueError("sampler.model and sampler.token_env go with sampler.engine: vllm_server or server")
        if self.engine == "vllm_server" and self.transport in ("memory", "shared"):
            raise ValueError(f"sampler.transport: {self.transport} does not reach a server; use disk or broadcast")
        if self.engine != "vllm" and self.sleep:
            raise ValueError("sampler.sleep goes with sampler.engine: vllm, which shares the trainer's GPU")
        if self.folder is not None and self.transport in ("memory", "broadcast", "shared"):
            raise ValueError("sampler.folder goes with sampler.transport: disk")
        return self


def _check_options(given: Mapping[str, Any], known: Mapping[str, Any], engine: str) -> None:
    """Raises ValueError for one that the engine does not have, or whose value is none for it."""
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f" ({', '.join(known)})"
            raise ValueError(f"sampler.options.{name} is no option of the engine {engine}{hint}")
        try:
            TypeAdapter(known[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(f"sampler.options.{name}: {error.errors()[0]['msg']} (got {value!r:.80})") from None
