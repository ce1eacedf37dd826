"""What this machine has, and what posttrain will do with it. Every line is asked of the code that decides it."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement

from posttrain.config import BatchConfig, RunConfig
from posttrain.loops.learner import threads_for
from posttrain.packing import pack
from posttrain.sampler.native import NativeSampler, workers_for
from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.compiled_attention import could_compile
from posttrain.trainer.flash_attention import is_hopper, use_varlen, version_on
from posttrain.trainer.fused import FusedLogprobs, implementation_for
from posttrain.trainer.loading import ModelConfig, pick_device, pick_dtype
from posttrain.trainer.policy import Policy
from posttrain.trainer.prefix import use_shared
from posttrain.trajectory import Source, Trajectory

PACKAGED_MODEL = "tiny_search_base"
LITTLE_DISK, NO_DISK = 10.0, 1.0  # GB; a checkpoint of a model of 0.5 billion parameters takes 7
TOKENS = 4
AGREEMENT = {"float32": 1e-4, "bfloat16": 0.1}  # of a token's log-prob, sampler and trainer
FOUR = "FlashAttention 4"
COMPILED = {"compiled decoding", "compiled training"}  # by numba, on a CPU
NOT_FOR_USERS = ("test", "all")
PASSIVE = "waiting threads sleep, so that small operations do not stall beside a busy neighbour"

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what was seen, and what to do unless all is well."""

    name: str
    status: Status
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All lines, in the order of their checks."""

    checks: tuple[Check, ...]

    @property
    def works(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "checks": [asdict(check) for check in self.checks]}

    def render(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines: list[str] = []
        for check in self.checks:
            lines.append(f"{check.status:<5} {check.name:<{width}}  {check.seen}")
            if check.advice:
                lines.append(f"{'':<5} {'':<{width}}  -> {check.advice}")
        return "\n".join(lines)


def diagnose(run_directory: Path | None = None) -> Diagnosis:
    """Looks at everything; nothing is written. Loads the packaged model, which takes a second, and more on a GPU."""
    checks = [*_software(), *_processor(), *_gpus(), *_model(), _disk(run_directory)]
    return Diagnosis(tuple(checks))


# -- software -----------------------------------------------------------------------------------------------------


def _software() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        needs = [Requirement(text) for text in requires("posttrain") or ()]
    except PackageNotFoundError:
        yield Check("packages", "warn", f"posttrain is not installed; {_versions()}", "pip install posttrain")
        return
    wrong = [told for need in needs if _belongs(need, "") and (told := _missing(need))]
    advice = "pip install --upgrade posttrain" if wrong else ""
    yield Check("packages", "fail" if wrong else "ok", "; ".join(wrong) or _versions(), advice)
    yield _extras(needs)


def _versions() -> str:
    return ", ".join(f"{name} {_version(name) or 'absent'}" for name in ("torch", "transformers", "triton"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing(need: Requirement) -> str | None:
    """What is wrong with an installed package, or None."""
    found = _version(need.name)
    if found is None:
        return f"{need.name} is not installed"
    if not need.specifier.contains(found, prereleases=True):
        return f"{need.name} is {found}, but {need.specifier} is needed"
    return None


def _extras(needs: list[Requirement]) -> Check:
    """An extra is there when all that it adds is there."""
    offered = metadata("posttrain").get_all("Provides-Extra") or []
    there: list[str] = []
    absent: list[str] = []
    for name in (name for name in offered if name not in NOT_FOR_USERS):
        adds = [need for need in needs if _belongs(need, name) and not _belongs(need, "")]
        (absent if any(map(_missing, adds)) else there).append(name)
    seen = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return Check("extras", "ok", seen + (" (pip install 'posttrain[NAME]')" if absent else ""))


def _belongs(need: Requirement, extra: str) -> bool:
    """Whether the package is needed on this machine with that extra; '' is the core."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


# -- processor ----------------------------------------------------------------------------------------------------


def _processor() -> Iterator[Check]:
    cores = usable_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > cores
    yield Check(
        "cores",
        "warn" if busy else "ok",
        f"{cores} usable of {os.cpu_count()}, load average {load:.1f}",
        "others keep the cores busy; timings will scatter" if busy else "",
    )
    yield _wait_policy()
    yield _thread_count(cores)


