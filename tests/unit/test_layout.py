"""Budgets of the tree that no linter holds (floors and vendor libraries are import-linter's, in pyproject.toml)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "megatron_tlt").rglob("*.py"))
BESIDE = [p for folder in ("benchmarks", "tests", "tools") for p in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [*PACKAGE, *BESIDE]
# Functions, methods and classes of a file, private and nested ones too. Half of the package's files have at most 8,
# 99 % at most 34, and the largest 37 (tests: 44): a file with more holds several subjects. Lines are not counted: a
# file that grows by an argument or a docstring needs no cut.
MAX_DEFINITIONS = 45
MAX_FUNCTION = 80  # lines without the docstring


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    doc = 0
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        doc = first.end_lineno - first.lineno + 1
    return node.end_lineno - node.lineno + 1 - doc


def test_nothing_stands_loose_in_the_package():
    loose = {p.name for p in (ROOT / "megatron_tlt").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "errors.py", "interfaces.py", "types.py"}


def test_unit_tests_mirror_the_package():
    """A folder of tests/unit is a folder of the package, or of what stands beside it."""
    beside = {"benchmarks", "launch", "slurm", "tools"}
    folders = {path.parent.relative_to(ROOT / "tests/unit") for path in (ROOT / "tests/unit").rglob("test_*.py")}
    absent = [str(f) for f in folders if str(f) not in beside and not (ROOT / "megatron_tlt" / f).is_dir()]
    assert absent == []


@pytest.mark.parametrize("path", [p for p in PACKAGE if p.name == "__init__.py"], ids=label)
def test_an_init_file_is_one_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_a_file_defines_one_subject():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {p: sum(isinstance(n, kinds) for n in ast.walk(ast.parse(p.read_text()))) for p in SOURCES}
    assert {label(p): n for p, n in defined.items() if n > MAX_DEFINITIONS} == {}


def test_functions_fit_on_a_screen():
    long = {}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MAX_FUNCTION:
                long[f"{label(path)}:{node.name}"] = body_lines(node)
    assert long == {}
