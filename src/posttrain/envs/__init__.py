"""Envs: the worlds an agent acts in. `ENVS` names those of this package; users pass `pkg.mod:Class`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from posttrain.envs.coerce import coerce_text
from posttrain.envs.protocol import Action, Env, Observation, Step
from posttrain.envs.search import SEARCH_R1_PROMPT, SearchEnv, search_prompt
from posttrain.envs.single_turn import SingleTurnEnv

__all__ = [
    "ENVS",
    "SEARCH_R1_PROMPT",
    "Action",
    "Env",
    "Observation",
    "SearchEnv",
    "SingleTurnEnv",
    "Step",
    "coerce_text",
    "load_env",
    "search_prompt",
]

ENVS: dict[str, Callable[..., Env]] = {
    "search": SearchEnv,
    "single_turn": SingleTurnEnv,
}


def load_env(name: str) -> Callable[..., Env]:
    """The env class called `name` in `ENVS`, or the one at `pkg.mod:Class`. Calling it with its options makes an env.

    Raises ValueError for an unknown name (with the nearest one), a missing module or attribute, and for a class
    without reset, step and close.
    """
    if name in ENVS:
        return ENVS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no env is called {name!r}; {hint}known: {', '.join(ENVS)}, or give 'pkg.mod:Class'")
    return _imported(name, module_name, attribute)


def _imported(name: str, module_name: str, attribute: str) -> Callable[..., Env]:
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"env {name!r}: no module named {error.name!r}; is it on the Python path?") from error
    except AttributeError as error:
        raise ValueError(f"env {name!r}: module {module_name} has no {attribute!r}") from error
    if isinstance(found, type):
        missing = [method for method in ("reset", "step", "close") if not hasattr(found, method)]
        if missing:
            raise ValueError(f"env {name!r} lacks {', '.join(missing)}; see posttrain.envs.protocol.Env")
    return found
