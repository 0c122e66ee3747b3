"""What the doctor makes of a machine: real programs that stand in for the machine's own."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from megatron_tlt.cli import doctor
from megatron_tlt.cli.main import main
from megatron_tlt.models.decoders.native import build


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a shell script of a name first in PATH."""

    def put(name: str, script: str) -> str:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return str(path)

    return put


def test_gpus_that_the_environment_hides_are_not_looked_for(program, monkeypatch):
    """Beside them torch sees none, which is right then."""
    program("nvidia-smi", "echo NVIDIA H100, 81559 MiB, 580.1")
    assert doctor.check_gpu().status == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = doctor.check_gpu()
    assert found.status == "absent" and "CUDA_VISIBLE_DEVICES" in found.detail


OLD = 'case "$*" in *TLT_BF16*) echo "x.s:7: Error: no such instruction: vdpbf16ps" >&2; exit 1 ;; esac'


@pytest.mark.parametrize(
    ("gcc", "has_gpu", "status", "said"),
    [
        ("", True, "ok", "gcc"),
        ("", True, "FAILED", "Python.h"),
        (None, True, "FAILED", "no gcc or clang on PATH"),
        (None, False, "warning", "no cc, gcc or clang"),
        (OLD, False, "warning", "gcc 9 or later, or clang, with an assembler of its time"),
        (OLD, False, "warning", "x.s:7: Error: no such instruction"),
    ],
)
def test_a_compiler_builds_the_decoder_and_has_headers_for_triton(gcc, has_gpu, status, said, tmp_path, monkeypatch):
    if gcc is not None:
        (tmp_path / "gcc").write_text(f"#!/bin/sh\n{gcc}\n")
        (tmp_path / "gcc").chmod(0o755)
    if said != "Python.h":
        (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    for module, name in ((build, "find_compiler"), (doctor, "find_compiler"), (doctor, "library_path")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # nothing is remembered
    found = doctor.check_compiler(has_gpu)
    assert found.status == status and said in found.detail and "\n" not in found.detail


def test_a_cache_without_room_is_no_fault_of_the_compiler(monkeypatch):
    def library_path(options):
        raise doctor.BackendError("cannot build the native decoder: No space left on device; set MEGATRON_TLT_CACHE")

    monkeypatch.setattr(doctor, "library_path", library_path)
    monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/gcc")
    found = doctor.check_compiler(has_gpu=False)
    assert found.status == "warning" and "MEGATRON_TLT_CACHE" in found.detail and not found.hint


@pytest.mark.parametrize(("device", "status"), [(["nvidia0"], "FAILED"), ([], "absent")])
def test_a_driver_without_an_answer_counts_where_there_is_a_device(device, status, program, monkeypatch):
    program("nvidia-smi", "echo NVIDIA-SMI has failed >&2; exit 9")
    monkeypatch.setattr(doctor.Path, "glob", lambda path, pattern: iter(device))
    assert doctor.check_gpu().status == status


@pytest.mark.parametrize(
    ("script", "job", "status", "said"),
    [
        ("echo pmix pmi2 >&2", None, "ok", "pmi2, pmix"),
        ("echo none", None, "FAILED", "MPI: none"),
        ("echo srun: fatal: no configuration >&2; exit 1", "7", "FAILED", "no configuration"),
        ("echo srun: fatal: no configuration >&2; exit 1", None, "warning", "no configuration"),
    ],
)
def test_slurm_needs_a_plugin_for_mpi(script, job, status, said, program, monkeypatch):
    program("srun", script)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    found = doctor.check_slurm()
    assert found.status == status and said in found.detail


def test_a_disk_without_room_and_a_folder_without_rights(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30, total=2**25))
    disk, shm, *_ = doctor.check_machine(tmp_path / "not" / "there" / "yet")
    assert (disk.status, shm.status) == ("warning", "warning") and disk.detail.endswith(str(tmp_path))

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert next(doctor.check_machine(tmp_path)).status == "FAILED"


@pytest.mark.parametrize(
    ("version", "status"), [(None, "warning"), ("2.8.0", "warning"), ("2.9.0", "ok"), ("2.12.0", "warning")]
)
def test_transformer_engine_is_of_a_version_that_megatron_accepts(version, status, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    assert doctor.check_transformer_engine(has_gpu=True).status == status


def test_requirements_pin_what_megatron_accepts():
    """Against the metadata of the megatron-core that is installed."""
    accepted = next(Requirement(r) for r in requires("megatron-core") or [] if r.startswith("transformer-engine"))
    lines = Path("requirements-gpu.txt").read_text(encoding="utf-8").splitlines()
    pin = next(Requirement(line) for line in lines if line.startswith("transformer-engine"))
    (exact,) = [specifier.version for specifier in pin.specifier]
    assert accepted.specifier.contains(exact)
    for number, is_in in zip(doctor.TRANSFORMER_ENGINE, (True, False), strict=True):
        assert accepted.specifier.contains(number, prereleases=True) == is_in


TRITON_OF_TORCH = {"2.13.0": "3.7.1"}  # Requires-Dist of torch's CUDA build; the CPU build asks for none


def test_requirements_pin_the_triton_of_torch_s_cuda_build():
    """With another one pip finds no solution where its index has that build, so `make test` cannot be installed."""
    lines = [line for name in ("", "-dev") for line in Path(f"requirements{name}.txt").read_text("utf-8").splitlines()]
    torch_pin, triton_pin = (
        next(line.partition("#")[0].strip() for line in lines if line.startswith(f"{name}=="))
        for name in ("torch", "triton")
    )
    assert triton_pin == f"triton=={TRITON_OF_TORCH[torch_pin.removeprefix('torch==')]}"
    asked = [Requirement(line) for line in requires("torch") or [] if line.startswith("triton")]  # of a CUDA build
    assert all(wanted.specifier.contains(triton_pin.removeprefix("triton==")) for wanted in asked)


def test_a_build_of_torch_without_cuda_is_wrong_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (doctor.check_torch(False).status, doctor.check_torch(True).status) == ("ok", "FAILED")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.check_torch(True)
    assert "sees no GPU" in found.detail and "CUDA 13.0" in found.hint and "580 or newer" in found.hint


LOADS = """
import mmap, os
kept = [mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ) for path in {files}]
"""


@pytest.mark.parametrize(("of_engine", "status"), [("pip", "ok"), ("system", "warning")])
def test_two_cudnns_in_one_process_are_named(of_engine, status, tmp_path, monkeypatch):
    """torch and Transformer Engine are modules that map a file of that name, as a loader does."""
    for place, library in (("pip", "libcudnn.so.9"), (of_engine, "libcudnn_graph.so.9")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / library).write_text("x")
    torch_files, engine_files = [f"{tmp_path}/pip/libcudnn.so.9"], [f"{tmp_path}/{of_engine}/libcudnn_graph.so.9"]
    version = "class backends:\n class cudnn:\n  version = staticmethod(lambda: 92000)\n"
    (tmp_path / "torch.py").write_text(version + LOADS.format(files=torch_files))
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/pytorch.py").write_text(LOADS.format(files=engine_files))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.check_cudnn()
    assert found.status == status and "92000" in found.detail
    assert [f"{tmp_path}/{place}" in found.detail for place in ("pip", "system")] == [True, of_engine == "system"]


def test_the_image_has_one_cudnn():
    """torch's, from the package index: its base has none, and Transformer Engine is built and loaded with that one."""
    before = Path("Dockerfile").read_text(encoding="utf-8").partition("-r requirements-gpu.txt")[0]
    assert "cudnn" not in next(line for line in before.splitlines() if line.startswith("ARG BASE"))
    assert re.search(r"^ENV (.*\\\n)? *CUDNN_HOME=\S+/site-packages/nvidia/cudnn", before, re.MULTILINE)


@pytest.mark.mpi
def test_the_doctor_passes_where_the_tests_run_and_names_what_is_required(capsys, monkeypatch, tmp_path, program):
    program("srun", "exit 1")  # which mpiexec starts its ranks with in an allocation, unless its environment forbids it
    for name, value in {"JOB_ID": "7", "NNODES": "1", "NODELIST": "x", "TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(doctor, "check_slurm", lambda: doctor.Finding("Slurm", "absent", "not asked here"))
    assert main(["doctor", "--run-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if not line.startswith(" ")]  # without hints: a disk may be nearly full
    assert "ok       two ranks           both ranks met (mpiexec -n 2)" in rows and len(rows) == 14
    assert said.endswith("\neverything required is here\n")
    assert main(["doctor", "--launcher", "/no/such/launcher -n 2"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("required: two ranks\n") and "-> pip install mpi4py" in said


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_is_found_out(tmp_path):
    """It starts two worlds of one rank, and promises two."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nOMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 exec "$@"\n')
    launcher.chmod(0o755)
    found = doctor.check_two_ranks(str(launcher))
    assert found.status == "FAILED" and "started 2 ranks, but MPI has 1" in found.detail, found
