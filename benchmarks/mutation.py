"""Plants faults in `posttrain.algorithms` and checks that its tests catch every one: `python benchmarks/mutation.py`.

A fault replaces one piece of source text. The tests are collected once; for each fault a forked process puts the code
of the changed source into the functions that were imported (no file is written) and runs tests/algorithms until the
first failure: tests that have caught another fault of the module first, then the module's own test file, tests that
search for examples last. A fault that survives is a gap in the tests, or a fault that changes nothing: then take it off
the list.
"""

# ruff: noqa: E501 -- a fault is one line
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import hypothesis
import hypothesis.strategies  # imported once here, not in every child
import pytest
import torch

import posttrain.packing  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "posttrain" / "algorithms"
TESTS = ROOT / "tests" / "algorithms"
PACKAGE = "posttrain.algorithms"
SECONDS = 120  # a mutant that runs longer than this is caught: it hangs
# The others have a test file of their own name.
OWN_TESTS = {"groups": "advantages", "filtering": "shaping", "credit": "returns"}
NOT_OF_THE_MATHS = (
    "test_mutations.py",
    "test_ranks.py",
    "test_trl.py",
    "test_tables.py",
    "test_learning.py",
    "test_docs.py",
)
CAUGHT, SURVIVED, HUNG, UNUSABLE = "caught", "survived", "hung", "unusable"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands exactly once in `module`.py, becomes `new`. sought_by: the test that catches it, where that
    searches for an example and would come last."""

    module: str
    old: str
    new: str
    sought_by: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.old!r} -> {self.new!r}"


NO_FAULT = Fault("credit", "    if bad:\n", "    if bad:\n")  # must survive, or every verdict is worthless

FAULTS = (
    # who gets which reward
    Fault("credit", ".cummax(0)", ".cummin(0)"),
    Fault("credit", "torch.where(has_before, before,", "torch.where(has_after, after,"),
    Fault("credit", " & (episode[before.clamp(min=0)] == episode)", ""),
    Fault(
        "credit",
        " & (episode[after.clamp(max=len(order) - 1)] == episode)",
        "",
        sought_by="test_p63_the_order_of_arrival_does_not_matter[gae]",
    ),
    Fault("credit", "torch.where(has_after, after, here)", "here"),
    Fault("credit", "rewards[order].double())", "rewards.double())"),
    Fault("credit", "torch.where(mask, values[self.episode_of_token], 0.0)", "values[self.episode_of_token]"),
    Fault("credit", "index_add(0, episode_of_token, rewards", "index_copy(0, episode_of_token, rewards"),
    Fault("credit", "torch.where(self.valid, stream.double()[self.index], 0.0)", "stream.double()[self.index]"),
    Fault("credit", "positions[torch.argsort(episodes, stable=True)]", "positions"),
    Fault("credit", "numbered(episode_index[positions])", "numbered(episode_index[: len(positions)])"),
    Fault("credit", "ordered[1:] != ordered[:-1]", "index[1:] != index[:-1]"),
    Fault("credit", "    if bad:\n", "    if bad > 1:\n"),
    Fault("credit", "if bool((group[episode_of_token] != group_of_token).any()):", "if False:"),
    Fault(
        "credit",
        "group_of_token, group_count = numbered(group_index)",
        "group_of_token, group_count = group_index, 1",
    ),
    Fault("credit", "~self.valid[:, 1:] | (self.index[:, 1:] != self.index[:, :-1] + 1)", "~self.valid[:, 1:]"),
    Fault("credit", "self.index[:, :-1] + 1", "self.index[:, :-1]"),
    Fault("credit", "episodes.episode_of_token, mask.double())", "episodes.episode_of_token, mask.double() * 0 + 1)"),
    # the group
    Fault("groups", "above = entries.returns - baseline", "above = baseline"),
    Fault("groups", "entries.returns - baseline[entries.group]", "entries.returns"),
    Fault("groups", "sum_by_group(entries.returns, entries) / sizes(entries), singleton", "sum_by_group(entries.returns, entries), singleton"),
    Fault("groups", 'degrees = size - 1 if std == "sample" else size', "degrees = size"),
    Fault("groups", 'size - 1 if std == "sample"', 'size - 1 if std != "sample"'),
    Fault("groups", "(squares / degrees.clamp(min=1)).sqrt()", "squares / degrees.clamp(min=1)"),
    Fault("groups", "+ (0.0 if std == \"none\" else eps)", ""),
    Fault("groups", "torch.where(size == 1, 1.0, (squares", "torch.where(size == 0, 1.0, (squares"),
    Fault("groups", "(entries.returns - mean[entries.group]).square()", "entries.returns.square()"),
    Fault("groups", "torch.where(differs(entries)[entries.group], above, 0.0)", "above"),
    Fault("groups", "highest - lowest > EQUAL_TOLERANCE * scale", "highest - lowest > EQUAL_TOLERANCE"),
    Fault("groups", "highest - lowest > EQUAL_TOLERANCE * scale", "highest - lowest >= 0"),
    Fault("groups", "EQUAL_TOLERANCE = 1e-6", "EQUAL_TOLERANCE = 1e-2"),
    Fault("groups", "EQUAL_TOLERANCE = 1e-6", "EQUAL_TOLERANCE = 0.0"),
    Fault("groups", 'by_group(entries, "amax"), by', 'by_group(entries, "amin"), by'),
    Fault("groups", "(sizes(entries) == 1)[entries.group]", "(sizes(entries) <= 2)[entries.group]"),
    # advantages from the group
    Fault("advantages", "eps: float = 1e-6,\n    singleton", "eps: float = 1e-4,\n    singleton"),
    Fault("advantages", "torch.where(size == 1, 1.0, size / (size - 1)", "torch.where(size == 1, 1.0, (size - 1) / (size)"),
    Fault("advantages", "centred(episodes, singleton) * scale[episodes.group]", "centred(episodes, singleton)"),
    Fault("advantages", "torch.where(size == 1, 1.0, size", "torch.where(size == 1, 0.0, size"),
    Fault("advantages", "length * episodes.returns, episodes", "episodes.returns, episodes"),
    Fault("advantages", "total.clamp(min=1.0)", "sizes(episodes)"),
    Fault("advantages", "scale = len(counted) / counted.sum()", "scale = counted.sum() / len(counted)"),
    Fault("advantages", "counted.sum().clamp(min=1)", "counted.sum()"),
    Fault("advantages", "counted = episodes.returns != 0", "counted = episodes.returns == 0"),
    Fault(
        "advantages",
        "whitened(above, mask)",
        "whitened(above, torch.ones_like(mask))",
        sought_by="test_nothing_but_the_mask_decides_where_advantages_lie[reinforce_pp_baseline]",
    ),
    Fault("advantages", "if not shift_silent:", "if shift_silent:"),
    Fault("advantages", "(sizes(episodes) == 1) & (singleton == \"raw\")", "(sizes(episodes) == 1)"),
    Fault("advantages", "| ((sizes(episodes) == 1) & (singleton == \"raw\"))", ""),
    Fault("advantages", "above / scale[episodes.group]", "above * scale[episodes.group]"),
    Fault("advantages", "torch.where(mean > 0, mean, 1.0)", "mean"),
    Fault("advantages", "if bool((episodes.returns < 0).any()):", "if False:"),
    Fault("advantages", "(best - second) / torch.where", "(best) / torch.where"),
    Fault("advantages", "torch.where(is_best, lead[episodes.group], 0.0)", "lead[episodes.group]"),
    Fault("advantages", "torch.where(tied, 0.0, (best", "torch.where(~tied, 0.0, (best"),
    Fault("advantages", "best - second <= EQUAL_TOLERANCE * torch.maximum", "best - second < 0 * torch.maximum"),
    Fault("advantages", "descending=True", "descending=False"),
    Fault("advantages", "starts + (size > 1).long()", "starts + size - 1"),
    Fault("advantages", "episodes.group[by_return], stable=True", "episodes.group, stable=True"),
    Fault("advantages", "episodes.returns > pass_above", "episodes.returns >= pass_above"),
    Fault("advantages", "pass_above: float = 0.5", "pass_above: float = 0.4"),
    Fault("advantages", "k: int = 4", "k: int = 3"),
    Fault("advantages", "(failed - 1).clamp(min=0), (size - 1)", "failed.clamp(min=0), (size - 1)"),
    Fault("advantages", "chosen - 1)", "chosen)"),
    Fault("advantages", "up, down = none_passes / scale", "up, down = (1 - none_passes) / scale"),
    Fault("advantages", "(none_passes - others_fail)", "(others_fail - none_passes)"),
    Fault("advantages", "(none_passes <= 0) | (failed == size)", "(none_passes <= 0)"),
    Fault("advantages", "(none_passes <= 0) | (failed == size)", "(failed == size)"),
    Fault("advantages", "part >= k", "part > k"),
    # advantages in time
    Fault("returns", "* following - value, 0.0", "* following + value, 0.0"),
    Fault("returns", "reward + _per_step(rows, gamma, discount) * following", "reward - _per_step(rows, gamma, discount) * following"),
    Fault("returns", "_per_step(rows, gamma, discount) * following", "following"),
    Fault("returns", "_per_step(rows, gamma * lam, discount)", "_per_step(rows, gamma, discount)"),
    Fault("returns", "_per_step(rows, gamma * lam, discount)", "_per_step(rows, lam, discount)"),
    Fault("returns", "_per_step(rows, gamma * lam, discount)", '_per_step(rows, gamma * lam, "token")'),
    Fault("returns", "torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])]", "torch.cat([value[:, 1:], value[:, -1:]]"),
    Fault("returns", "value[:, 1:], torch.zeros_like(value[:, :1])", "torch.zeros_like(value[:, :1]), value[:, :-1]"),
    Fault("returns", "rows.shape[1] - 2", "rows.shape[1] - 3"),
    Fault("returns", "rows.shape[1] - 2, -1, -1", "rows.shape[1] - 2, 0, -1"),
    Fault("returns", "discount[:, t] * out[:, t + 1]", "discount[:, t] * rows[:, t + 1]"),
    Fault("returns", "discount[:, t] * out", "discount[:, t + 1] * out"),
    Fault("returns", "advantages + values.detach(), 0.0", "advantages - values.detach(), 0.0"),
    Fault("returns", "torch.where(mask, advantages + values.detach(), 0.0)", "(advantages + values.detach())"),
    Fault("returns", "gamma=gamma, lam=lam, discount=discount)", "gamma=gamma, lam=1.0, discount=discount)"),
    Fault("returns", "rows.put(discounted_sum(reward, _per_step(rows, gamma, discount)), rewards)", "rows.put(discounted_sum(reward, _per_step(rows, 1.0, discount)), rewards)"),
    Fault("returns", "rows.take(values.detach())", "rows.take(values)"),
    Fault("returns", "(values - entries.mean()) / std", "values / std"),
    Fault("returns", "entries.std()", "entries.std(correction=0)"),
    Fault("returns", "entries = values[mask]", "entries = values"),
    Fault("returns", "torch.where(rows.ends_turn, 0.0, factor)", "torch.where(rows.ends_turn, factor, 0.0)"),
    Fault("returns", "torch.where(rows.ends_turn, everywhere, 1.0)", "torch.where(rows.ends_turn, 1.0, everywhere)"),
    Fault("returns", "torch.ones_like(reward)) - baseline", "torch.ones_like(reward)) + baseline"),
    Fault("returns", "baseline.isnan() | (above", "(above"),
    Fault("returns", "above.abs() <= EQUAL_TOLERANCE * baseline.abs().clamp(min=1.0)", "above.abs() <= EQUAL_TOLERANCE"),
    Fault("returns", "above.abs() <= EQUAL_TOLERANCE * baseline.abs().clamp(min=1.0)", "above.abs() < 0"),
    Fault("returns", "energy = 1 - probability if", "energy = probability if"),
    Fault("returns", "1 - 2 * probability + rows", "1 - probability + rows"),
    Fault("returns", "torch.where(rows.valid, energy, 0.0).cumsum(1)", "torch.where(rows.valid, energy, 0.0)"),
    Fault("returns", "weight * to_go, 0.0)", "to_go, 0.0)"),
    Fault("returns", "to_go - mean[group]", "to_go + mean[group]"),
    Fault("returns", "numbered(group_index[rows.index[:, 0]])", "numbered(group_index[rows.index[:, 0]] * 0)"),
    Fault("returns", "highest - lowest > EQUAL_TOLERANCE * scale", "highest - lowest >= 0"),
    # credit by turn
    Fault("turns", "roll(1, 1)", "roll(0, 1)"),
    Fault("turns", "torch.full_like(turns.reward, gamma)", "torch.ones_like(turns.reward)"),
    Fault("turns", "group_index[tokens] * (width + 1) + number", "group_index[tokens]"),
    Fault("turns", "group_index[tokens] * (width + 1) + number", "number"),
    Fault("turns", "episode * width + number", "episode * width"),
    Fault("turns", "rewards - outcome_rewards", "rewards"),
    Fault("turns", "outcome + turn_weight * turn", "outcome + turn"),
    Fault("turns", "turn_weight: float = 1.0", "turn_weight: float = 2.0"),
    Fault("turns", "episode_returns(outcome_rewards", "episode_returns(rewards"),
    Fault("turns", "group_index, gamma=0.0)", "group_index, gamma=1.0)"),
    Fault("turns", "self.reward + gamma * following - value", "self.reward + following - value"),
    Fault("turns", "self.reward + gamma * following - value", "self.reward + gamma * following"),
    Fault("turns", "gamma * lam))", "gamma))"),
    Fault("turns", "is_first[:, 1:] = self.rows.ends_turn[:, :-1]", "is_first[:, 1:] = False"),
    Fault("turns", "turns.gae(values, gamma, lam) + turns.first_of(values)", "turns.gae(values, gamma, lam)"),
    # policy losses
    Fault("losses", "-advantages * ratio, -advantages * clipped", "advantages * ratio, advantages * clipped"),
    Fault("losses", "torch.maximum(-advantages", "torch.minimum(-advantages"),
    Fault("losses", "clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "clipped = ratio.clamp(1.0 - clip_high, 1.0 + clip_low)"),
    Fault("losses", "clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "clipped = ratio.clamp(max=1.0 + clip_high)"),
    Fault("losses", "clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "clipped = ratio"),
    Fault("losses", "-ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages", "-ratio * advantages"),
    Fault("losses", "-ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages"),
    Fault("losses", "log_ratio(logprobs.detach(), old_logprobs, mask).exp()", "log_ratio(logprobs, old_logprobs, mask).exp()"),
    Fault("losses", "clip_low: float = 1.0", "clip_low: float = 0.2"),
    Fault("losses", "torch.sigmoid(tau * (ratio - 1))", "torch.sigmoid(tau * ratio)"),
    Fault("losses", "-(4 / tau) * torch", "-4 * torch"),
    Fault("losses", "advantages > 0, tau_positive, tau_negative", "advantages < 0, tau_positive, tau_negative"),
    Fault("losses", "tau_negative: float = 1.05", "tau_negative: float = 1.0"),
    Fault("losses", "return loss - entropy_coef", "return loss + entropy_coef"),
    Fault("losses", "torch.where(mask, entropy, 0.0)", "entropy"),
    # losses of sequences
    Fault("sequence_losses", "mask, episode_index).detach()", "mask, episode_index)"),
    Fault("sequence_losses", "logprobs - logprobs.detach(), 0.0", "logprobs.detach() - logprobs, 0.0"),
    Fault("sequence_losses", "torch.maximum(-advantages", "torch.minimum(-advantages"),
    Fault("sequence_losses", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio.clamp(1.0 - clip_high, 1.0 + clip_low)"),
    Fault("sequence_losses", "clip_low: float = 3e-4", "clip_low: float = 3e-3"),
    Fault("sequence_losses", "clip_high: float = 4e-4", "clip_high: float = 4e-3"),
    Fault("sequence_losses", "advantages > 0, ratio.clamp(max=clip_high)", "advantages < 0, ratio.clamp(max=clip_high)"),
    Fault("sequence_losses", "ratio.clamp(min=-clip_low)", "ratio.clamp(min=-clip_high)"),
    Fault("sequence_losses", "ratio.clamp(min=-clip_low)", "ratio"),
    Fault("sequence_losses", "return -advantages * sequence_means", "return advantages * sequence_means"),
    Fault("sequence_losses", "torch.where(mask, values, 0.0))\n    length", "values)\n    length"),
    Fault("sequence_losses", "mask.to(values.dtype))", "torch.ones_like(values))"),
    # losses by covariance
    Fault("covariance_losses", "(logprobs - logprobs[mask].mean())", "logprobs"),
    Fault("covariance_losses", "advantages - advantages[mask].mean()", "advantages"),
    Fault("covariance_losses", "(found > cov_low) & (found < cov_high)", "(found > cov_low)"),
    Fault("covariance_losses", "(found > cov_low) & (found < cov_high)", "(found < cov_high)"),
    Fault("covariance_losses", "found < cov_high", "found <= cov_high"),
    Fault("covariance_losses", "torch.where(chosen.bool() & mask, loss.detach(), loss)", "loss"),
    Fault("covariance_losses", "torch.where(chosen.bool() & mask, loss.detach(), loss)", "torch.where(chosen.bool() & mask, 0.0, loss)"),
    Fault("covariance_losses", "cov_kl_coef * distance.abs()", "distance.abs()"),
    Fault("covariance_losses", "cov_kl_coef * distance.abs()", "cov_kl_coef * distance"),
    Fault("covariance_losses", "-advantages * distance.exp() +", "-advantages * distance.exp() -"),
    Fault("covariance_losses", "max(1, int(share", "max(2, int(share"),
    Fault("covariance_losses", "found >= values.topk(wanted).values[-1]", "found > values.topk(wanted).values[-1]"),
    Fault("covariance_losses", "values.topk(wanted).values[-1]", "values.topk(wanted, largest=False).values[-1]"),
    # corrections
    Fault("corrections", "mask).exp().clamp(max=is_high), 0.0)", "mask).exp(), 0.0)"),
    Fault("corrections", "exp().clamp(max=is_high), 0.0)\n\n\ndef icepop", "exp(), 0.0)\n\n\ndef icepop"),
    Fault("corrections", "total.clamp(max=MAX_LOG_RATIO)", "total.clamp(max=1.0)"),
    Fault("corrections", "(ratio >= is_low) & (ratio <= is_high), ratio, 0.0", "(ratio >= is_low) & (ratio <= is_high), 1.0, 0.0"),
    Fault("corrections", "(ratio >= is_low) & (ratio <= is_high)", "(ratio <= is_high)"),
    Fault("corrections", "(ratio >= is_low) & (ratio <= is_high)", "(ratio >= is_low)"),
    Fault("corrections", "(mean >= is_low) & (mean <= is_high), log_ratio.exp()", "(mean >= is_low) & (mean <= is_high), mean"),
    Fault("corrections", "sequence_means(log_ratio, mask, episode_index).exp()", "sequence_means(log_ratio.exp(), mask, episode_index)"),
    Fault("corrections", "(found >= reject_low) & (found <= reject_high)", "(found <= reject_high)"),
    Fault("corrections", "reject_high: float = 0.01", "reject_high: float = 0.1"),
    Fault("corrections", "(torch.zeros_like(log_ratio), log_ratio, mask)", "(log_ratio, torch.zeros_like(log_ratio), mask)"),
    Fault("corrections", "if missing:", "if False:"),
    Fault("corrections", "logprobs.detach() - rollout_logprobs.detach(), 0.0", "rollout_logprobs.detach() - logprobs.detach(), 0.0"),
    Fault("corrections", "ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "ratio"),
    Fault("corrections", '"amax")[sequence]', '"amin")[sequence]'),
    Fault("corrections", "(version - policy_versions).clamp(min=0)", "(version - policy_versions)"),
    Fault("corrections", "version - policy_versions", "policy_versions - version"),
    # reward shaping
    Fault("shaping", "rank = place + len(rewards) * mask.long()", "rank = place"),
    Fault("shaping", "* change.scale[episodes.episode_of_token]", ""),
    Fault("shaping", "index_add(0, last, change.shift)", "index_add(0, last, -change.shift)"),
    Fault("shaping", "0.0 if factor is None else factor", "1.0 if factor is None else factor"),
    Fault("shaping", "episodes) - (max_length - buffer)) / buffer", "episodes) - max_length) / buffer"),
    Fault("shaping", "excess.clamp(0.0, 1.0)", "excess.clamp(0.0)"),
    Fault("shaping", "excess.clamp(0.0, 1.0)", "excess.clamp(max=1.0)"),
    Fault("shaping", "-factor * excess", "factor * excess"),
    Fault("shaping", "clamp(low, high) - episodes.returns", "clamp(low, high)"),
    Fault("shaping", "between = distance**2 * self.count * count / total", "between = 0.0"),
    Fault("shaping", "self.mean + distance * count / total", "mean"),
    Fault("shaping", "(self.squares / (self.count - 1))", "(self.squares / self.count)"),
    Fault("shaping", "(size - 1).clamp(min=1)).sqrt() + eps", "size).sqrt() + eps"),
    Fault("shaping", "differs(episodes), 1 / std, 1.0", "differs(episodes), std, 1.0"),
    Fault("shaping", "-mean * scale if centre", "-mean if centre"),
    Fault("shaping", "if centre else torch.zeros_like(mean)", "if not centre else torch.zeros_like(mean)"),
    # dynamic sampling
    Fault("filtering", "low < sum", "low <= sum"),
    Fault("filtering", "len(scores) < high", "len(scores) <= high"),
    Fault("filtering", "/ len(scores)", ""),
    Fault("losses", "logprobs - old_logprobs.detach(), 0.0", "old_logprobs.detach() - logprobs, 0.0"),
    Fault(
        "losses",
        "torch.where(mask, logprobs - old_logprobs.detach(), 0.0)",
        "((logprobs - old_logprobs.detach()) * mask)",
    ),
    Fault("losses", ".clamp(max=MAX_LOG_RATIO)", ""),
    Fault("losses", ".clamp(max=MAX_LOG_RATIO)", ".clamp(max=1.0)"),
    Fault("losses", "logprobs - old_logprobs.detach()", "logprobs - old_logprobs"),
    Fault("losses", "torch.where(advantages < 0, torch.minimum", "torch.where(advantages > 0, torch.minimum"),
    Fault("losses", "torch.minimum(loss, -advantages * clip_dual)", "torch.maximum(loss, -advantages * clip_dual)"),
    Fault("losses", "-advantages * clip_dual", "-advantages * (1 + clip_dual)"),
    Fault("losses", "if clip_dual <= 1:", "if clip_dual < 1:"),
    Fault("losses", "-advantages * torch.where(mask, logprobs, 0.0)", "-advantages * logprobs"),
    Fault("losses", "-advantages * torch.where(mask, logprobs, 0.0)", "advantages * torch.where(mask, logprobs, 0.0)"),
    Fault("losses", "clip_low=clip_low, clip_high=clip_high)", "clip_low=clip_high, clip_high=clip_low)"),
    # KL
    Fault("kl", "logprobs - ref_logprobs.detach(), 0.0", "ref_logprobs.detach() - logprobs, 0.0"),
    Fault(
        "kl",
        "torch.where(mask, logprobs - ref_logprobs.detach(), 0.0)",
        "(logprobs - ref_logprobs.detach()) * mask",
    ),
    Fault("kl", "logprobs - ref_logprobs.detach()", "logprobs.detach() - ref_logprobs.detach()"),
    Fault("kl", ".square() / 2", ".square()"),
    Fault("kl", "(-_log_ratio(logprobs, ref_logprobs, mask))", "_log_ratio(logprobs, ref_logprobs, mask)"),
    Fault("kl", ".clamp(max=MAX_LOG_RATIO)", ""),
    Fault("kl", ".clamp(max=MAX_LOG_RATIO)", ".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)"),
    Fault("kl", "torch.expm1(inverse) - inverse", "torch.expm1(inverse) + inverse"),
    Fault("kl", "torch.expm1(inverse) - inverse", "inverse.exp() - inverse"),
    Fault("kl", "torch.expm1(inverse) - inverse", "(torch.expm1(inverse) - inverse).detach()"),
    Fault("kl", "mask).abs()", "mask)"),
    Fault("kl", "rewards - kl_coef", "rewards + kl_coef"),
    Fault("kl", "torch.where(mask, rewards - kl_coef * kl.detach(), rewards)", "rewards - kl_coef * kl.detach()"),
    Fault("kl", "value.detach() + gradient - gradient.detach()", "gradient"),
    Fault("kl", "value.detach() + gradient - gradient.detach()", "value"),
    Fault("kl", "kl.clamp(-limit, limit)", "kl.clamp(max=limit)"),
    Fault("kl", "kl / target - 1, -0.2), 0.2)", "kl / target - 1, -0.2), 0.5)"),
    Fault("kl", "error * episodes / horizon", "error"),
    Fault("kl", "(1 + error", "(1 - error"),
    # aggregates
    Fault("aggregates", "sequence_mean(mask, group_index)", "sequence_mean(mask, episode_index)"),
    Fault("aggregates", "mask / mask.sum().clamp(min=1)", "mask / len(mask)"),
    Fault("aggregates", "mask.sum().clamp(min=1)", "mask.sum()"),
    Fault("aggregates", "counts[sequence].clamp(min=1)", "counts[sequence]"),
    Fault("aggregates", "(_nonempty(counts) * counts", "(len(counts) * counts"),
    Fault("aggregates", "_float(mask / _nonempty(counts))", "_float(mask / len(counts))"),
    Fault("aggregates", "(counts > 0).sum().clamp(min=1)", "(counts > 0).sum()"),
    Fault("aggregates", "(counts > 0)", "(counts > 1)"),
    Fault("aggregates", "sequence_of_token, mask.double())", "sequence_of_token, torch.ones_like(mask).double())"),
    Fault("aggregates", "episode_index) / length", "episode_index) * length"),
    Fault("aggregates", "sequence_sum_mean(mask, episode_index) / length", "token_mean(mask, episode_index) / length"),
    Fault(
        "aggregates",
        "numbered(episode_index)",
        "numbered((episode_index.diff(prepend=episode_index[:1]) != 0).cumsum(0))",
    ),
    # values
    Fault("values", "torch.maximum(squared", "torch.minimum(squared"),
    Fault("values", "clamp(-clip, clip)", "clamp(max=clip)"),
    Fault("values", "clipped = old_values + (values", "clipped = (values"),
    Fault("values", "return squared / 2", "return squared"),
    Fault("values", "values = torch.where(mask, values, 0.0)", "values = values * mask"),
    Fault("values", "torch.where(mask, returns.detach(), 0.0)", "returns.detach()"),
    Fault("values", "old_values.detach()", "old_values"),
    Fault("values", "1.0 - float(residual", "float(residual"),
    Fault("values", "values.detach()[mask].double()", "values.detach()[: len(target)].double()"),
    Fault("values", "float(residual.var(correction=0))", "float(residual.square().mean())"),
    # diagnostics
    Fault("diagnostics", "(advantages > 0) & (ratio > 1 + clip_high)", "(ratio > 1 + clip_high)"),
    Fault("diagnostics", "ratio < 1 - clip_low", "ratio < 1 - clip_high"),
    Fault("diagnostics", "ratio > 1 + clip_high", "ratio > 1 + clip_low"),
    Fault(
        "diagnostics",
        "old_logprobs.detach().double(), logprobs.detach().double()",
        "logprobs.double(), old_logprobs.double()",
    ),
    Fault("diagnostics", "log_weight - log_weight.max()", "log_weight"),
    Fault("diagnostics", "len(weight) * weight.square().sum()", "weight.square().sum()"),
    Fault("diagnostics", "gap = (trainer - sampler).abs()", "gap = trainer - sampler"),
    Fault("diagnostics", "    if missing:\n", "    if False:\n"),
    Fault("diagnostics", "float(values[mask].mean())", "float(values.mean())"),
    # what an evaluation says
    Fault("estimators", "1 - math.comb(samples - right, k)", "1 - math.comb(samples - right - 1, k)"),
    Fault("estimators", "/ math.comb(samples, k)", "/ samples**k"),
    Fault("estimators", "1 <= k <= samples):", "1 <= k):"),
    Fault("estimators", "        if prediction is not None:\n", "        if True:\n"),
    Fault("estimators", "sum(judged) / most", "any(judged)"),
    Fault("estimators", "for judged in winners) / len(winners)", "for judged in winners[:1])"),
    Fault("estimators", "(math.fsum(task) - len(task) * mean) ** 2 for task", "sum((v - mean) ** 2 for v in task) for task"),
    Fault("estimators", "/ count**2", "/ count"),
    Fault("estimators", "len(tasks), samples or count", "count, samples or count"),
    Fault("estimators", "len(tasks) / (len(tasks) - 1)", "1"),
    Fault("estimators", "if variance <= 0:", "if variance < 0:"),
    Fault("estimators", "min(max(mean * (1 - mean) / variance, tasks), count)", "mean * (1 - mean) / variance"),
    Fault("estimators", "z2 / (2 * samples)", "z2 / samples"),
    Fault("estimators", "z2 / (4 * samples**2)", "0"),
)  # fmt: skip


def mutated(fault: Fault) -> str:
    """The changed source. Raises ValueError when `old` does not stand there exactly once."""
    source = (SOURCE / f"{fault.module}.py").read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.old!r} stands {source.count(fault.old)} times in {fault.module}.py, expected once")
    return source.replace(fault.old, fault.new)


def plant(fault: Fault) -> None:
    """Puts the changed code into the functions of the imported module, wherever they are known by now."""
    real = sys.modules[f"{PACKAGE}.{fault.module}"]
    changed = ModuleType(real.__name__)
    changed.__file__ = real.__file__
    sys.modules[real.__name__] = changed  # dataclasses look their module up
    exec(compile(mutated(fault), str(real.__file__), "exec"), vars(changed))
    sys.modules[real.__name__] = real
    for name, new in vars(changed).items():
        old = vars(real).get(name)
        if isinstance(new, FunctionType) and isinstance(old, FunctionType):
            if new.__module__ == real.__name__:
                change_function(old, new)
        elif isinstance(new, type) and isinstance(old, type) and new.__module__ == real.__name__:
            change_class(old, new)
        elif isinstance(new, float) and new != old:
            change_constant(name, old, new)


def change_function(old: FunctionType, new: FunctionType) -> None:
    old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def change_class(old: type, new: type) -> None:
    for name, member in vars(new).items():
        own = vars(old).get(name)
        for found, wanted in ((own, member), (getattr(own, "fget", None), getattr(member, "fget", None))):
            if not isinstance(found, FunctionType) or not isinstance(wanted, FunctionType):
                continue
            if found.__code__.co_filename == wanted.__code__.co_filename:
                change_function(found, wanted)


def change_constant(name: str, old: object, new: float) -> None:
    """Also where other modules have imported it, or have it as the default of a keyword."""
    for module in [m for key, m in sys.modules.items() if key.startswith(PACKAGE)]:
        if name in vars(module):
            setattr(module, name, new)
        for function in [f for f in vars(module).values() if isinstance(f, FunctionType)]:
            defaults = function.__kwdefaults__ or {}
            for key in [key for key, value in defaults.items() if value is old]:
                defaults[key] = new


class Planter:
    """A pytest plugin: collects once, then runs the collected tests in one forked process per fault."""

    def __init__(self, faults: Sequence[Fault], jobs: int) -> None:
        self.faults, self.jobs = faults, jobs
        self.verdicts: dict[Fault, str] = {}
        self.known, self.told = os.pipe()  # children say which test has caught a fault of which module
        self.catchers: dict[str, list[int]] = {}  # module -> numbers of tests, the latest first

    @property
    def sound(self) -> bool:
        """Whether no test fails without a fault."""
        return self.verdicts.get(NO_FAULT) == SURVIVED

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # the garbage collector of the children leaves alone what was imported here
        os.set_blocking(self.known, False)
        waiting, running = [NO_FAULT, *self.faults], dict[int, Fault]()
        while (waiting and self.verdicts.get(NO_FAULT, SURVIVED) == SURVIVED) or running:
            while waiting and len(running) < self.jobs:
                fault = waiting.pop(0)
                running[self.start(session, fault)] = fault
            child, status = os.wait()
            fault = running.pop(child)
            self.verdicts[fault] = verdict(status)
            self.learn()
            if self.verdicts[fault] != (SURVIVED if fault is NO_FAULT else CAUGHT):
                print(f"{self.verdicts[fault]}: {fault}", file=sys.__stderr__, flush=True)
        return True

    def start(self, session: pytest.Session, fault: Fault) -> int:
        """Forks a process that runs the tests, the likeliest first, until one fails. Returns its id."""
        child = os.fork()
        if child:
            return child
        signal.alarm(SECONDS)
        try:
            plant(fault)
            os._exit(self.run_tests(session, fault))
        except BaseException:
            os._exit(99)

    def run_tests(self, session: pytest.Session, fault: Fault) -> int:
        numbers = self.likeliest(session.items, fault)
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            item, behind = session.items[number], None if following is None else session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=behind)
            if session.testsfailed:
                if not searches(item):
                    os.write(self.told, f"{fault.module} {number}\n".encode())
                return 1
        return 0

    def likeliest(self, items: Sequence[pytest.Item], fault: Fault) -> list[int]:
        """The numbers of the tests in the order in which they run."""
        named = [number for number, item in enumerate(items) if item.name == fault.sought_by]
        first = [*named, *self.catchers.get(fault.module, [])]
        own = f"test_{OWN_TESTS.get(fault.module, fault.module)}.py"
        rest = [number for number in range(len(items)) if number not in set(first)]
        return first + sorted(rest, key=lambda n: 0 if items[n].path.name == own else 1 + searches(items[n]))

    def learn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self.known, 1 << 16).decode().splitlines():
                module, number = line.split()
                before = self.catchers.get(module, [])
                self.catchers[module] = [int(number), *(one for one in before if one != int(number))]


def searches(item: pytest.Item) -> bool:
    """Whether a test looks for an example that breaks it, which takes long: who has one says so at once."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def verdict(status: int) -> str:
    if os.WIFSIGNALED(status):
        return HUNG if os.WTERMSIG(status) == signal.SIGALRM else UNUSABLE
    return {0: SURVIVED, 1: CAUGHT}.get(os.WEXITSTATUS(status), UNUSABLE)


