"""Arguments that this vLLM does not have are named before an engine starts."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from megatron_tlt.backends.vllm.plugin import adapter, compat
from megatron_tlt.errors import ConfigError


def test_an_argument_that_vllm_lacks_is_named_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = make_dataclass("EngineArgs", ["model", "cpu_offload_gb"])
    engine = SimpleNamespace(from_engine_args=lambda args: pytest.fail("it started"))
    there = SimpleNamespace(__version__="0.32.0+cpu", EngineArgs=taken, LLMEngine=engine)
    monkeypatch.setitem(sys.modules, "vllm", there)
    monkeypatch.setattr(compat, "differences", lambda version: [])
    monkeypatch.setattr(adapter, "register", lambda: None)
    with pytest.raises(ConfigError) as caught:
        adapter.start_engine({"model": "m", "cpu_ofload_gb": 2, "swap_space": 1}, records_routers=False)
    assert [(p.path, p.value, p.allowed) for p in caught.value.problems] == [
        ("rollout.vllm.engine.cpu_ofload_gb", 2, "is no argument of vLLM 0.32.0; did you mean cpu_offload_gb?"),
        ("rollout.vllm.engine.swap_space", 1, "is no argument of vLLM 0.32.0"),
    ]
