"""Every benchmark runs: `--quick`, its record and what must be so in it. `gpu_check.py` has tests of its own."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT, rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.nightly]

POLICY = ["--policy", str(ROOT / "assets/demo-policy")]
# Its arguments, figures that the summary has, and those that are 1.
RUNS = {
    "bench_agents": ([], {"off_0", "on_0.1", "waiting_0.1", "decoding_0"}, {"identical"}),
    "bench_drafter_kinds": (
        [*POLICY, "--kinds", "eagle", "dspark1"],
        {"accepted_eagle_8r_1s_t1.0", "accepted_dspark1_8r_1s_t0.7", "draft_ms_eagle_288_16"},
        set(),
    ),
    "bench_idle": (["--options", "train.prompts_per_step=8"], {"recovered", "merge_share", "interference"}, set()),
    "bench_rollout": (
        ["--sides", "ours plain", "ours TLT", "transformers"],
        {"tlt_gain_4", "vs_transformers_4"},
        set(),
    ),
    "bench_speculation": ([], {"speedup_b1", "speedup_tail", "worst_batch", "accept_length"}, set()),
    "bench_train": ([], {"vs_torch", "vs_torch_uneven"}, set()),
    "proof": (["--picture", "p.svg"], {"rollout", "e2e", "accept_length", "update_saved"}, {"identical"}),
}


def run(tmp_path: Path, script: str, *arguments: str) -> dict:
    """The record of a quick run. Its files are in `tmp_path`."""
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), "--quick", *arguments]
    done = subprocess.run(
        [*command, "--out", "r.json"], cwd=tmp_path, env=rank_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((tmp_path / "r.json").read_text())


def test_every_benchmark_has_a_run():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == {*RUNS, "real", "gpu_check"}


@pytest.mark.parametrize("script", RUNS)
def test_a_quick_run(script: str, tmp_path: Path):
    arguments, figures, equal = RUNS[script]
    work = [] if script in ("bench_rollout", "bench_speculation", "bench_train") else ["--work", str(tmp_path / "w")]
    record = run(tmp_path, script, *arguments, *work)
    assert record["rows"] and record["command"] and record["machine"]
    assert figures | equal <= record["summary"].keys()
    assert all(record["summary"][name] == 1 for name in equal)


def test_the_comparison_of_cpu_paths_refuses_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("benchmarks.bench_train")
    monkeypatch.setattr(script, "HAS_CUDA", True)
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "--quick"])
    with pytest.raises(SystemExit, match="CUDA_VISIBLE_DEVICES="):
        script.main()


def test_a_quick_run_of_a_real_model(tmp_path: Path):
    """The demo policy stands in for SmolLM2 and for its cold start, whose solutions are too long in its tokens."""
    model = ROOT / "assets/demo-policy"
    shutil.copytree(model, tmp_path / "w/cold-start")
    words = ["--model", str(model), "--work", str(tmp_path / "w"), "--picture", "p.svg"]
    words += ["--options", "rollout.speculation.draft_vocab_size=null"]
    record = run(tmp_path, "real", *words, "--parts", "model", "drafter", "grpo", "plain", "eval")
    assert record["summary"]["identical"] == 1
    assert {"rollout", "e2e", "plain_cost", "accuracy_after", "accept_frozen"} <= record["summary"].keys()
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_a_quick_run_beside_trl(tmp_path: Path):
    if not (ROOT / ".venv/peers-trl/bin/python").exists():
        pytest.skip("no TRL: make bench-trl")
    summary = run(tmp_path, "lib/proof_trl")["summary"]
    assert summary["vs_trl"] > 0
    assert 0 < summary["trl_accuracy"] < 1
