"""The examples: every command of their READMEs as printed, and what it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT
from tests.helpers.runs import commands, make_folder, run_as_printed

pytestmark = pytest.mark.ci

FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
NOT_HERE = re.compile(r"sbatch -N|squeue|megatron-tlt (status|report) runs/slurm-7b|vllm serve")  # GPUs, a server
GSM8K = {"question": "A pen costs 2. What do three cost?", "answer": "Three cost 3 * 2 = 6.\n#### 6"}
LEFT = {
    "own_drafter": "runs/own-drafter-sglang/config.json",
    "own_env": "own-env.html",
    "own_reward": "own-reward.html",
    "slurm_7b": "data/math-train.jsonl",
}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("example", FOLDERS, ids=lambda path: path.name)
def test_the_commands_of_an_example_run_as_printed(example: Path, tmp_path: Path):
    for name in ("problems.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text(json.dumps(GSM8K) + "\n")
    printed = commands((example / "README.md").read_text())
    run_as_printed(make_folder(tmp_path), [command for command in printed if not NOT_HERE.search(command)])
    assert (tmp_path / LEFT[example.name]).stat().st_size > 0


def test_an_example_is_a_configuration_and_little_python():
    for example in FOLDERS:
        assert list(example.glob("*.yaml"))
        assert all(len(path.read_text().splitlines()) <= 60 for path in example.glob("*.py"))
