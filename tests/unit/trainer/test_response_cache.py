"""What a cached response depends on."""

from __future__ import annotations

import pytest

from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.trainer import response_cache
from megatron_tlt.types import SamplingParams
from tests.helpers.mpi import ROOT


def test_a_response_of_another_kind_of_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind, device in (("x86_64 avx2", "cpu"), ("x86_64 avx2 avx512f", "cpu"), ("NVIDIA H100", "cuda")):
        monkeypatch.setattr(response_cache, "processor", lambda device, kind=kind: kind)
        model = ROOT / "assets/demo-policy"
        found.append(response_cache.response_identity(SamplingParams(), RolloutSection(), None, model, None, device))
    assert [identity.get("processor") for identity in found] == ["x86_64 avx2", "x86_64 avx2 avx512f", None]
