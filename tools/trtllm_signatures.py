"""Signatures of TensorRT-LLM's sources by `ast`: nothing is imported, so neither a GPU nor its dependencies are needed.

    python tools/trtllm_signatures.py CHECKOUT --commit SHA --out tests/contracts/trtllm/signatures/SHA8.json PATH

Reads PATH below CHECKOUT (an unpacked wheel will do) and records of each class its bases, names of fields, methods
with parameters and defaults, and what the methods reach from `self`; of each function its parameters. No code is kept.
A record has one class or function a line. Standard library only, Python 3.10.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Signature = dict[str, Any]


def read_module(source: str) -> Signature:
    """Classes and functions of a module, by name."""
    tree = ast.parse(source)
    classes = {node.name: _class(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:  # `Old = New`: a class under a second name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in classes:
            classes |= {t.id: _second_name(node.value.id) for t in node.targets if isinstance(t, ast.Name)}
    return {
        "classes": classes,
        "functions": {node.name: _function(node) for node in tree.body if isinstance(node, _FUNCTIONS)},
    }


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _class(node: ast.ClassDef) -> Signature:
    """Bases, annotated fields and their aliases, methods, and names reached from `self`."""
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    methods = [item for item in node.body if isinstance(item, _FUNCTIONS)]
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "fields": sorted(fields | {alias for item in node.body for alias in _aliases(item)}),
        "methods": {method.name: _function(method) for method in methods},
        "reached": sorted({name for method in methods for name in _reached(method)}),
        "replaced_arguments": dict(found for method in methods for found in _replaced(method)),
    }


def _second_name(of: str) -> Signature:
    """What a name has that stands for another class of its module."""
    return {"bases": [of], "fields": [], "methods": {}, "reached": [], "replaced_arguments": {}}


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Parameters in order with their defaults (null: none), without `self`."""
    positional = [*node.args.posonlyargs, *node.args.args]
    values: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults))
    values += node.args.defaults
    pairs = [*zip(positional, values), *zip(node.args.kwonlyargs, node.args.kw_defaults)]
    params = {arg.arg: _default(value) for arg, value in pairs if arg.arg not in ("self", "cls")}
    found: Signature = {"params": params, "decorators": [ast.unparse(d) for d in node.decorator_list]}
    if node.args.vararg or node.args.kwarg:
        found["takes_more"] = True
    return found


def _default(value: ast.expr | None) -> str | None:
    """The text of a default; long ones are cut, for a name is what is compared."""
    return None if value is None else ast.unparse(value)[:60]


def _aliases(item: ast.stmt) -> Iterator[str]:
    """Strings in a field's alias=, validation_alias= and the like."""
    if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call):
        for keyword in item.value.keywords:
            if keyword.arg and "alias" in keyword.arg:
                for node in ast.walk(keyword.value):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield node.value


def _reached(method: ast.AST) -> Iterator[str]:
    """Dotted names that begin with `self.`, without it; each beginning of a chain counts as well."""
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith("self.") and text.replace(".", "").replace("_", "").isalnum():
                yield text[len("self.") :]


def _replaced(method: ast.AST) -> Iterator[tuple[str, int]]:
    """`arguments[6] = self.device_id` gives ("device_id", 6)."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            place, text = node.targets[0].slice, ast.unparse(node.value)
            is_place = isinstance(place, ast.Constant) and isinstance(place.value, int)
            if is_place and text.startswith("self."):
                yield text[len("self.") :], place.value  # type: ignore[union-attr]


def record_of(commit: str, path: str, found: Signature) -> str:
    """JSON with a class or a function on a line."""

    def lines(entries: Signature) -> str:
        return ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())

    head = [f' "commit": {json.dumps(commit)}', f' "file": {json.dumps(path)}']
    parts = [f' "{kind}": {{\n{lines(entries)}\n }}' for kind, entries in found.items() if entries]
    return "{\n" + ",\n".join(head + parts) + "\n}\n"


def main() -> int:
    """Records the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("path", help="a file, relative to the checkout")
    parser.add_argument("--commit", required=True, help="that the file was read at")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = read_module((args.checkout / args.path).read_text(encoding="utf-8"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(record_of(args.commit, args.path, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
