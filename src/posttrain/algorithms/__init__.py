"""Pure maths of post-training: tensors in, tensors out. No I/O, no process groups, no config, no model.

Every function works on T packed tokens of all episodes of a batch. `mask` [T] is True where the policy wrote the token;
`episode_index` and `group_index` [T] say to whom a token belongs, in any order. A row of a table is a plain function:

* advantage `(rewards, mask, episode_index, group_index, *, values=None, **options) -> advantages [T]`, 0 off-mask
* loss `(logprobs, old_logprobs, advantages, mask, episode_index, **options) -> loss [T]`, 0 off-mask
* aggregate `(mask, episode_index, **options) -> weights [T]`; the loss of a batch is `(loss * weights).sum()`
* KL estimator `(logprobs, ref_logprobs, mask) -> kl [T]`, 0 off-mask
* correction `(logprobs, rollout_logprobs, mask, episode_index, **options) -> factors [T]`, 0 where rejected

The first line of a row's docstring is its equation, the second paragraph begins with its source. What a row needs
besides (`greedy_returns`, `outcome_rewards`, `group_index`, ..) it names as a keyword; the loop passes what is named.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.algorithms.advantages import (
    best_of_group,
    dr_grpo,
    gpg,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from posttrain.algorithms.aggregates import fixed_length, group_mean, sequence_mean, sequence_sum_mean, token_mean
from posttrain.algorithms.corrections import icepop, masked_is, reject, truncated_is, truncated_is_sequence
from posttrain.algorithms.covariance_losses import clip_cov, clip_cov_choice, kl_cov, kl_cov_choice
from posttrain.algorithms.kl import absolute, k1, k2, k3
from posttrain.algorithms.losses import cispo, policy_gradient, ppo_clip, ppo_dual_clip, sapo
from posttrain.algorithms.losses import gpg as gpg_loss
from posttrain.algorithms.returns import gae, gae_returns, optimal_token_baseline, reinforce, reinforce_pp, remax
from posttrain.algorithms.sequence_losses import gmpo, gspo
from posttrain.algorithms.turns import mt_grpo, turn_gae, turn_gae_returns, turn_grpo

ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "best_of_group": best_of_group,
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gpg": gpg,
    "grpo": grpo,
    "maxrl": maxrl,
    "mt_grpo": mt_grpo,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "pass_at_k": pass_at_k,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "rloo": rloo,
    "turn_gae": turn_gae,
    "turn_grpo": turn_grpo,
}

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "gmpo": gmpo,
    "gpg": gpg_loss,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "ppo_clip": ppo_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "reinforce": policy_gradient,
    "sapo": sapo,
}

AGGREGATES: dict[str, Callable[..., Tensor]] = {
    "fixed_length": fixed_length,
    "group_mean": group_mean,
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

CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "icepop": icepop,
    "masked_is": masked_is,
    "reject": reject,
    "truncated_is": truncated_is,
    "truncated_is_sequence": truncated_is_sequence,
}

# What the critic learns to predict, by the advantage that reads its values; your own advantage has that of gae.
VALUE_TARGETS: dict[str, Callable[..., Tensor]] = {
    "gae": gae_returns,
    "turn_gae": turn_gae_returns,
}

# What a loss has chosen over the whole mini-batch before it is split; it comes as the keyword `chosen`.
CHOICES: dict[str, Callable[..., Tensor]] = {
    "clip_cov": clip_cov_choice,
    "kl_cov": kl_cov_choice,
}

# These compare the episodes of one prompt: of a single one there is nothing to learn.
GROUP_ADVANTAGES = frozenset(
    {
        "best_of_group",
        "dr_grpo",
        "gpg",
        "grpo",
        "maxrl",
        "mt_grpo",
        "opo",
        "optimal_token_baseline",
        "pass_at_k",
        "reinforce_pp_baseline",
        "rloo",
        "turn_grpo",
    }
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "CHOICES",
    "CORRECTIONS",
    "GROUP_ADVANTAGES",
    "KL_ESTIMATORS",
    "LOSSES",
    "VALUE_TARGETS",
]
