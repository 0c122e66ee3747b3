"""A vLLM that is not the one that the plugin is written for is named, difference by difference."""

from __future__ import annotations

from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from megatron_tlt.backends.vllm.plugin import compat


def test_differences_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(step=lambda self, more: None)
    there = SimpleNamespace(Engine=engine, Output=make_dataclass("Output", ["ids"]))
    monkeypatch.setattr(compat, "import_module", lambda name: there)
    monkeypatch.setattr(compat, "SIGNATURES", (("v1", "Engine.step", "self more"),))
    monkeypatch.setattr(compat, "FIELDS", (("v1", "Output", "ids"),))
    assert compat.differences("0.32.4") == []
    assert compat.differences("0.33.0") == ["version 0.33.0: the plugin is written for 0.32.x"]
    monkeypatch.setattr(compat, "SIGNATURES", (("v1", "Engine.step", "self"), ("v1", "Engine.abort", "self")))
    monkeypatch.setattr(compat, "FIELDS", (("v1", "Output", "ids logprobs"),))
    found = compat.differences("0.32.0")
    assert found[0] == "v1.Engine.step has the parameters (self more), not (self)"
    assert found[1].startswith("v1.Engine.abort: ") and found[2:] == ["v1.Output has no logprobs"]
