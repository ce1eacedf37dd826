"""Plants faults in `posttrain.algorithms` and checks that its tests catch every one: `python benchmarks/mutation.py`.

A fault replaces one piece of source text. For each, a forked process imports the changed module from memory (no file is
written) and runs tests/algorithms until the first failure, the module's own test file first. A fault that survives is a
gap in the tests, or a fault that changes nothing: then take it off the list.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hypothesis.strategies  # noqa: F401 -- imported once here, not in every child
import pytest
import torch

import posttrain.packing  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "posttrain" / "algorithms"
TESTS = ROOT / "tests" / "algorithms"
PACKAGE = "posttrain.algorithms"
SECONDS = 120  # a mutant that runs longer than this is caught: it hangs
CAUGHT, SURVIVED, HUNG, UNUSABLE = "caught", "survived", "hung", "unusable"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands exactly once in `module`.py, becomes `new`."""

    module: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}: {self.old!r} -> {self.new!r}"


NO_FAULT = Fault("credit", "    if bad:\n", "    if bad:\n")  # must survive, or every verdict is worthless

FAULTS = (
    # who gets which reward
    Fault("credit", ".cummax(0)", ".cummin(0)"),
    Fault("credit", "torch.where(has_before, before,", "torch.where(has_after, after,"),
    Fault("credit", " & (episode[before.clamp(min=0)] == episode)", ""),
    Fault("credit", " & (episode[after.clamp(max=len(order) - 1)] == episode)", ""),
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
    # group advantages
    Fault("advantages", "centred = episodes.returns - mean", "centred = mean - episodes.returns"),
    Fault("advantages", "episodes.returns - mean[episodes.group]", "episodes.returns"),
    Fault(
        "advantages",
        "_sum_by_group(episodes.returns, episodes) / size",
        "_sum_by_group(episodes.returns, episodes)",
    ),
    Fault("advantages", 'degrees = size - 1 if std == "sample" else size', "degrees = size"),
    Fault("advantages", 'size - 1 if std == "sample"', 'size - 1 if std != "sample"'),
    Fault("advantages", "(variance.sqrt() + eps)", "(variance + eps)"),
    Fault("advantages", "(variance.sqrt() + eps)", "variance.sqrt()"),
    Fault("advantages", "(variance.sqrt() + eps)", "(variance + eps).sqrt()"),
    Fault("advantages", "eps: float = 1e-6", "eps: float = 1e-4"),
    Fault("advantages", 'if std != "none":', "if std:"),
    Fault("advantages", "centred.square()", "episodes.returns.square()"),
    Fault("advantages", "scale = size / (size - 1)", "scale = (size - 1) / size"),
    Fault("advantages", "centred * scale[episodes.group]", "centred"),
    Fault("advantages", "torch.where(_differs(episodes, tol)[episodes.group], centred, 0.0), size", "centred, size"),
    Fault("advantages", "highest - lowest > tol * scale", "highest - lowest > tol"),
    Fault("advantages", "highest - lowest > tol * scale", "highest - lowest >= 0"),
    Fault("advantages", "EQUAL_TOLERANCE = 1e-6", "EQUAL_TOLERANCE = 1e-2"),
    Fault("advantages", "EQUAL_TOLERANCE = 1e-6", "EQUAL_TOLERANCE = 0.0"),
    Fault("advantages", '"amax", include_self=False', '"amin", include_self=False'),
    # advantages in time
    Fault("advantages", "reward + gamma * following - value", "reward - gamma * following - value"),
    Fault("advantages", "reward + gamma * following - value", "reward + following - value"),
    Fault("advantages", "reward + gamma * following - value", "reward + gamma * following + value"),
    Fault(
        "advantages",
        "torch.where(rows.valid, reward + gamma * following - value, 0.0)",
        "reward + gamma * following",
    ),
    Fault("advantages", "_discounted_sum(delta, gamma * lam)", "_discounted_sum(delta, gamma)"),
    Fault("advantages", "_discounted_sum(delta, gamma * lam)", "_discounted_sum(delta, lam)"),
    Fault(
        "advantages",
        "torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])]",
        "torch.cat([value[:, 1:], value[:, -1:]]",
    ),
    Fault(
        "advantages",
        "value[:, 1:], torch.zeros_like(value[:, :1])",
        "torch.zeros_like(value[:, :1]), value[:, :-1]",
    ),
    Fault("advantages", "rows.shape[1] - 2", "rows.shape[1] - 3"),
    Fault("advantages", "rows.shape[1] - 2, -1, -1", "rows.shape[1] - 2, 0, -1"),
    Fault("advantages", "discount * out[:, t + 1]", "discount * rows[:, t + 1]"),
    Fault("advantages", "advantages + values.detach(), 0.0", "advantages - values.detach(), 0.0"),
    Fault("advantages", "torch.where(mask, advantages + values.detach(), 0.0)", "(advantages + values.detach())"),
    Fault("advantages", "gamma=gamma, lam=lam)", "gamma=gamma, lam=lam, whiten=True)"),
    Fault("advantages", "_discounted_sum(reward, gamma)", "_discounted_sum(reward, 1.0)"),
    Fault("advantages", "rows.take(values.detach())", "rows.take(values)"),
    Fault("advantages", "rows - entries.mean()", "rows"),
    Fault("advantages", "entries.std()", "entries.std(correction=0)"),
    Fault("advantages", "entries = rows[valid]", "entries = rows.flatten()"),
    # policy losses
    Fault("losses", "-advantages * ratio, -advantages * clipped", "advantages * ratio, advantages * clipped"),
    Fault("losses", "torch.maximum(-advantages", "torch.minimum(-advantages"),
    Fault("losses", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio.clamp(1.0 - clip_high, 1.0 + clip_low)"),
    Fault("losses", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio.clamp(max=1.0 + clip_high)"),
    Fault("losses", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)", "ratio"),
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
    # aggregates
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
)  # fmt: skip


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed source text."""

    def __init__(self, fault: Fault) -> None:
        self.name = f"{PACKAGE}.{fault.module}"
        self.path = SOURCE / f"{fault.module}.py"
        self.source = mutated(fault)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self.path))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, str(self.path), "exec"), vars(module))


def mutated(fault: Fault) -> str:
    """The changed source. Raises ValueError when `old` does not stand there exactly once."""
    source = (SOURCE / f"{fault.module}.py").read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.old!r} stands {source.count(fault.old)} times in {fault.module}.py, expected once")
    return source.replace(fault.old, fault.new)


def start(fault: Fault) -> int:
    """Forks a process that runs the tests with the fault planted. Returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(SECONDS)
        os._exit(run_tests(fault))
    except BaseException as error:
        print(f"{fault}: {error!r}", file=sys.stderr)
        os._exit(99)


def run_tests(fault: Fault) -> int:
    """The exit code of pytest; 0 when no test fails."""
    sys.meta_path.insert(0, MutantFinder(fault))
    own = TESTS / f"test_{fault.module}.py"
    others = [path for path in sorted(TESTS.glob("test_*.py")) if path.name not in (own.name, "test_mutations.py")]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        for files in ([own] if own.is_file() else [], others):
            arguments = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *map(str, files)]
            code = int(pytest.main(arguments)) if files else 0
            if code:
                return code
    return 0


def verdict(status: int) -> str:
    if os.WIFSIGNALED(status):
        return HUNG if os.WTERMSIG(status) == signal.SIGALRM else UNUSABLE
    return {0: SURVIVED, 1: CAUGHT, 2: CAUGHT}.get(os.WEXITSTATUS(status), UNUSABLE)  # 2: a test file failed to import


def check(faults: Sequence[Fault], jobs: int) -> dict[Fault, str]:
    """The verdict on every fault, `jobs` at a time."""
    waiting, running, verdicts = list(faults), dict[int, Fault](), dict[Fault, str]()
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            running[start(fault)] = fault
        child, status = os.wait()
        fault = running.pop(child)
        verdicts[fault] = verdict(status)
        if verdicts[fault] != CAUGHT:
            print(f"{verdicts[fault]}: {fault}", file=sys.stderr, flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", help="faults whose line contains this text")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if not options.only or options.only in str(fault)]
    for fault in faults:
        mutated(fault)
    began = time.monotonic()
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports much when first called: once here
    gc.freeze()  # pytest collects garbage at its end: not among all that was imported here
    _, status = os.waitpid(start(NO_FAULT), 0)
    if verdict(status) != SURVIVED:
        print("the tests fail without any fault: mend them first", file=sys.stderr)
        return 2
    verdicts = check(faults, options.jobs)
    missed = [str(fault) for fault, found in verdicts.items() if found not in (CAUGHT, HUNG)]
    result = {"planted": len(faults), "caught": len(faults) - len(missed), "missed": missed}
    result["seconds"] = round(time.monotonic() - began, 1)
    line = f"{result['caught']} of {len(faults)} faults caught, {result['seconds']} s"
    print(json.dumps(result) if options.json else line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
