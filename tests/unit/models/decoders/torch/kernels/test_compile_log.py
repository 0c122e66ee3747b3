"""What a first start says about the kernels that Triton compiles."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from megatron_tlt.models.decoders import factory
from megatron_tlt.models.decoders.torch.kernels.compile_log import CompileLog


def test_compiling_is_said_at_once_and_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = CompileLog(lambda: now)
    with caplog.at_level(logging.INFO):
        for seconds in (0.01, 1.5, 4.0, 4.0, 0.01, 4.0, 4.0):  # two are in the cache on disk
            log.before(key="k")
            now += seconds
            log.after(fn=SimpleNamespace(name="_draw"), key="k")
            now += 100.0
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("Triton compiled kernel _draw in 1.5 s: a first start compiles")
    assert said[1:] == ["Triton has compiled 4 kernels in 14 s"]
    assert (log.kernels, log.seconds) == (5, 17.5)


def test_kernels_on_a_gpu_are_logged_and_other_hooks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    assert factory.sample_kernel("torch", torch.device("cuda")) is None
    assert knobs.runtime.jit_cache_hook is None
    assert factory.sample_kernel("auto", torch.device("cuda")) is not None
    mine = knobs.runtime.jit_cache_hook
    assert mine is not None and knobs.runtime.jit_post_compile_hook is not None
    factory.sample_kernel("auto", torch.device("cuda"))
    assert knobs.runtime.jit_cache_hook == mine
