"""Larger policies compute the logits of the small one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lib.larger_policy import deepen, widen
from tests.helpers.runs import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies")
    make_model(path / "small")
    deepen(path / "small", 5, path / "deep")
    widen(path / "small", 160, path / "wide")
    return path


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["deep", "wide"])
def test_the_logits_are_those_of_the_small_policy(folder: Path, kind: str):
    tokens = torch.arange(1, 40)[None]
    small, large = load(folder / "small"), load(folder / kind)
    assert sum(p.numel() for p in large.parameters()) > sum(p.numel() for p in small.parameters())
    torch.testing.assert_close(large(tokens).logits, small(tokens).logits, rtol=0, atol=1e-5)
