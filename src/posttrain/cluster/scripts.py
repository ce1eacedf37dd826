"""Job scripts for clusters that others run: what to hand to `sbatch`, and to `ray job submit`."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

FIRST_PORT, PORTS = 20_000, 10_000  # by the number of the job: jobs may share their first node


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run and the machines it asks for. gpus = 0: ranks on CPUs, `ranks` of them a node. samplers: of the config."""

    config: Path
    run_dir: Path
    name: str
    settings: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 8
    ranks: int | None = None  # a node; None: one per GPU
    cpus: int | None = None  # a node
    hours: float = 24.0
    partition: str | None = None
    samplers: int = 0

    def __post_init__(self) -> None:
        counts = (self.nodes, self.ranks, self.cpus)
        if any(count is not None and count < 1 for count in counts) or self.gpus < 0 or not 0 < self.hours < math.inf:
            asked = f"nodes={self.nodes}, gpus={self.gpus}, ranks={self.ranks}, cpus={self.cpus}, hours={self.hours}"
            raise ValueError(f"a job needs nodes, ranks and cpus >= 1, gpus >= 0 and hours > 0; got {asked}")
        if self.all_ranks < 1:
            raise ValueError(f"cluster.samplers is {self.samplers}, which leaves no GPU to a rank; ask for more nodes")

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus) if self.ranks is None else self.ranks

    @property
    def all_ranks(self) -> int:
        """What the samplers leave, unless the ranks of a node are given."""
        return self.nodes * self.ranks_per_node - (self.samplers if self.ranks is None and self.gpus else 0)


def slurm_script(job: Job) -> str:
    """For `sbatch`: one torchrun per node, which meet on the first. A job that is requeued goes on with its run.

    Raises ValueError for samplers apart, which torchrun does not start.
    """
    if job.samplers:
        raise ValueError(f"cluster.samplers is {job.samplers}, and torchrun starts none: use a Ray cluster (--on ray)")
    wanted = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus,
        "time": _clock(job.hours),
        "partition": job.partition,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in wanted.items() if value is not None]
    torchrun = (
        f'torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {job.ranks_per_node} --rdzv-id "$SLURM_JOB_ID" '
        f'--rdzv-backend c10d --rdzv-endpoint "$head:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"'
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "set -euo pipefail",
            'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            f"if [ -f {shlex.quote(str(job.run_dir / 'config.yaml'))} ]; then",
            f"  train=({_words('resume', job.run_dir)} --ranks {job.nodes * job.ranks_per_node})",
            "else",
            f"  train=({_words('rl', job.config, *job.settings)})",
            "fi",
            f'srun {torchrun} -m posttrain "${{train[@]}}"',
            "",
        ]
    )


def ray_command(job: Job, address: str) -> str:
    """`ray job submit`: the run's driver goes to the cluster at `address`, which places the ranks."""
    settings = (*job.settings, f"trainer.ranks={job.all_ranks}", "cluster.ray=auto")
    entry = _words("python", "-m", "posttrain", "rl", job.config, *settings)
    return f"ray job submit --address {shlex.quote(address)} --working-dir . -- {entry}\n"


def _words(*words: object) -> str:
    return shlex.join(str(word) for word in words)


def _clock(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60}:{minutes % 60:02d}:00"
