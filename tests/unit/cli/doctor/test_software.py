"""What the doctor makes of programs and libraries."""

from pathlib import Path

import pytest

from megatron_tlt.cli.doctor import software
from megatron_tlt.cli.doctor.findings import Output


def test_an_mpi_that_does_not_load_is_named(monkeypatch):
    answers = [Output(0, "4.1.2\nMPICH Version: 5.0.2"), Output(1, "", "x\nRuntimeError: cannot load MPI library")]
    monkeypatch.setattr(software, "run_program", lambda command: answers.pop(0))
    assert software.check_mpi().detail == "mpi4py 4.1.2 on MPICH Version: 5.0.2"
    found = software.check_mpi()
    assert found.status == "failed" and found.hint and "cannot load MPI library" in found.detail


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, "warning"), ("2.8.0", "warning"), ("2.9.0", "ok"), ("2.11.0", "ok"), ("2.12.0", "warning")],
)
def test_transformer_engine_is_of_a_version_that_megatron_accepts(version, status, monkeypatch):
    monkeypatch.setattr(software, "_version", lambda name: version)
    found = software.check_transformer_engine(has_gpu=True)
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
    foreign = software.check_apex()
    assert foreign.status == "failed" and "pip uninstall apex" in foreign.hint
    (tmp_path / "apex/multi_tensor_apply").mkdir()
    assert software.check_apex().status == "ok"


def test_a_build_of_torch_without_cuda_is_wrong_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(software.torch.version, "cuda", None)
    assert software.check_torch(False).status == "ok"
    wrong = software.check_torch(True)
    assert wrong.status == "failed" and "requirements-gpu.txt" in wrong.hint
    monkeypatch.setattr(software.torch.version, "cuda", "13.0")
    monkeypatch.setattr(software.torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(software.torch.cuda.nccl, "version", lambda: (2, 27, 5))
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
