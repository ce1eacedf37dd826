"""Rooms import only rooms of lower layers; the core imports nothing heavy; workers of users see no tensors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from pace import allowed

from .conftest import Module

# Layer of each room. The longest matching prefix of a module's name counts.
LAYERS = {
    "task": 0,
    "trajectory": 0,
    "location": 0,
    "deadline": 0,
    "numba_code": 0,
    "coerce": 0,
    "thought": 0,
    "boundary": 0,
    "sandbox": 0,
    "algorithms": 1,
    "packing": 1,
    "chat": 1,
    "data": 1,
    "retrieval": 1,
    "rewards": 1,
    "tools": 2,
    "sampler.protocol": 2,
    "sampler.randomness": 2,
    "sampler.stopping": 2,
    "sampler.scripted": 2,
    "trainer": 2,
    "weights.adapters": 2,
    "weights.buckets": 2,
    "weights.names": 2,
    "envs": 3,
    "sampler": 3,
    "episodes": 4,
    "rollout": 4,
    "endpoint": 4,
    "weights": 4,
    "runs": 4,
    "config": 5,
    "loops": 6,
    "cluster": 6,
    "compat": 7,
    "cli": 7,
    "__main__": 8,
    "demo": 7,
}
# A room may import another one of its own layer only where it is named here.
SIBLINGS = {
    ("trajectory", "task"),
    ("sandbox", "deadline"),
    ("sandbox", "boundary"),
    ("rollout", "episodes"),
    ("endpoint", "rollout"),
    ("loops", "cluster"),
    ("cluster", "loops"),
    ("cli", "compat"),
    ("cli", "demo"),
}
STANDARD_LIBRARY_ONLY = (
    "task",
    "trajectory",
    "thought",
    "envs.protocol",
    "tools.protocol",
    "sampler.protocol",
    "runs.checkpoint",
    "runs.durable",
)
HEAVY = {
    "ray",
    "vllm",
    "deepspeed",
    "megatron",
    "flash_attn",
    "faiss",
    "fastmcp",
    "fastapi",
    "uvicorn",
    "duckdb",
    "matplotlib",
    "tensorboard",
    "wandb",
    "peft",
} | {"trafilatura"}
HEAVY |= {"math_verify", "numba"}
MAY_BE_HEAVY = {  # adapters, imported only by whoever asks for them
    "retrieval.server": {"fastapi", "uvicorn"},
    "retrieval.bm25_numba": {"numba"},
    "retrieval.dense": {"faiss"},
    "rewards.server": {"fastapi", "uvicorn"},
    "rewards.symbolic": {"math_verify"},
    "sampler.vllm": {"vllm"},
    "cluster": {"ray"},
    "trainer.blas_numba": {"numba"},
    "trainer.zero": {"deepspeed"},
    "trainer.megatron_core": {"megatron"},
    "trainer.flash_attention": {"flash_attn"},
    "trainer.lora": {"peft"},
    "tools.mcp": {"fastmcp"},
}


def room(name: str) -> str:
    """The entry of LAYERS that a module belongs to; '' for the package itself."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in LAYERS), "")


@cache
def imported(module: Module) -> list[tuple[str, int]]:
    """(absolute module, line); `from a import b` gives a.b, which may be a module or a name in one."""
    return list(imported_by(module.nodes))


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_every_module_has_a_layer(modules):
    homeless = [module.shown for module in modules if module.name and not room(module.name)]
    assert not homeless, f"give these a layer in LAYERS: {homeless}"


def test_import_direction(modules):
    wrong = []
    for module in modules:
        mine = room(module.name)
        for target, line in imported(module):
            theirs = room(target.removeprefix("posttrain.")) if target.startswith("posttrain.") else ""
            if not theirs or not mine or theirs == mine:
                continue
            same_room = mine.split(".")[0] == theirs.split(".")[0] and LAYERS[theirs] <= LAYERS[mine]
            lower = LAYERS[theirs] < LAYERS[mine]
            if not (lower or same_room or (mine, theirs) in SIBLINGS):
                wrong.append(
                    f"{module.shown}:{line}: {mine} (layer {LAYERS[mine]}) imports {theirs} ({LAYERS[theirs]})"
                )
    assert not wrong, "imports against the direction:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_these_modules_need_only_the_standard_library(modules, name: str):
    (module,) = [module for module in modules if module.name == name]
    roots = {target.split(".")[0] for target, _ in imported(module)}
    assert roots <= sys.stdlib_module_names | {"posttrain"}


