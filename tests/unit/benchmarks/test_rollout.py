"""benchmarks/gpu/rollout.py: its arguments and sums; and on the demo policy it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import rollout
from benchmarks.gpu.bounds import Device
from megatron_tlt.models.config import ModelConfig
from tests.helpers.mpi import ROOT, rank_environment

CONFIG = ModelConfig("qwen3", 1000, 64, 3, 8, 2, 16, 96, qk_norm=True)


@pytest.mark.parametrize("wrong", [[], ["--model", "a", "--shape", "b"], ["--quick", "--batches", "0"]])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(SystemExit) as caught:
        rollout.parse_arguments(wrong)
    assert caught.value.code == 2


def test_given_figures_overrule(monkeypatch):
    monkeypatch.setattr(rollout, "name_of", lambda device: "NVIDIA H200")
    cpu, fp32 = torch.device("cpu"), torch.float32
    assert rollout.device_of(rollout.parse_arguments(["--quick"]), cpu, fp32).source == "data sheet"
    given = rollout.device_of(rollout.parse_arguments(["--quick", "--bandwidth", "100"]), cpu, fp32)
    assert astuple(given) == ("NVIDIA H200", 1e11, 989e12, "given")


def test_summary_is_over_the_bounds():
    device = Device("d", 1e9, 1e12, "given")
    setup = rollout.Setup(Path("m"), CONFIG, torch.device("cpu"), "fp32", [1], 8, 9, 2, 4)
    rows = [
        {"batch": 1, "side": "embedded", "tokens_per_s": 100.0, "embedded_over_it": 1.0},
        {"batch": 1, "side": "transformers", "tokens_per_s": 40.0, "embedded_over_it": 2.5},
    ]
    summary = rollout.summarize(rows, setup, device)
    read = 4 * (3 * 64 * (20 * 16 + 3 * 96) + 64 * 1000 + 12 * 2 * 3 * 2 * 16 + 64)
    assert summary["of_bandwidth_bound_1"] == pytest.approx(100 * read / 1e9)
    assert summary["of_bound_1"] == max(summary["of_bandwidth_bound_1"], summary["of_compute_bound_1"])
    assert summary["vs_transformers_1"] == 2.5


@pytest.mark.slow
def test_it_runs_on_the_demo_policy(tmp_path):
    out = tmp_path / "r.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/rollout.py"), "--device", "cpu", "--quick"]
    command += ["--out", str(out)]
    subprocess.run(command, check=True, timeout=300, env=rank_environment(), cwd=ROOT)
    record = json.loads(out.read_text())
    assert {row["batch"] for row in record["rows"]} == {1, 4}
    assert 0 < record["summary"]["of_bound_1"] < 1.5 and record["summary"]["vs_transformers_4"] > 0
