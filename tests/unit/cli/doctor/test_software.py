"""What the doctor makes of programs and libraries."""

from pathlib import Path

import pytest

from megatron_tlt.cli.doctor import software
from megatron_tlt.cli.doctor.findings import Output

MPICH = "MPICH Version:      5.0.2"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@buildkitsandbox Distribution"
HYDRA = "HYDRA build details:\n    Version:  5.0.2"
PRTERUN = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (MPICH, "MPICH"),
        (HYDRA, "MPICH"),
        (OPEN_MPI, "Open MPI"),
        (PRTERUN, "Open MPI"),
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "Intel MPI"),
        ("something else", None),
    ],
)
def test_whose_mpi_it_is(text, family):
    assert software.mpi_family(text) == family


@pytest.mark.parametrize(
    ("library", "launcher", "status", "said"),
    [
        (Output(0, f"4.1.2\n{MPICH}"), Output(0, HYDRA), "ok", "mpi4py 4.1.2 on MPICH"),
        (Output(0, f"4.1.2\n{OPEN_MPI}"), Output(0, PRTERUN), "ok", "(Open MPI)"),
        (Output(0, f"4.1.2\n{MPICH}"), Output(0, PRTERUN), "failed", "is Open MPI's"),
        (Output(0, f"4.1.2\n{OPEN_MPI}"), Output(0, HYDRA), "failed", "is MPICH's"),
        (Output(0, f"4.1.2\n{MPICH}"), None, "warning", "no mpiexec"),
        (Output(0, f"4.1.2\n{MPICH}"), Output(None, "", "no such file"), "warning", "no mpiexec"),
        (
            Output(1, "", "x\nRuntimeError: cannot load MPI library"),
            Output(0, HYDRA),
            "failed",
            "cannot load MPI library",
        ),
    ],
)
def test_mpi4py_and_launcher_must_be_of_one_make(library, launcher, status, said):
    found = software.judge_mpi(library, "/x/mpiexec" if launcher else None, launcher)
    assert found.status == status and said in found.detail
    assert bool(found.hint) == (status != "ok")


def test_an_apex_that_is_not_nvidias_is_refused(tmp_path):
    assert software.judge_apex(None, False, False, False).status == "absent"
    assert software.judge_apex(None, False, False, True).status == "warning"
    foreign = software.judge_apex(tmp_path, False, False, True)
    assert (
        foreign.status == "failed"
        and "not NVIDIA's" in foreign.detail
        and "pip uninstall apex" in foreign.hint
    )
    (tmp_path / "multi_tensor_apply").mkdir()
    assert software.judge_apex(tmp_path, False, False, True).status == "warning"
    assert software.judge_apex(tmp_path, True, False, True).status == "ok"


def test_without_apex_the_optimizer_is_transformer_engines_where_it_is_installed():
    """The order in which megatron-core's optimizers look for a FusedAdam."""
    with_engine = software.judge_apex(None, False, True, True)
    assert (with_engine.status, with_engine.detail) == (
        "absent",
        "not installed: Transformer Engine's FusedAdam is used",
    )
    assert "torch's optimizers" in software.judge_apex(None, False, False, True).detail


@pytest.mark.parametrize(
    ("version", "cudnn", "status"),
    [
        (None, None, "warning"),
        ("2.8.0", 91200, "warning"),
        ("2.9.0", 91200, "ok"),
        ("2.11.0", 91200, "ok"),
        ("2.12.0", 91200, "warning"),
        ("2.20.2", 91200, "warning"),
        ("2.11.0", 90100, "warning"),
    ],
)
def test_transformer_engine_is_of_a_version_that_megatron_accepts(version, cudnn, status):
    found = software.judge_transformer_engine(version, cudnn, has_gpu=True)
    assert found.status == status
    assert bool(found.hint) == (status != "ok")


def test_requirements_pin_what_megatron_accepts():
    """Against the metadata of the megatron-core that is installed."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    accepted = next(Requirement(r) for r in requires("megatron-core") or [] if r.startswith("transformer-engine"))
    lines = Path("requirements-gpu.txt").read_text(encoding="utf-8").splitlines()
    pin = next(Requirement(line) for line in lines if line.startswith("transformer-engine"))
    (exact,) = [specifier.version for specifier in pin.specifier]
    assert accepted.specifier.contains(exact)
    low, high = software._TRANSFORMER_ENGINE
    for number, is_in in ((low, True), (high, False)):
        assert accepted.specifier.contains(".".join(map(str, number)), prereleases=True) == is_in


def test_a_foreign_apex_on_the_path_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert software.check_apex(False).status == "failed"


def test_a_build_of_torch_without_cuda_is_wrong_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(software.torch.version, "cuda", None)
    assert software.check_torch(False).status == "ok"
    wrong = software.check_torch(True)
    assert wrong.status == "failed" and "requirements-gpu.txt" in wrong.hint
    monkeypatch.setattr(software.torch.version, "cuda", "13.0")
    monkeypatch.setattr(software.torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in software.check_torch(True).detail


def test_tensorrt_llm_is_looked_for_in_its_own_environment(tmp_path):
    assert software.check_trtllm(None).status == "absent"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho TensorRT-LLM 1.2.1 ray 2.55\n")
    python.chmod(0o755)
    found = software.check_trtllm(str(python))
    assert (found.status, found.detail) == ("ok", f"TensorRT-LLM 1.2.1 ray 2.55 ({python})")
    python.write_text("#!/bin/sh\necho 'PackageNotFoundError: No package metadata' >&2\nexit 1\n")
    assert software.check_trtllm(str(python)).status == "failed"
    assert software.check_trtllm(str(tmp_path / "none")).status == "failed"