def check(faults: Sequence[Fault], jobs: int) -> dict[Fault, str] | None:
    """The verdict on every fault, `jobs` at a time; None when a test fails without any fault."""
    planter = Planter(faults, jobs)
    files = [str(path) for path in sorted(TESTS.glob("test_*.py")) if path.name not in NOT_OF_THE_MATHS]
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:warnings", f"--rootdir={ROOT}", *files]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main(arguments, plugins=[planter])
    return planter.verdicts if planter.sound else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", help="faults whose line contains this text")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    first_example = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # nobody looks for the smallest one
    hypothesis.settings.register_profile("faults", phases=first_example, database=None)
    hypothesis.settings.load_profile("faults")
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if not options.only or options.only in str(fault)]
    for fault in faults:
        mutated(fault)
    began = time.monotonic()
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports much when first called: once here
    verdicts = check(faults, options.jobs)
    if verdicts is None:
        print("the tests fail without any fault: mend them first", file=sys.stderr)
        return 2
    missed = [str(fault) for fault in faults if verdicts[fault] not in (CAUGHT, HUNG)]
    result = {"planted": len(faults), "caught": len(faults) - len(missed), "missed": missed}
    result["seconds"] = round(time.monotonic() - began, 1)
    line = f"{result['caught']} of {len(faults)} faults caught, {result['seconds']} s"
    print(json.dumps(result) if options.json else line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
