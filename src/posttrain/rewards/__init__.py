"""Judges episodes. A reward function sees text by source, so it can look at what the policy wrote and nothing else.

`def reward(episode, task) -> float | Score | Invalid | Abstain | None`, sync or async; or
`def reward(episodes, task) -> list` for a whole group at once. `posttrain.rewards.config.load_reward` makes a `Reward`
of a row of `REWARDS`, a location ("path.py:function", "pkg.mod:function"), a function or a `RewardConfig`.
"""

from __future__ import annotations

from collections.abc import Callable

from posttrain.rewards.citations import citations, dr_tulu_format, search_turns
from posttrain.rewards.env_reward import env
from posttrain.rewards.format import search_format
from posttrain.rewards.functions import RewardError
from posttrain.rewards.length import overlong, target_length, words_of_answer
from posttrain.rewards.numeric import boxed, gsm8k, number
from posttrain.rewards.qa import em, f1, sub_em
from posttrain.rewards.scoring import Reward, score, score_group
from posttrain.task import Outcome

REWARDS: dict[str, Callable[..., Outcome]] = {
    "boxed": boxed,
    "citations": citations,
    "dr_tulu_format": dr_tulu_format,
    "em": em,
    "env": env,
    "f1": f1,
    "format": search_format,
    "gsm8k": gsm8k,
    "number": number,
    "overlong": overlong,
    "search_turns": search_turns,
    "sub_em": sub_em,
    "target_length": target_length,
    "words_of_answer": words_of_answer,
}

__all__ = ["REWARDS", "Reward", "RewardError", "score", "score_group"]
