"""One answer and no world: the policy writes once, the reward function judges."""

from __future__ import annotations

from posttrain.envs.protocol import Action, Observation, Step
from posttrain.task import Task


class SingleTurnEnv:
    """The episode is the policy's one turn. `stop_strings` end it early (e.g. `("</answer>",)`)."""

    max_turns = 1

    def __init__(self, *, stop_strings: tuple[str, ...] | list[str] = ()) -> None:
        if isinstance(stop_strings, str):
            raise TypeError(f"stop_strings is the text {stop_strings!r}: each character would stop; write a list of it")
        self.stop_strings = tuple(stop_strings)

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        return None
