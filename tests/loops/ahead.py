"""What tests of rollouts that run ahead share, whoever samples."""

from __future__ import annotations

import asyncio
import threading

import torch
from torch import Tensor

from loops.toy import rows
from posttrain.envs import Action, Observation, Step
from posttrain.loops import rl
from posttrain.packing import pack
from posttrain.runs.trajectories import read_trajectories
from posttrain.task import Task
from posttrain.trajectory import Trajectory
from sampler.tiny import FLOAT32_GAP

EPISODES, SECONDS = 8, 180.0  # of a step; the longest that anything is waited for
CLOSE = max(1e-4, FLOAT32_GAP)
TWELVE = rows([f"Who founded number {i}?" for i in range(12)])


class Killed(Exception):
    pass


class Patient:
    """Two turns; between them an episode of step 2 waits for `go`."""

    stop_strings: tuple[str, ...] = ()
    max_turns = 2
    made = arrived = 0
    go = threading.Event()

    def __init__(self) -> None:
        self.late = Patient.made >= EPISODES
        self.turn = 0
        Patient.made += 1

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Step:
        self.turn += 1
        if self.turn == 1 and self.late:
            Patient.arrived += 1
            await asyncio.to_thread(Patient.go.wait, SECONDS)
        return Step(observation=Observation(text=" more "), done=self.turn == 2)

    async def close(self) -> None:
        return None


PATIENT = {"name": f"{__name__}:Patient"}  # the env of a config


def of_step(run: rl.Run, step: int) -> list[Trajectory]:
    return read_trajectories(run.directory.trajectories / f"step-{step:06d}.parquet")


def asked(run: rl.Run) -> list[list[str]]:
    """The tasks of each step, in order."""
    return [list(dict.fromkeys(t.task_id for t in of_step(run, step))) for step in range(1, run.step + 1)]


def assert_sampled_by(run: rl.Run, trajectories: list[Trajectory], states: dict[int, dict[str, Tensor]]) -> None:
    """Every token has the log-prob that the weights of its version give it, and not that of the others'."""
    policy = run.learner.policy
    batch = pack(trajectories).to(policy.device)
    for version, state in states.items():
        with torch.no_grad():
            for name, parameter in policy.parameters():
                parameter.copy_(state[name])
            gaps = (policy.logprobs(batch) - batch.rollout_logprobs).abs()
        own = batch.loss_mask & (batch.policy_versions == version)
        assert gaps[own].max() < CLOSE
        assert gaps[batch.loss_mask & ~own].max() > 10 * CLOSE