def test_algorithms_know_tensors_only(modules):
    """No I/O, no process group, no model, no config: torch, numbers, and each other."""
    allowed = {"torch", "posttrain", "__future__", "collections", "dataclasses", "math", "typing", "enum", "functools"}
    found = [module for module in modules if module.name.startswith("algorithms")]
    assert found
    for module in found:
        names = {target for target, _ in imported(module)}
        assert {name.split(".")[0] for name in names} <= allowed, module.shown
        assert not [name for name in names if name.startswith("torch.distributed")], module.shown
        assert all(name.startswith("posttrain.algorithms") for name in names if name.startswith("posttrain")), (
            module.shown
        )


def test_users_envs_see_no_tensor(modules):
    for module in modules:
        if module.name.startswith("envs"):
            assert not {target.split(".")[0] for target, _ in imported(module)} & {"torch", "transformers"}


def test_heavy_packages_only_in_their_adapters(modules):
    wrong = []
    for module in modules:
        allowed = next((heavy for name, heavy in MAY_BE_HEAVY.items() if module.name.startswith(name)), set())
        for target, line in top_level_imports(module.tree):
            if target.split(".")[0] in HEAVY - allowed:
                wrong.append(f"{module.shown}:{line}: {target}")
    assert not wrong, "import these where they are used, in an adapter:\n" + "\n".join(wrong)


def top_level_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    yield from imported_by(tree.body)


def imports_inside_functions(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_by(ast.walk(node))


OPTIONAL = HEAVY | {"rich", "torch"}  # torch: torch.utils.tensorboard


def test_imports_stand_at_the_top(modules):
    """Inside functions only optional extras, and our modules that need one (`cuda_*`: Triton comes with torch's builds
    for CUDA); in the cli also the commands, which would all be slow to start."""
    wrong = [
        f"{module.shown}:{line}: {target}"
        for module in modules
        if room(module.name) not in ("cli", "demo", "compat")
        for target, line in imports_inside_functions(module.nodes)
        if target.split(".")[0] not in OPTIONAL and not any(part.startswith("cuda_") for part in target.split("."))
    ]
    assert not wrong, "move to the top:\n" + "\n".join(wrong)


def loaded_after(statement: str, *names: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import posttrain, posttrain.task, posttrain.trajectory",
        "import posttrain.envs.protocol, posttrain.runs.checkpoint",
    ],
)
def test_contracts_load_without_torch(statement: str):
    assert loaded_after(statement, "torch", "transformers", "pydantic", "numpy", "pyarrow") == set()


def test_p130_the_core_imports_without_any_extra():
    """Every module but the adapters loads on a machine that has none of the optional packages."""
    block = f"sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))"  # None: `import x` raises ModuleNotFoundError
    loaded = loaded_after(f"{block}\nimport posttrain.config, posttrain.rollout", "torch", "posttrain.config")
    assert loaded == {"torch", "posttrain.config"}


@pytest.mark.alone
def test_import_posttrain_takes_less_than_a_second():
    """Best of three: the machine may be busy."""
    code = (
        "import time, sys\n"
        "start = time.perf_counter()\nimport posttrain, posttrain.task, posttrain.trajectory\n"
        "print(time.perf_counter() - start)"
    )
    seconds = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(seconds) < allowed(0.2)


@pytest.mark.alone
def test_slow_start_is_torch_and_transformers_not_us():
    """With the parts of torch and transformers loaded that a run needs, the whole core takes a second or so more."""
    code = (
        "import time, torch, transformers\n"
        "import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel\n"
        "import transformers.masking_utils, transformers.modeling_utils\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "start = time.process_time()\nimport posttrain.config, posttrain.rollout\n"
        "print(time.process_time() - start)"
    )
    seconds = (float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(2))
    assert any(one < allowed(1.0) for one in seconds)  # the second time only where the first was too long
