"""Compares an installed TensorRT-LLM with a recorded contract: run it with the Python of TensorRT-LLM's environment.

    ENV/bin/python tools/check_trtllm_contract.py tests/contracts/trtllm/1.2.1.json
    python tools/check_trtllm_contract.py tests/contracts/trtllm/1.2.1.json --sources CHECKOUT
    python tools/check_trtllm_contract.py CONTRACT --sources CHECKOUT --write NEW.json --commit SHA

The other forms read a checkout or an unpacked wheel and import nothing (`trtllm_signatures.py`); the last one
writes the contract that these sources keep. Prints each recorded class, field,
method and parameter that is not there, and what could not be looked at. Exit code 1 if something is
missing, 2 if there is no tensorrt_llm. Standard library and tensorrt_llm only, Python 3.10.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_signatures import contract_from, source_differences

# The engine's class passes what it does not name itself to this one's fields.
ARGUMENTS_OF = {"AsyncLLM": ("tensorrt_llm.llmapi", "TorchLlmArgs")}


def differences(contract: dict[str, Any]) -> Iterator[str]:
    """Entries of the contract that this installation lacks, a line each."""
    installed = importlib.import_module("tensorrt_llm").__version__
    if installed != contract["version"]:
        yield f"version: {installed} is installed, the contract is of {contract['version']}"
    for name, entry in contract["classes"].items():
        if "module" in entry:
            yield from _class_differences(name, entry)
    for name, entry in contract["functions"].items():
        if _find(entry["module"], name) is None:
            yield f"function {entry['module']}.{name}: missing"


def unseen(contract: dict[str, Any]) -> list[str]:
    """Entries that only a running engine can show: its objects, values, figures."""
    made = [name for name, entry in contract["classes"].items() if "module" not in entry]
    attributes = [
        name for name, entry in contract["classes"].items() if "module" in entry and "attributes" in entry
    ]
    return [*made, *(f"attributes of {name}" for name in attributes), "literals", "stats", "environment"]


def _class_differences(name: str, entry: dict[str, Any]) -> Iterator[str]:
    cls = _find(entry["module"], name)
    if cls is None:
        yield f"class {entry['module']}.{name}: missing"
        return
    known = _arguments(cls)
    if name in ARGUMENTS_OF:
        known |= _arguments(_find(*ARGUMENTS_OF[name]))
    for field in entry.get("fields", {}):
        if field not in known:
            yield f"{name}.{field}: no such field"
    for method, said in entry.get("methods", {}).items():
        function = getattr(cls, method, None)
        if function is None:
            yield f"{name}.{method}(): missing"
            continue
        there = inspect.signature(function).parameters
        yield from (f"{name}.{method}({p}): no such parameter" for p in said["params"] if p not in there)


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _arguments(cls: Any) -> set[str]:
    """Names that the constructor takes: a pydantic model's fields with their aliases, or the signature's."""
    fields = getattr(cls, "model_fields", None)
    if not isinstance(fields, dict):
        return set() if cls is None else set(inspect.signature(cls).parameters)
    aliases = [getattr(field, "validation_alias", None) for field in fields.values()]
    choices = [getattr(alias, "choices", [alias]) for alias in aliases]
    return {*fields, *(name for names in choices for name in names if isinstance(name, str))}


def main() -> int:
    """Prints the comparison; 1 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("contract", type=Path)
    parser.add_argument("--sources", type=Path, help="a checkout of TensorRT-LLM, or its wheel unpacked")
    parser.add_argument("--write", type=Path, help="with --sources: the contract as they have it")
    parser.add_argument("--commit", help="with --write: that the sources are of, or the wheel's name")
    args = parser.parse_args()
    if args.write is not None and (args.sources is None or args.commit is None):
        parser.error("--write needs --sources and --commit")
    contract = json.loads(args.contract.read_text(encoding="utf-8"))
    if args.write is not None:
        made = contract_from(contract, args.sources, args.commit)
        args.write.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if args.sources is not None:
        found = list(source_differences(contract, args.sources))
        print("\n".join(found) if found else f"all recorded names are in {args.sources}")
        return 1 if found else 0
    try:
        importlib.import_module("tensorrt_llm")
    except ImportError as error:
        why = f"{sys.executable} cannot import tensorrt_llm ({error})"
        print(f"{why}: run this with the Python of its environment", file=sys.stderr)
        return 2
    found = list(differences(contract))
    print("\n".join(found) if found else f"all recorded names of {contract['version']} are there")
    print(f"not looked at (it takes a running engine): {', '.join(unseen(contract))}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
