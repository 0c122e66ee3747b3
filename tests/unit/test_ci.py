"""`.ci/run` tells of every part whether it passed, failed or was skipped, and why; here `make` and pytest are stubs."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.mpi import ROOT

MAKE = """#!/bin/sh
echo "make $*: no network here"
[ "$1" != "${BROKEN:-}" ]
"""
# In place of .venv/bin/python: no vLLM is installed; a run of tests ends as PYTEST says.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 1
echo "$*" >>called
echo "${PYTEST:-3 passed in 1.00s}"
exit "${PYTEST_EXIT:-0}"
"""


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of it: exit status, the lines at the end."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    stubs = {"bin/make": MAKE, ".venv/bin/python": PYTHON, "bin/df": "#!/bin/sh\necho; echo / 0 0 99999999\n"}
    stubs |= dict.fromkeys(
        ("bin/cc", "bin/aarch64-linux-gnu-gcc", "bin/chromium", "bin/slurmctld", "bin/slurmd", "bin/munged"),
        "#!/bin/sh\n",
    )
    for name, text in {**stubs, "bin/python3.11": "#!/bin/sh\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CI_", "KILLS_", "PYTHON"))}

    def run(**settings):
        env = clean | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | settings
        done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        lines = [line.removeprefix("run: ") for line in done.stdout.splitlines() if line.startswith("run: ")]
        return done.returncode, [line for line in lines if not line.endswith(".log")]

    return run


def test_parts_run_and_their_counts_are_the_last_lines(ci, tmp_path):
    code, lines = ci()
    assert code == 0 and lines[1] == "make test: passed in 0 minutes"
    assert [line.split(" in ")[0] for line in lines[2:]] == ["kills: passed", "slurm: passed", "vllm: passed"]
    assert all(line.endswith(": 3 passed in 1.00s") for line in lines[2:])
    called = (tmp_path / "called").read_text().splitlines()
    files = [[word for word in line.split() if word.startswith("tests/")] for line in called]
    vllm = ["tests/integration/test_vllm*.py", "tests/integration/test_serving.py"]
    assert files == [["tests/integration/test_resumes.py"], ["tests/integration/slurm"], vllm]


def test_whether_vllm_is_there_is_asked_of_the_package():
    asked = re.search(r"-c '(from .*?)' && return", (ROOT / ".ci/run").read_text(), re.DOTALL)
    assert asked is not None
    done = subprocess.run([sys.executable, "-c", asked[1]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1) and not done.stderr


def test_a_switch_and_a_missing_installation_skip_a_part_and_fail_nothing(ci):
    code, lines = ci(CI_SLURM="0", BROKEN="setup-vllm")
    assert code == 0
    assert lines[3:] == [
        "slurm: skipped: CI_SLURM=0",
        "vllm: skipped: make setup-vllm could not install it: make setup-vllm: no network here",
    ]


def test_a_part_for_which_no_time_is_left_is_skipped(ci):
    code, lines = ci(CI_MINUTES="31")
    assert code == 0 and lines[3].startswith("slurm: passed")
    assert lines[4] == "vllm: skipped: it needs 35 minutes; 31 of 31 are left"


@pytest.mark.parametrize(("said", "ended"), [("1 failed, 2 passed in 1.00s", "1"), ("3 skipped in 1.00s", "0")])
def test_a_part_that_fails_or_only_skips_fails_the_run(ci, said, ended):
    code, lines = ci(PYTEST=said, PYTEST_EXIT=ended, CI_VLLM="0", CI_KILLS="0")
    assert code == 1
    assert lines[3].startswith("slurm: FAILED after") and lines[3].endswith(said)
    assert lines[2::2] == ["kills: skipped: CI_KILLS=0", "vllm: skipped: CI_VLLM=0"]


def test_after_a_failure_of_make_test_nothing_else_runs(ci, tmp_path):
    code, lines = ci(BROKEN="test")
    assert code == 1 and lines[1:] == ["make test: FAILED after 0 minutes; nothing else was run"]
    assert not (tmp_path / "called").exists()
