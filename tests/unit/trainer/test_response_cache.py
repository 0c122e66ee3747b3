"""What a cached response depends on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.distributed.together import SingleProcess
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


def test_a_response_of_another_config_json_or_of_an_engine_with_other_arguments_is_not_used(tmp_path: Path) -> None:
    """The weights are the same bits."""
    written = json.loads((ROOT / "assets/demo-policy/config.json").read_text()) | {"rope_parameters": None}

    def identity(engine: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(written | changed))
        rollout = RolloutSection.model_validate({"backend": "vllm", "vllm": {"engine": engine or {}}})
        about = SamplingParams(), rollout, None, tmp_path, None, "cuda", SingleProcess()
        return response_cache.response_identity(*about)

    own = identity()
    assert own == identity()
    assert own != identity(rope_theta=5000.0) and own != identity(rms_norm_eps=1e-3)
    assert own != identity({"kv_cache_dtype": "fp8"})
