"""The whole package in `sys.modules`, from one contract. What it responses is `toy`'s."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .classes import Fake
from .contract import Contract
from .toy import make_llm, make_mapper, make_worker_extension


def install(contract: Contract, environ: Mapping[str, str]) -> Fake:
    """Puts the package and its modules into sys.modules."""
    from_here = Fake(contract, environ)
    modules: dict[str, types.ModuleType] = {}

    def module(path: str) -> types.ModuleType:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in modules:
                made = sys.modules.get(name) if name == "tensorrt_llm" else None
                modules[name] = made or types.ModuleType(name)
                modules[name].__dict__.setdefault("__path__", [])
                sys.modules[name] = modules[name]
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[name])
        return modules[path]

    module("tensorrt_llm").__version__ = contract.data["version"]  # type: ignore[attr-defined]
    special = {
        "AsyncLLM": make_llm,
        "WorkerExtension": make_worker_extension,
        "AutoCheckpointMapper": make_mapper,
    }
    for cls, entry in contract.data["classes"].items():
        if "module" in entry:
            made = special[cls](from_here) if cls in special else from_here.record(cls)
            setattr(module(entry["module"]), contract.name("classes", cls), made)
    arguments = {"model_fields": from_here.field_names("AsyncLLM")}
    module("tensorrt_llm.llmapi").TorchLlmArgs = type("TorchLlmArgs", (), arguments)  # type: ignore[attr-defined]
    bodies = {"control_action_decorator": lambda f: f, "get_device_uuid": lambda device: f"GPU-{device}"}
    for key, entry in contract.data["functions"].items():
        setattr(module(entry["module"]), contract.name("functions", key), noted(contract, key, bodies[key]))
    return from_here


def uninstall() -> None:
    """Removes the package from sys.modules."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def noted(contract: Contract, key: str, body: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        contract.use("functions", key)
        return body(*args)

    return call
