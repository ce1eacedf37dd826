"""Pure maths of post-training: tensors in, tensors out. No I/O, no process groups, no config, no model.

Every function works on T packed tokens of all episodes of a batch. `mask` [T] is True where the policy wrote the token;
`episode_index` and `group_index` [T] say to whom a token belongs, in any order. A row of a table is a plain function:

* advantage `(rewards, mask, episode_index, group_index, *, values=None, **options) -> advantages [T]`, 0 off-mask
* loss `(logprobs, old_logprobs, advantages, mask, episode_index, **options) -> loss [T]`, 0 off-mask
* aggregate `(mask, episode_index, **options) -> weights [T]`; the loss of a batch is `(loss * weights).sum()`
* KL estimator `(logprobs, ref_logprobs, mask) -> kl [T]`, 0 off-mask
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.algorithms.advantages import gae, grpo, reinforce, rloo
from posttrain.algorithms.aggregates import fixed_length, sequence_mean, sequence_sum_mean, token_mean
from posttrain.algorithms.kl import absolute, k1, k2, k3
from posttrain.algorithms.losses import policy_gradient, ppo_clip, ppo_dual_clip

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "gae": gae,
    "grpo": grpo,
    "reinforce": reinforce,
    "rloo": rloo,
}

LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "reinforce": policy_gradient,
}

AGGREGATES: dict[str, Callable[..., Tensor]] = {
    "fixed_length": fixed_length,
    "sequence_mean": sequence_mean,
    "sequence_sum_mean": sequence_sum_mean,
    "token_mean": token_mean,
}

KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "abs": absolute,
    "k1": k1,
    "k2": k2,
    "k3": k3,
}

__all__ = ["ADVANTAGES", "AGGREGATES", "KL_ESTIMATORS", "LOSSES"]