def usable_cores() -> int:
    """What this process may run on: containers and batch systems give fewer cores than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_policy() -> Check:
    policy = os.environ.get("OMP_WAIT_POLICY")
    if policy is not None and policy.upper() == "PASSIVE":
        return Check("OMP_WAIT_POLICY", "ok", f"{policy}: {PASSIVE} (the commands set it where nobody else did)")
    seen = "not set: waiting OpenMP threads spin" if policy is None else f"{policy}: waiting OpenMP threads spin"
    return Check("OMP_WAIT_POLICY", "warn", seen, "export OMP_WAIT_POLICY=PASSIVE before torch is imported")


def _thread_count(cores: int) -> Check:
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None or not given.isdigit() or int(given) <= cores:
        return Check("OMP_NUM_THREADS", "ok", f"{given or 'not set'}; a run on a CPU chooses torch's threads itself")
    return Check("OMP_NUM_THREADS", "warn", f"{given} threads on {cores} cores wait for each other", "unset it")


# -- graphics processors ------------------------------------------------------------------------------------------


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        unused = shutil.which("nvidia-smi") is not None
        advice = "there is a driver: install a torch that is built for it (pytorch.org)" if unused else ""
        yield Check("GPU", "warn" if unused else "ok", f"none that torch {torch.__version__} can use", advice)
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        taken = free < total / 2
        yield Check(
            f"GPU {index}",
            "warn" if taken else "ok",
            f"{about.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
            f"compute capability {about.major}.{about.minor}",
            "another process holds more than half of it" if taken else "",
        )


# -- what a run would do ------------------------------------------------------------------------------------------


def _model() -> Iterator[Check]:
    """Loads the packaged model as a run would, samples a few tokens and computes their log-probs again."""
    device = pick_device("auto")
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    before = torch.get_num_threads()
    try:
        policy = Policy.from_config(ModelConfig(path=PACKAGED_MODEL))
        if device.type == "cpu":
            torch.set_num_threads(threads_for(policy.config.get_text_config().hidden_size))
            yield _parallelism(device)
        sampler = NativeSampler(policy, max_batch=8, kv_gib=0.25)
        yield _fast_paths(policy, sampler)
        gap = _disagreement(policy, sampler)
    except Exception as error:  # whatever it is, a run would meet it, too: it becomes a line that fails
        yield Check("model", "fail", f"the packaged model does not work here: {type(error).__name__}: {error}")
        return
    finally:
        torch.set_num_threads(before)
    close = gap <= AGREEMENT[dtype]
    yield Check(
        "model",
        "ok" if close else "fail",
        f"{PACKAGED_MODEL} on {device.type} in {dtype}: {TOKENS} tokens sampled, log-probs of sampler and trainer "
        f"differ by {gap:.1e} at most",
        "" if close else f"more than {AGREEMENT[dtype]:.0e} is an error of a kernel: please report it with this output",
    )


def _parallelism(device: torch.device) -> Check:
    threads, workers, parts = torch.get_num_threads(), workers_for(device), BatchConfig().cpu_workers
    return Check(
        "parallelism",
        "ok",
        f"small models: {threads} torch thread(s), {workers} sampling engines and {parts} micro-batches side by side "
        f"(batch.cpu_workers); models of hidden size 1024 and more: {threads_for(1024)} torch threads",
    )


def _fast_paths(policy: Policy, sampler: NativeSampler) -> Check:
    place = (policy.device, policy.dtype, policy.module)
    compiled = any(part._compiled_call_impl is not None for part in policy.module.modules())
    paths: dict[str, Callable[[], bool]] = {
        "prompts shared in training": lambda: use_varlen(*place) or use_shared(*place),
        "varlen attention": lambda: use_varlen(*place),
        FOUR: lambda: use_varlen(*place) and version_on(policy.device) == 4,
        "log-prob kernels": lambda: implementation_for(policy.device) is not FusedLogprobs,
        "CUDA graphs": lambda: sampler.engines[0].decodes_ahead,
        "compiled layers": lambda: compiled,
        "compiled decoding": lambda: sampler.engines[0].decodes_compiled,
        "compiled training": lambda: policy.device.type == "cpu" and could_compile(),
    }
    on = [name for name, is_on in paths.items() if is_on()]
    off = [name for name in paths if name not in on]
    missing = policy.device.type == "cuda" and bool(set(off) - COMPILED - {FOUR})
    advice = ""
    if missing:
        advice = "on a GPU all of them should be on: is triton installed, and torch 2.10 or newer?"
    elif policy.device.type == "cpu" and COMPILED & set(off):
        advice = "pip install 'posttrain[fast]' for a faster sampler and trainer on a CPU"
    elif FOUR in off and "varlen attention" in on and is_hopper(policy.device):
        advice = "pip install 'posttrain[flash]' for attention in half the time where episodes are long"
    seen = f"on: {', '.join(on) or 'none'}; off: {', '.join(off) or 'none'}"
    return Check("fast paths", "warn" if missing else "ok", seen, advice)


def _disagreement(policy: Policy, sampler: NativeSampler) -> float:
    """The largest difference of a sampled token's log-prob, between the sampler and the trainer."""
    prompt = list(range(5, 5 + 2 * TOKENS))
    sampled = asyncio.run(sampler.sample(prompt, SamplingParams(max_new_tokens=TOKENS), seed=0))
    trajectory = Trajectory(task_id="doctor", group_id="doctor", episode_id="doctor")
    trajectory.add_context(prompt, Source.TEMPLATE)
    trajectory.add_sampled(sampled.ids, sampled.logprobs, policy.version)
    batch = pack([trajectory]).to(policy.device)
    with torch.no_grad():
        computed = policy.logprobs(batch)
    return float((computed - batch.rollout_logprobs)[batch.loss_mask].abs().max())


# -- disk ---------------------------------------------------------------------------------------------------------


def _disk(run_directory: Path | None) -> Check:
    place = run_directory or RunConfig().directory
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not existing.is_dir():
        return Check("disk", "fail", f"{existing} is a file; runs are written into a folder", "set run.dir")
    free = shutil.disk_usage(existing).free / 1e9
    status: Status = "ok" if free >= LITTLE_DISK else "warn" if free >= NO_DISK else "fail"
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} cannot be written to", "run elsewhere, or set run.dir")
    advice = "" if status == "ok" else "checkpoints need room: free some, set run.dir, or lower checkpoint.keep"
    return Check("disk", status, f"{free:.1f} GB free for {place}", advice)
