"""What the doctor makes of the machine."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from megatron_tlt.cli.doctor import machine
from megatron_tlt.cli.doctor.findings import Finding, Output, passed, render, run_program
from megatron_tlt.cli.doctor.two_ranks import MET
from megatron_tlt.cli.main import main


@pytest.mark.parametrize(("device", "status"), [(["nvidia0"], "failed"), ([], "absent")])
def test_a_driver_that_does_not_answer_counts_where_there_is_a_device(device, status, monkeypatch):
    monkeypatch.setattr(machine, "run_program", lambda command: Output(9, "NVIDIA-SMI has failed because"))
    monkeypatch.setattr(machine.Path, "glob", lambda path, pattern: iter(device))
    assert machine.check_gpu().status == status


@pytest.mark.parametrize(
    ("version", "plugins", "job", "status", "said", "mpi"),
    [
        (Output(0, "slurm 22.05.8"), Output(0, "types:\n\tpmix\n\tpmi2"), "7", "ok", "--mpi=pmi2 or pmix", "MPICH 4.2"),
        (Output(0, "slurm 22.05.8"), Output(0, "types:\n\tpmix\n\tpmi2"), "7", "ok", "--mpi=pmix", "Open MPI v5"),
        (Output(0, "slurm 22.05.8"), Output(0, "none pmi2"), "7", "warning", "without pmix", "Open MPI v5"),
        (Output(0, "slurm 22.05.8"), Output(0, "", "pmix none"), None, "ok", "--mpi=pmix", ""),
        (Output(0, "slurm 22.05.8"), Output(0, "none openmpi"), "7", "failed", "without pmi2 and pmix", "Open MPI v5"),
        (Output(1, "", "srun: fatal: no configuration"), Output(1, ""), "7", "failed", "no configuration", ""),
        (Output(1, "", "srun: fatal: no configuration"), Output(1, ""), None, "warning", "no configuration", ""),
    ],
)  # fmt: skip
def test_slurm_needs_a_plugin_for_mpi(version, plugins, job, status, said, mpi):
    found = machine.judge_slurm(version, plugins, job, mpi)
    assert found.status == status and said in found.detail


def test_a_disk_without_room_and_a_folder_without_rights(tmp_path, monkeypatch):
    assert machine.check_disk(tmp_path / "not" / "there" / "yet").detail.endswith(str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30, total=2**25))
    assert machine.check_disk(tmp_path).status == "warning"
    assert machine.check_shared_memory().detail == "/dev/shm has 32 MiB"

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    assert machine.check_disk(tmp_path).status == "failed"


def test_programs_that_are_not_there_hang_or_fail_are_answers_too():
    assert run_program(["/no/such/program"]).code is None
    assert run_program([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == Output(
        None, "", "no answer within 0.5 s"
    )
    assert run_program([sys.executable, "-c", "import sys; print(' x '); sys.exit(3)"]) == Output(3, "x")


def test_only_what_is_required_decides_and_hints_are_shown():
    findings = [
        Finding("a", "ok", "fine", "unseen"),
        Finding("bcd", "absent", "none"),
        Finding("e", "warning", "small", "make it larger"),
    ]
    assert passed(findings)
    text = render(findings)
    assert (
        "unseen" not in text and "-> make it larger" in text and text.endswith("everything required is here")
    )
    findings.append(Finding("f", "failed", "gone", "get it"))
    assert not passed(findings)
    assert render(findings).endswith("1 required: f")


@pytest.mark.mpi
def test_the_doctor_passes_where_the_tests_run_and_fails_without_a_launcher(capsys, tmp_path):
    assert main(["doctor", "--json", "--run-dir", str(tmp_path)]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert told["two ranks"]["status"] == "ok" and MET in told["two ranks"]["detail"]
    expected = {
        "Python",
        "torch",
        "MPI",
        "GPU",
        "Transformer Engine",
        "TensorRT-LLM",
        "apex",
        "disk",
        "ports",
    }
    assert expected | {"Slurm"} <= told.keys()
    assert machine.check_two_ranks("/no/such/launcher -n 2", None).status == "failed"
    assert "mpiexec" in machine.check_two_ranks(None, None).hint


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_is_found_out(tmp_path):
    """It starts two worlds of one rank, and promises two."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nOMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 exec "$@"\n')
    launcher.chmod(0o755)
    found = machine.check_two_ranks(str(launcher), None)
    assert found.status == "failed" and "started 2 ranks, but MPI has 1" in found.detail, found
