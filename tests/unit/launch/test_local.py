"""launch/local.sh and launch/setup.sh, with programs that only tell how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAKE = """#!/usr/bin/env bash
printf 'arg %s\\n' "$@"
printf 'threads %s\\n' "$OMP_NUM_THREADS"
printf 'yield %s\\n' "$MPIR_CVAR_ENABLE_HEAVY_YIELD"
exit 7
"""


def run(tmp_path: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of launch/ with a fake mpiexec in a directory with a space."""
    fake = tmp_path / "a folder" / "mpiexec"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = {**os.environ, "MPIEXEC": str(fake), "PYTHON": "/bin/true", **environment}
    command = [str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_local_passes_ranks_threads_and_overrides_and_the_exit_code(tmp_path):
    done = run(tmp_path, "local.sh", "-n", "3", "-t", "2", "my config.yaml", "a.b=[1, 2]")
    assert done.returncode == 7
    arguments = [line[4:] for line in done.stdout.splitlines() if line.startswith("arg ")]
    assert arguments[:4] == ["-iface", "lo", "-n", "3"]
    assert arguments[5:] == ["-m", "mpi4py", "-m", "megatron_tlt", "train", "my config.yaml", "a.b=[1, 2]"]
    assert "threads 2\n" in done.stdout
    assert "yield 1\n" in done.stdout


@pytest.mark.parametrize(
    ("extra", "tail"), [(["x.yaml"], ["sft", "x.yaml"]), (["--", "--n", "2"], ["sft", "--n", "2"])]
)
def test_local_starts_other_commands(tmp_path, extra, tail):
    done = run(tmp_path, "local.sh", "--cmd", "sft", *extra)
    arguments = [line[4:] for line in done.stdout.splitlines() if line.startswith("arg ")]
    assert arguments[-len(tail) :] == tail


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "c.yaml"], "-n takes a number above 0, not '0'"),
        (["-n"], "-n takes a number above 0, not ''"),
        (["--rank", "2", "c.yaml"], "unknown option --rank"),
        (["-n", "2"], "no configuration given"),
        (["--cmd"], "--cmd takes a subcommand"),
    ],
)
def test_local_explains_wrong_arguments(tmp_path, arguments, message):
    done = run(tmp_path, "local.sh", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_local_before_setup_names_the_next_step(tmp_path):
    done = run(tmp_path, "local.sh", "c.yaml", MPIEXEC="/nowhere/mpiexec")
    assert done.returncode == 2
    assert "/nowhere/mpiexec is not there: run 'make setup' first" in done.stderr


@pytest.mark.parametrize(
    ("limit", "hours"),
    [
        ("90", "1.5"),
        ("30:00", "0.5"),
        ("4:00:00", "4"),
        ("1-06", "30"),
        ("1-06:30", "30.5"),
        ("UNLIMITED", ""),
    ],
)
def test_time_limits_are_read_in_all_of_slurms_forms(limit, hours):
    script = f'source "{ROOT}/slurm/common.sh"; hours_of "$1"'
    done = subprocess.run(["bash", "-c", script, "_", limit], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == hours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "c.yaml"], "-n takes a number above 0, not '0'"),
        (["--rank", "2", "c.yaml"], "unknown option --rank"),
        ([], "no configuration given"),
        (["c.yaml"], "no Slurm allocation"),
    ],
)
def test_interactive_explains_wrong_arguments(tmp_path, arguments, message):
    done = run(tmp_path, "interactive.sh", *arguments, SLURM_JOB_ID="")
    assert done.returncode == 2
    assert message in done.stderr
