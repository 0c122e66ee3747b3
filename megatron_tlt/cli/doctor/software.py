"""Checks of programs and libraries: Python, torch, MPI, and what NVIDIA adds. Vendors are looked at, not imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch

from megatron_tlt.cli.doctor.findings import Finding, last_line, run_program

_PYTHONS = ((3, 11), (3, 12))
_LIBRARIES = ("megatron-core", "mpi4py", "transformers", "numpy", "pydantic")
# Runs in a process of its own: mpi4py initialises MPI at import, which only a World may do.
_PRINT_MPI_VERSIONS = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(mpi4py.__version__); print(MPI.Get_library_version().splitlines()[0])"
)
_TRANSFORMER_ENGINE = (2, 9), (2, 12)  # from and below: the extra "dev" of megatron-core 0.16.1's metadata


def check_python() -> Finding:
    """The interpreter's version, and its headers for what is compiled at first use."""
    here = sys.version_info[:2]
    detail = f"{sys.version.split()[0]} ({sys.executable})"
    if here not in _PYTHONS:
        hint = "make the virtual environment with Python 3.11 or 3.12: PYTHON=python3.12 make setup"
        return Finding("Python", "failed", detail, hint)
    return Finding("Python", "ok", detail)


def check_libraries() -> Finding:
    """Python packages that every run needs."""
    versions = {name: _version(name) for name in _LIBRARIES}
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        hint = "make setup, or pip install -r requirements.txt (requirements-gpu.txt on a GPU machine)"
        return Finding("libraries", "failed", f"not installed: {', '.join(lacking)}", hint)
    return Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_compiler() -> Finding:
    """The C compiler that builds the CPU kernels at first use."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        path = shutil.which(name)
        if path is not None:
            return Finding("C compiler", "ok", path)
    hint = "apt-get install gcc, or rollout.kernels=torch (slow on a CPU)"
    return Finding("C compiler", "warning", "no cc, gcc or clang", hint)


def find_mpiexec() -> str | None:
    """The launcher beside this Python, else the first in PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def check_mpi() -> Finding:
    """Whether mpi4py finds an MPI library. Whether it is the launcher's, two ranks show."""
    library = run_program([sys.executable, "-c", _PRINT_MPI_VERSIONS])
    if library.code != 0 or len(library.out.splitlines()) < 2:
        hint = "pip install mpi4py and either pip install mpich, or load the site's MPI (module load)"
        return Finding("MPI", "failed", f"mpi4py does not load: {last_line(library.err)}", hint)
    version, text = library.out.splitlines()[-2:]
    return Finding("MPI", "ok", f"mpi4py {version} on {text}")


def check_torch(has_gpu: bool) -> Finding:
    """torch's build fits the machine, and has NCCL where there is a GPU."""
    cuda, has_nccl = torch.version.cuda, torch.distributed.is_nccl_available()
    build = [f"CUDA {cuda}" if cuda else "without CUDA"]
    if has_nccl:
        build.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    detail = f"{torch.__version__} ({', '.join(build)})"
    if has_gpu and not (cuda and has_nccl):
        detail = f"{detail}, but there is a GPU, which needs CUDA and NCCL"
        return Finding("torch", "failed", detail, "pip install -r requirements-gpu.txt")
    if has_gpu and not torch.cuda.is_available():
        hint = (
            f"the driver is too old for CUDA {cuda}, or CUDA_VISIBLE_DEVICES hides all GPUs; see nvidia-smi"
        )
        return Finding("torch", "failed", f"{detail}, but it sees no GPU", hint)
    return Finding("torch", "ok", detail)


def check_transformer_engine(has_gpu: bool) -> Finding:
    """Transformer Engine: faster layers, fused Adam and FP8, on a GPU only."""
    name, version = "Transformer Engine", _version("transformer-engine")
    hint = "pip install --no-build-isolation -r requirements-gpu.txt, or use NVIDIA's PyTorch container"
    if version is None:
        detail = "not installed: actor.layer_spec=local, no FP8"
        return Finding(name, "warning" if has_gpu else "absent", detail, hint if has_gpu else "")
    low, high = _TRANSFORMER_ENGINE
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        wanted = f">= {'.'.join(map(str, low))}, < {'.'.join(map(str, high))}"
        return Finding(name, "warning", f"{version}; megatron-core 0.16.1 accepts {wanted}", hint)
    return Finding(name, "ok", version)


def check_apex() -> Finding:
    """That an installed apex is NVIDIA's: the one on PyPI is something else, and megatron would import it."""
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return Finding("apex", "absent", "not installed: optimizers are Transformer Engine's or torch's")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "multi_tensor_apply").is_dir():
        hint = "pip uninstall apex; NVIDIA's is at github.com/NVIDIA/apex and in its PyTorch container"
        return Finding("apex", "failed", f"{folder} is not NVIDIA's apex, and megatron would import it", hint)
    return Finding("apex", "ok", f"NVIDIA's, in {folder}")


def check_trtllm(python: str | None) -> Finding:
    """TensorRT-LLM in the environment of `rollout.trtllm.python`, if one is named."""
    name = "TensorRT-LLM"
    if python is None:
        return Finding(
            name, "absent", "not looked for (--trtllm-python); needed by rollout.backend=trtllm only"
        )
    code = "from importlib.metadata import version as v; print('TensorRT-LLM', v('tensorrt_llm'), 'ray', v('ray'))"
    answer = run_program([python, "-c", code], timeout_s=120)
    if answer.code == 0:
        return Finding(name, "ok", f"{answer.out} ({python})")
    hint = "make it an environment of its own, with ray: docs/operations.md, TensorRT-LLM engines"
    return Finding(name, "failed", f"{python}: {last_line(answer.err)}", hint)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
