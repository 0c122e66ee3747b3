"""Checks of programs and libraries: Python, torch, MPI, and what NVIDIA adds. Vendors are looked at, not imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch

from megatron_tlt.cli.doctor.findings import Finding, Status, last_line, run_program

_PYTHONS = ((3, 11), (3, 12))
_LIBRARIES = ("megatron-core", "mpi4py", "transformers", "numpy", "pydantic")
# Runs in a process of its own: mpi4py initialises MPI at import, which only a World may do.
_PRINT_MPI_VERSIONS = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(mpi4py.__version__); print(MPI.Get_library_version().splitlines()[0])"
)
_TRANSFORMER_ENGINE = (2, 9), (2, 12)  # from and below: the extra "dev" of megatron-core 0.16.1's metadata
_CUDNN = 90300  # as torch counts: 9.3.0, of Transformer Engine 2.11's documentation


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
    """torch's build fits the machine."""
    cuda = torch.version.cuda
    detail = f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'without CUDA'})"
    if has_gpu and cuda is None:
        return Finding(
            "torch", "failed", f"{detail}, but there is a GPU", "pip install -r requirements-gpu.txt"
        )
    if has_gpu and not torch.cuda.is_available():
        hint = (
            f"the driver is too old for CUDA {cuda}, or CUDA_VISIBLE_DEVICES hides all GPUs; see nvidia-smi"
        )
        return Finding("torch", "failed", f"{detail}, but it sees no GPU", hint)
    return Finding("torch", "ok", detail)


def check_nccl(has_gpu: bool) -> Finding:
    """torch's NCCL."""
    if not torch.distributed.is_nccl_available():
        detail = "torch was built without it"
        if has_gpu:
            return Finding("NCCL", "failed", detail, "pip install -r requirements-gpu.txt")
        return Finding("NCCL", "absent", f"{detail}; ranks on CPU use gloo")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding("NCCL", "ok", version)


def check_transformer_engine(has_gpu: bool) -> Finding:
    """Transformer Engine: faster layers, fused Adam and FP8, on a GPU only."""
    return judge_transformer_engine(_version("transformer-engine"), torch.backends.cudnn.version(), has_gpu)


def judge_transformer_engine(version: str | None, cudnn: int | None, has_gpu: bool) -> Finding:
    """`check_transformer_engine` from the versions of Transformer Engine and of torch's cuDNN (None: there is none)."""
    name = "Transformer Engine"
    if version is None:
        hint = "pip install --no-build-isolation -r requirements-gpu.txt, or use NVIDIA's PyTorch container"
        detail = "not installed: actor.layer_spec=local, no FP8"
        return Finding(name, "warning" if has_gpu else "absent", detail, hint if has_gpu else "")
    low, high = _TRANSFORMER_ENGINE
    if not low <= _numbers(version) < high:
        hint = "pip install --no-build-isolation -r requirements-gpu.txt"
        wanted = f">= {'.'.join(map(str, low))}, < {'.'.join(map(str, high))}"
        return Finding(name, "warning", f"{version}; megatron-core 0.16.1 accepts {wanted}", hint)
    if has_gpu and (cudnn or 0) < _CUDNN:
        return Finding(name, "warning", f"{version}, with cuDNN {cudnn}", f"it needs cuDNN >= {_CUDNN}")
    return Finding(name, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in version.split(".")[:2])


def check_apex(has_gpu: bool) -> Finding:
    """apex, and that it is NVIDIA's: the one on PyPI is something else, and megatron would import it."""
    spec = importlib.util.find_spec("apex")
    folder = (
        Path(next(iter(spec.submodule_search_locations)))
        if spec and spec.submodule_search_locations
        else None
    )
    has_kernels = importlib.util.find_spec("amp_C") is not None
    return judge_apex(folder, has_kernels, _version("transformer-engine") is not None, has_gpu)


def judge_apex(folder: Path | None, has_kernels: bool, has_engine: bool, has_gpu: bool) -> Finding:
    """`check_apex` from where the package lies (None: there is none) and whether Transformer Engine is installed,
    whose FusedAdam megatron takes first.
    """
    hint = (
        "NVIDIA's is at github.com/NVIDIA/apex and in its PyTorch container; `pip install apex` gets another"
    )
    if folder is None:
        if has_engine:
            return Finding("apex", "absent", "not installed: Transformer Engine's FusedAdam is used")
        status: Status = "warning" if has_gpu else "absent"
        return Finding("apex", status, "not installed: torch's optimizers are used", hint if has_gpu else "")
    if not (folder / "multi_tensor_apply").is_dir():
        detail = f"{folder} is not NVIDIA's apex, and megatron would import it"
        return Finding("apex", "failed", detail, f"pip uninstall apex; {hint}")
    if not has_kernels:
        return Finding("apex", "warning", f"NVIDIA's, in {folder}, without its CUDA kernels (amp_C)", hint)
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
