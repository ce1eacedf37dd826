"""Envs: the worlds an agent acts in. `ENVS` names those of this package; a config may also name `pkg.mod:Class`."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.coerce import coerce_text
from posttrain.envs.interaction import Interaction, InteractionEnv, Reply
from posttrain.envs.protocol import Action, Env, Observation, Step
from posttrain.envs.search import SEARCH_R1_PROMPT, SearchEnv, search_prompt
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.envs.tools import ReActEnv, ToolEnv

__all__ = [
    "ENVS",
    "SEARCH_R1_PROMPT",
    "Action",
    "Env",
    "Interaction",
    "InteractionEnv",
    "Observation",
    "ReActEnv",
    "Reply",
    "SearchEnv",
    "SingleTurnEnv",
    "Step",
    "ToolEnv",
    "coerce_text",
    "search_prompt",
]

ENVS: dict[str, Callable[..., Env]] = {
    "interaction": InteractionEnv,
    "react": ReActEnv,
    "search": SearchEnv,
    "single_turn": SingleTurnEnv,
    "tools": ToolEnv,
}
