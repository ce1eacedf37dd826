"""Where the processes of a run are: the config section `cluster`, and what it goes with."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from posttrain.runs.config_file import Section, key_error
from posttrain.sampler.config import SamplerConfig

OF_SAMPLERS = ("colocated", "cpus_per_sampler", "sampler_restarts")  # keys that say nothing without cluster.samplers
VLLM_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")


class ClusterConfig(Section):
    """Where the ranks of `trainer.ranks` run: on this machine, unless Ray is asked to place them."""

    ray: str | None = Field(
        default=None,
        description="local = a cluster of this machine, auto = the one it belongs to, or HOST:PORT; null = no Ray",
    )
    samplers: NonNegativeInt = Field(
        default=0, description="processes of their own that sample, beside the ranks; 0 = the ranks sample"
    )
    colocated: bool = Field(
        default=False,
        description="each sampler is on the GPU, and on Ray in the place, of a rank; false = on one of its own",
    )
    cpus_per_rank: PositiveInt = 1
    cpus_per_sampler: PositiveInt = 1
    num_cpus: PositiveInt | None = Field(
        default=None, description="of a local cluster: cores that Ray gives out; null = as many as are asked for"
    )
    wait_seconds: PositiveInt = Field(default=300, description="for the cluster to have room for all of them")
    timeline: Path | None = Field(
        default=None, description="a file for Ray's own timeline of its tasks, for chrome://tracing; written at the end"
    )
    sampler_restarts: NonNegativeInt = Field(
        default=10, description="samplers that were killed or hang are replaced, so many in all"
    )
    heartbeat_seconds: float = Field(
        default=120.0,
        ge=2,
        allow_inf_nan=False,
        description="a rank or sampler silent for so long is killed, and replaced",
    )
    stall_seconds: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="when nothing moves for so long, the log says who is waited for",
    )
    gpu_memory_gib: float | None = Field(
        default=None, gt=0, description="of a GPU there, for `posttrain plan`; null = that of the GPU here, if any"
    )

    def transport_of(self, sampler: SamplerConfig) -> str:
        """How weights get to the samplers of `cluster.samplers`; see `SamplerConfig.transport`."""
        if sampler.transport != "auto":
            return sampler.transport
        return "shared" if self.colocated else "broadcast"


def check_apart(sampler: SamplerConfig, cluster: ClusterConfig) -> None:
    """Checks the sections of a run with `cluster.samplers`. Raises ConfigError that names the key."""
    if sampler.engine == "vllm_server":
        raise key_error("cluster.samplers", "vllm_server samples elsewhere already; leave cluster.samplers out")
    if sampler.transport == "memory":
        raise key_error(
            "sampler.transport", "cluster.samplers are processes of their own; use shared, broadcast or disk"
        )
    if not cluster.colocated:
        if sampler.sleep:
            raise key_error(
                "sampler.sleep",
                "cluster.samplers have GPUs of their own, whose memory nobody else wants; leave it out, or set "
                "cluster.colocated",
            )
        return
    if sampler.transport == "broadcast":
        raise key_error(
            "sampler.transport", "NCCL joins no two processes of one GPU (cluster.colocated); use shared or disk"
        )
    if sampler.engine == "vllm" and all(sampler.options.get(name) is None for name in VLLM_MEMORY):
        raise key_error(
            "sampler.options",
            "vLLM would take nine tenths of a GPU that it has with a rank (cluster.colocated): set "
            f"{' or '.join(VLLM_MEMORY)}",
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ConfigError for keys that would do nothing."""
    if cluster.timeline is not None and cluster.ray is None:
        raise key_error("cluster.timeline", "it is Ray's, and no cluster.ray is set; leave it out")
    for key in () if cluster.samplers else OF_SAMPLERS:
        if key in cluster.model_fields_set and getattr(cluster, key) != ClusterConfig.model_fields[key].default:
            raise key_error(f"cluster.{key}", "it is for cluster.samplers, and there are none; leave it out")
