"""Size budgets: what is small stays readable. Each test prints the current worst."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterable, Iterator

import pytest

FILE_CAP, FILE_P90 = 600, 400
FUNCTION_CAP, LOOP_CAP, FUNCTION_P90, FUNCTION_MEDIAN = 60, 80, 40, 12
METHOD_CAP = 12
PARAMETER_CAP, OPTION_CAP = 8, 12  # of functions; of commands, whose options are named one by one
FORBIDDEN_NAMES = ("Base", "Manager", "Helper", "Wrapper")
FORBIDDEN_FILES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py"}


def functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def p90(values: list[int]) -> float:
    return statistics.quantiles(values, n=10)[-1] if len(values) > 1 else 0


def worst(found: list[tuple[int, str]], count: int = 3) -> str:
    return ", ".join(f"{name} ({size})" for size, name in sorted(found, reverse=True)[:count])


def test_files(modules):
    sizes = [(len(module.text.splitlines()), module.shown) for module in modules]
    print(f"largest files: {worst(sizes)}")
    assert not [entry for entry in sizes if entry[0] > FILE_CAP], f"over {FILE_CAP} lines: {worst(sizes)}"
    assert p90([size for size, _ in sizes if size]) <= FILE_P90


def test_functions(modules):
    sizes, over = [], []
    for module in modules:
        cap = LOOP_CAP if module.name.startswith("loops") else FUNCTION_CAP
        for node in functions(module.nodes):
            entry = (length(node), f"{module.shown}:{node.lineno} {node.name}")
            sizes.append(entry)
            over += [entry] if entry[0] > cap else []
    print(f"longest functions: {worst(sizes)}")
    assert not over, f"too long: {worst(over, 10)}"
    lengths = [size for size, _ in sizes]
    assert statistics.median(lengths) <= FUNCTION_MEDIAN
    assert p90(lengths) <= FUNCTION_P90


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton kernels take their pointers, strides and compile-time sizes one by one: there is no other way in."""
    return any(ast.unparse(decorator).split("(")[0] == "triton.jit" for decorator in node.decorator_list)


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("app.command") for decorator in node.decorator_list)


def test_parameters(modules):
    counts, over = [], []
    for module in modules:
        for node in functions(module.nodes):
            if is_kernel(node):
                continue
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            entry = (len([n for n in names if n not in ("self", "cls")]), f"{module.shown} {node.name}")
            counts.append(entry)
            over += [entry] if entry[0] > (OPTION_CAP if is_command(node) else PARAMETER_CAP) else []
    print(f"most parameters: {worst(counts)}")
    assert not over, f"over {PARAMETER_CAP} parameters: {worst(over, 10)}"


def test_public_methods(modules):
    counts = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                public = {n.name for n in methods_of(node) if not n.name.startswith("_")}
                counts.append((len(public), f"{module.shown} {node.name}"))
    print(f"most public methods: {worst(counts)}")
    over = [entry for entry in counts if entry[0] > METHOD_CAP]
    assert not over, f"over {METHOD_CAP} public methods: {worst(over, 10)}"


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Without properties: they are read like fields."""
    found = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [child for child in found if "property" not in {ast.unparse(d) for d in child.decorator_list}]


def test_names(modules):
    files = [module.shown for module in modules if module.path.name in FORBIDDEN_FILES]
    assert not files, f"a file is named for what it holds: {files}"
    named = [
        f"{module.shown} {node.name}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        and node.name.startswith(FORBIDDEN_NAMES) | node.name.endswith(FORBIDDEN_NAMES)
    ]
    assert not named, f"a class is named for what it is: {named}"


def test_every_file_and_public_class_says_what_it_is(modules):
    silent = [module.shown for module in modules if module.tree.body and not ast.get_docstring(module.tree)]
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{module.shown} {node.name}")
    assert not silent, f"without a docstring: {silent}"


def test_failures_are_not_swallowed(modules):
    """A bare `except:` never; `except Exception` only with a comment or code that says what becomes of it."""
    bare = [
        f"{module.shown}:{node.lineno}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (len(node.body) == 1 and isinstance(node.body[0], ast.Pass) and is_broad(node.type)))
    ]
    assert not bare, f"failures swallowed: {bare}"


def is_broad(kind: ast.expr) -> bool:
    return isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")


@pytest.mark.parametrize(
    ("source", "lines"), [("def f():\n    '''a\n    b'''\n    return 1\n", 2), ("def f(): ...\n", 1)]
)
def test_length_does_not_count_docstrings(source: str, lines: int):
    assert [length(node) for node in functions(ast.walk(ast.parse(source)))] == [lines]
