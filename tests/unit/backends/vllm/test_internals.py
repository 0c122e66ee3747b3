"""A vLLM that is not the one that the plugin is written for is named, difference by difference."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from megatron_tlt.backends.vllm.plugin import internals


def function(parameters: str) -> object:
    scope: dict[str, object] = {}
    exec(f"def f({', '.join(parameters.split())}): ...", scope)
    return scope["f"]


@pytest.fixture
def recorded() -> Iterator[dict[str, ModuleType]]:
    """Modules with exactly what is recorded."""
    modules: dict[str, ModuleType] = {}

    def owner(module: str, path: list[str]) -> object:
        found: object = modules.setdefault(f"vllm.{module}", ModuleType(f"vllm.{module}"))
        for name in path:
            if not hasattr(found, name):
                setattr(found, name, type(name, (), {}))
            found = getattr(found, name)
        return found

    for module, name, parameters in internals.SIGNATURES:
        *path, last = name.split(".")
        setattr(owner(module, path), last, function(parameters))
    for module, name, fields in internals.FIELDS:
        setattr(owner(module, []), name, dataclasses.make_dataclass(name, fields.split()))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    yield modules
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def test_differences_are_named(recorded: dict[str, ModuleType]) -> None:
    assert internals.differences("0.32.4") == []
    assert internals.differences("0.33.0") == ["version 0.33.0: the plugin is written for 0.32.x"]
    runner = recorded["vllm.v1.worker.gpu_model_runner"]
    setattr(runner.GPUModelRunner, "_sample", function("self logits metadata extra"))  # noqa: B010
    outputs = recorded["vllm.v1.outputs"]
    setattr(outputs, "SamplerOutput", dataclasses.make_dataclass("S", ["sampled_token_ids"]))  # noqa: B010
    del recorded["vllm.v1.engine.llm_engine"].LLMEngine.step  # type: ignore[attr-defined]
    text = "\n".join(internals.differences("0.32.0"))
    assert "GPUModelRunner._sample has the parameters (self logits metadata extra)" in text
    assert "SamplerOutput has no logprobs_tensors" in text
    assert "LLMEngine.step: " in text
    assert len(text.splitlines()) == 3
