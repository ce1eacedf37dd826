"""Envs: the worlds an agent acts in. `ENVS` names those of this package; a config may also name `pkg.mod:Class`."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.coerce import coerce_text
from posttrain.envs.interaction import Interaction, InteractionEnv, Reply
from posttrain.envs.protocol import Action, Env, Observation, Step
from posttrain.envs.search import SEARCH_R1_PROMPT, SearchEnv, search_prompt
from posttrain.envs.single_turn import SingleTurnEnv

__all__ = [
    "ENVS",
    "SEARCH_R1_PROMPT",
    "Action",
    "Env",
    "Interaction",
    "InteractionEnv",
    "Observation",
    "Reply",
    "SearchEnv",
    "SingleTurnEnv",
    "Step",
    "coerce_text",
    "search_prompt",
]

ENVS: dict[str, Callable[..., Env]] = {
    "interaction": InteractionEnv,
    "search": SearchEnv,
    "single_turn": SingleTurnEnv,
}
