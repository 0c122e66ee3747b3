"""Every part of `benchmarks/gpu_check.py` on a GPU, in small: no failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check


@pytest.mark.parametrize("part", [part for part in gpu_check.PARTS if part != "kernels"])
def test_the_part_has_no_failures(part: str, tmp_path: Path):
    out = tmp_path / "r.json"
    assert gpu_check.main(["--smoke", "--parts", part, "--out", str(out)]) == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["failures"] == 0 and len(summary) > 2
