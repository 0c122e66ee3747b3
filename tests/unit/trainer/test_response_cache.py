"""What a cached response depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.trainer import response_cache
from megatron_tlt.types import SamplingParams
from tests.helpers.mpi import ROOT


def test_a_response_of_another_kind_of_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads some of the files: all must judge them alike, also ranks on different kinds."""
    found = []
    for kinds, device in ((["avx2"], "cpu"), (["avx512f", "avx2", "avx2"], "cpu"), (["NVIDIA H100"], "cuda")):
        monkeypatch.setattr(response_cache, "processor", lambda device, kinds=kinds: kinds[0])
        ranks: Any = SimpleNamespace(all_gather_object=lambda mine, kinds=kinds: kinds)
        about = SamplingParams(), RolloutSection(), None, ROOT / "assets/demo-policy", None, device, ranks
        found.append(response_cache.response_identity(*about))
    assert [identity["processors"] for identity in found] == [["avx2"], ["avx2", "avx512f"], []]
