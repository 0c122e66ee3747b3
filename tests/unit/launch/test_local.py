"""launch/local.sh and launch/setup.sh, with programs that only tell how they were called."""

import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.mpi import MPIEXEC
from tests.unit.slurm.test_scripts import slurm_job

ROOT = Path(__file__).parents[3]
FAKE = """#!/usr/bin/env bash
printf 'arg %s\\n' "$@"
printf 'threads %s\\n' "$OMP_NUM_THREADS"
printf 'yield %s\\n' "$MPIR_CVAR_ENABLE_HEAVY_YIELD"
printf 'hashes %s\\n' "$PYTHONHASHSEED"
printf 'heap %s\\n' "$GLIBC_TUNABLES"
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
    assert arguments[:2] == ["-n", "3"]
    assert arguments[3:] == ["-m", "mpi4py", "-m", "megatron_tlt", "train", "my config.yaml", "a.b=[1, 2]"]
    assert "threads 2\n" in done.stdout
    assert "yield 1\n" in done.stdout
    assert f"hashes {os.environ.get('PYTHONHASHSEED', '0')}\n" in done.stdout


@pytest.mark.parametrize("own", ["", "glibc.malloc.check=1"])
def test_a_ranks_heap_asks_for_large_pages_unless_the_user_has_settings_of_glibc(tmp_path, own):
    done = run(tmp_path, "local.sh", "c.yaml", GLIBC_TUNABLES=own)
    assert f"heap {own or 'glibc.malloc.hugetlb=1'}\n" in done.stdout


def test_interactive_passes_ranks_threads_and_overrides_and_the_exit_code(tmp_path):
    job = slurm_job(tmp_path, LOGS=str(tmp_path))
    (tmp_path / "srun").symlink_to("a folder/mpiexec")
    done = run(tmp_path, "interactive.sh", "-n", "3", "-t", "2", "--cmd", "sft", "--", "--x", "a.b=[1, 2]", **job)
    assert done.returncode == 7, done.stderr
    arguments = [line[4:] for line in done.stdout.splitlines() if line.startswith("arg ")]
    assert "--ntasks=3" in arguments and arguments[-3:] == ["sft", "--x", "a.b=[1, 2]"]
    assert "threads 2\n" in done.stdout


def test_local_starts_its_ranks_itself_within_an_allocation_of_slurm(tmp_path):
    """The real mpiexec, which would start them through srun."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho srun was called >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    done = run(tmp_path, "local.sh", "-n", "2", "c.yaml", **slurm_job(tmp_path, MPIEXEC=str(MPIEXEC)))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_under_its_log_ends_no_run(tmp_path):
    """The real mpiexec, which ends where it cannot write; /dev/full fails like a full disk."""
    environment = os.environ | {"MPIEXEC": str(MPIEXEC), "PYTHON": "/bin/echo"}
    command = [str(ROOT / "launch/local.sh"), "-n", "2", "c.yaml"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 0


LAUNCHER = """#!/bin/bash
trap 'sleep "$SAVE_S" && echo saving && echo saved >"$SAVED"; exit 75' TERM USR1
echo started
for _ in {1..200}; do echo a step || exit 1; sleep 0.1; done
"""


def at_a_terminal(command, environment):
    """Starts a command in a session of its own at a new terminal; the process, and the terminal's other end."""
    master, slave = pty.openpty()
    whole = ["setsid", "--ctty", *command]
    process = subprocess.Popen(whole, env=os.environ | environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    return process, master


@pytest.mark.parametrize(
    ("script", "how", "code", "saved"),
    [
        ("local.sh", "close", 75, True),
        ("local.sh", signal.SIGTERM, 75, True),
        ("local.sh", signal.SIGINT, 75, True),
        ("local.sh", "Ctrl-C twice", 129, False),
        ("interactive.sh", "close", 75, True),
    ],
)
def test_a_closed_terminal_or_ctrl_c_ends_a_run_like_a_signal_to_save(tmp_path, script, how, code, saved):
    """The launcher prints all the time, also while it saves, and ends where it cannot print."""
    launcher = tmp_path / "srun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    job = slurm_job(tmp_path, PYTHON="/bin/true", MPIEXEC=str(launcher), LOGS=str(tmp_path))
    job["SAVED"] = str(tmp_path / "saved")
    job["SAVE_S"] = "5" if how == "Ctrl-C twice" else "0"
    process, terminal = at_a_terminal([str(ROOT / "launch" / script), "configs/quickstart.yaml"], job)
    try:
        while b"a step" not in os.read(terminal, 4096):
            pass
        if how == "close":
            os.close(terminal)
        elif how == "Ctrl-C twice":
            process.send_signal(signal.SIGINT)
            while b"once more" not in os.read(terminal, 4096):
                pass
            process.send_signal(signal.SIGINT)
        else:
            process.send_signal(how)
        assert process.wait(timeout=20) == code
    finally:
        process.kill()
    assert (tmp_path / "saved").exists() == saved


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


PYTHON = """#!/bin/bash
[ "$2" = venv ] || exit 0
place="${@: -1}"
[ "$3" != --clear ] || rm -rf "$place"
mkdir -p "$place/bin" && cp "$0" "$place/bin/python"
"""
STAMP = ".installed-requirements.txt"


@pytest.mark.parametrize(
    ("found", "code", "kept"),
    [
        (["pyvenv.cfg", "theirs"], 1, True),
        (["pyvenv.cfg", STAMP, "vllm/pyvenv.cfg"], 1, True),
        (["pyvenv.cfg", STAMP, "old"], 0, False),
        (["vllm/pyvenv.cfg"], 0, True),
    ],
)
def test_setup_clears_only_what_it_has_made(tmp_path, found, code, kept):
    """Of a .venv without a working pip, such as uv's, a moved one, or one of which only the engine's is there."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    for name in found:
        (tmp_path / ".venv" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python")}
    command = [str(tmp_path / "launch/setup.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("move or remove it" in done.stderr) == bool(code)
    assert (tmp_path / ".venv" / found[-1]).exists() == kept


@pytest.mark.parametrize(
    ("limit", "hours"), [("30:00", "0.5"), ("4:00:00", "4"), ("1-06:30", "30.5"), ("UNLIMITED", "")]
)
def test_time_limits_are_read_in_all_of_slurms_forms(limit, hours):
    script = f'source "{ROOT}/slurm/common.sh"; hours_of "$1"'
    done = subprocess.run(["bash", "-c", script, "_", limit], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == hours


def test_interactive_needs_an_allocation(tmp_path):
    done = run(tmp_path, "interactive.sh", "c.yaml", SLURM_JOB_ID="")
    assert done.returncode == 2 and "no Slurm allocation" in done.stderr
