"""The examples: every command of their READMEs as printed, and what it leaves."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT, forking_python, rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
NOT_HERE = re.compile(
    r"sbatch -N|squeue|megatron-tlt (status|report) runs/slurm-7b"
)  # GPUs, and a run on them
GSM8K = {"question": "A pen costs 2. What do three cost?", "answer": "Three cost 3 * 2 = 6.\n#### 6"}


def commands(readme: Path) -> list[str]:
    lines = [line[4:] for line in readme.read_text().splitlines() if line.startswith("    ")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (".venv", "assets", "configs", "examples", "launch", "megatron_tlt", "slurm", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "problems.jsonl").write_text(json.dumps(GSM8K) + "\n")
    return tmp_path


@pytest.mark.parametrize("example", FOLDERS, ids=lambda path: path.name)
def test_the_commands_of_an_example_run_as_printed(example: Path, folder: Path):
    environment = rank_environment() | {"PYTHON": str(forking_python(folder))}
    ran = 0
    for command in commands(example / "README.md"):
        if NOT_HERE.search(command):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        ran += 1
    assert ran >= 2
    outputs = {"own_reward": "own-reward.html", "own_drafter": "runs/own-drafter-vllm/config.json"}
    assert (folder / outputs.get(example.name, "data/math-train.jsonl")).stat().st_size > 0


def test_python_of_examples_is_short_and_each_has_a_configuration():
    for example in FOLDERS:
        assert list(example.glob("*.yaml"))
        assert all(len(path.read_text().splitlines()) <= 60 for path in example.glob("*.py"))
