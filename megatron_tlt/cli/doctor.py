"""`megatron-tlt doctor`: what this machine lacks to run, and how to get it. Changes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_tlt.cli.exit_codes import FAILED, OK

if TYPE_CHECKING:
    import argparse

LIBRARIES = ("megatron-core", "mpi4py", "transformers", "numpy", "pydantic")
TRANSFORMER_ENGINE = (2, 9), (2, 12)  # from and below: the extra "dev" of megatron-core 0.16.1's metadata
_DISK_GIB, _SHM_GIB = 10.0, 1.0
_OPEN_FILES = 1024  # a process; two ranks need some 150
_TWO_RANKS_S = 120.0  # for two ranks to start and meet
# Runs in a process of its own: mpi4py initialises MPI at import, which only a World may do.
_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_TRTLLM = "from importlib.metadata import version as v; print(v('tensorrt_llm'), 'with ray', v('ray'))"


@dataclass(frozen=True)
class Finding:
    """One check's result, and how to mend it."""

    name: str
    status: Literal["ok", "absent", "warning", "FAILED"]  # absent: not needed here; warning: works, with a catch
    detail: str
    hint: str = ""


def add_doctor(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "say what this machine lacks to run, and how to get it"
    about = f"{text}. Starts two ranks for a moment; changes nothing. Exit status: 0 if all that is required is here."
    command = commands.add_parser("doctor", help=text, description=about)
    command.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will go (default: runs)")
    command.add_argument("--trtllm-python", help="rollout.trtllm.python, to look for TensorRT-LLM there")
    command.add_argument("--launcher", help="what starts two ranks (default: mpiexec -n 2)")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    gpu = check_gpu()
    findings = [*describe(), gpu, *check_software(gpu.status != "absent"), *check_machine(args.run_dir)]
    if args.trtllm_python:
        findings.append(check_trtllm(args.trtllm_python))
    findings.append(check_two_ranks(args.launcher))
    print(json.dumps([asdict(f) for f in findings], indent=2) if args.json else render(findings))
    return FAILED if any(f.status == "FAILED" for f in findings) else OK


def render(findings: Sequence[Finding]) -> str:
    """A line a check, its hint below it; the sum at the end."""
    width, lines = max(len(f.name) for f in findings), []
    for f in findings:
        lines.append(f"{f.status:<8} {f.name:<{width}}  {f.detail}")
        if f.hint and f.status != "ok":
            lines.append(f"{'':<8} {'':<{width}}  -> {f.hint}")
    failed = [f.name for f in findings if f.status == "FAILED"]
    return "\n".join([*lines, "", f"required: {', '.join(failed)}" if failed else "everything required is here"])


def describe() -> Iterator[Finding]:
    """What a report of a fault needs beside the findings: this program, the system, the processor."""
    root = Path(__file__).resolve().parents[2]
    code, commit = _run(["git", "-C", str(root), "describe", "--always", "--dirty"])
    yield Finding("megatron-tlt", "ok", f"{version_of('megatron_tlt')}, {'no git commit' if code else commit}")
    about = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", about.read_text(encoding="utf-8")) if about.is_file() else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"
    yield Finding("system", "ok", f"{platform.platform()}, {processor}, {memory:.0f} GiB")


def check_gpu() -> Finding:
    """GPUs by `nvidia-smi`; one whose driver gives no answer counts where there is a device file."""
    code, said = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if code == 0:
        rows = said.splitlines()
        return Finding("GPU", "ok", f"{len(rows)} x {rows[0]}")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "absent", "none: everything runs on the CPU")
    hint = "install NVIDIA's driver, load its module (modprobe nvidia), or give the container the GPUs (--gpus all)"
    return Finding("GPU", "FAILED", f"nvidia-smi: {_last(said)}", hint)


def check_software(has_gpu: bool) -> Iterator[Finding]:
    """Python, libraries, compiler, torch, Transformer Engine and its layers, apex, MPI."""
    python = f"{sys.version.split()[0]} ({sys.executable})"
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding("Python", "ok" if is_known else "FAILED", python, "PYTHON=python3.12 make setup")
    lacking = [name for name in LIBRARIES if version_of(name) is None]
    found = f"not installed: {', '.join(lacking)}" if lacking else ", ".join(f"{n} {version_of(n)}" for n in LIBRARIES)
    yield Finding("libraries", "FAILED" if lacking else "ok", found, "make setup")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)
    hint = "apt-get install gcc, or rollout.kernels=torch (slow on a CPU)"
    yield Finding("C compiler", "ok" if compiler else "warning", compiler or "no cc, gcc or clang", hint)
    yield check_torch(has_gpu)
    yield check_transformer_engine(has_gpu)
    yield check_fused_layers("cuda" if has_gpu else None)
    yield check_apex()
    code, said = _run([sys.executable, "-c", _MPI])
    hint = "pip install mpi4py and either pip install mpich, or load the site's MPI (module load)"
    yield Finding("MPI", "FAILED" if code else "ok", _last(said) if code else said.splitlines()[0], hint)


def check_torch(has_gpu: bool) -> Finding:
    """torch's build fits the machine, and has NCCL where there is a GPU."""
    import torch

    cuda, has_nccl = torch.version.cuda, torch.distributed.is_nccl_available()
    detail = f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'without CUDA'}{', NCCL' if has_nccl else ''})"
    if has_gpu and not (cuda and has_nccl):
        hint = "pip install -r requirements.txt on the GPU machine: its wheel is the CUDA build"
        return Finding("torch", "FAILED", f"{detail}, but there is a GPU, which needs CUDA and NCCL", hint)
    if has_gpu and not torch.cuda.is_available():
        hint = f"the driver is too old for CUDA {cuda}, or CUDA_VISIBLE_DEVICES hides all GPUs; see nvidia-smi"
        return Finding("torch", "FAILED", f"{detail}, but it sees no GPU", hint)
    return Finding("torch", "ok", detail)


def check_transformer_engine(has_gpu: bool) -> Finding:
    """Transformer Engine: fused layers and FP8, on a GPU only."""
    name, version = "Transformer Engine", version_of("transformer-engine")
    hint = "pip install --no-build-isolation -r requirements-gpu.txt, or use NVIDIA's PyTorch container"
    if version is None:
        return Finding(name, "warning" if has_gpu else "absent", "not installed: local layers, no FP8", hint)
    low, high = TRANSFORMER_ENGINE
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        wanted = f">= {'.'.join(map(str, low))}, < {'.'.join(map(str, high))}"
        return Finding(name, "warning", f"{version}; megatron-core accepts {wanted}", hint)
    return Finding(name, "ok", version)


def check_fused_layers(device: str | None) -> Finding:
    """Transformer Engine computes what the actor's layers need (`cli/te_probe.py`); None: there is no GPU."""
    name = "fused layers"
    if device is None or version_of("transformer-engine") is None:
        lacking = "no GPU" if device is None else "no Transformer Engine"
        return Finding(name, "absent", f"not applicable: {lacking}")
    code, said = _run([sys.executable, "-m", "megatron_tlt.cli.te_probe", device])
    hint = (
        "build Transformer Engine anew for this torch and CUDA; an undefined cublasLt symbol: pip install -U "
        "nvidia-cublas; or pip uninstall transformer-engine: the actor uses local layers"
    )
    right = "a linear and a packed attention, forward and backward, equal PyTorch's"
    return Finding(name, "FAILED" if code else "ok", _last(said) if code else right, hint)


def check_apex() -> Finding:
    """That an installed apex is NVIDIA's: the one on PyPI is something else, and megatron would import it."""
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return Finding("apex", "absent", "not installed: optimizers are Transformer Engine's or torch's")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if (folder / "multi_tensor_apply").is_dir():
        return Finding("apex", "ok", f"NVIDIA's, in {folder}")
    hint = "pip uninstall apex; NVIDIA's is at github.com/NVIDIA/apex and in its PyTorch container"
    return Finding("apex", "FAILED", f"{folder} is not NVIDIA's apex, and megatron would import it", hint)


def check_machine(run_dir: Path) -> Iterator[Finding]:
    """Disk, shared memory, ports, Slurm."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 2**30
        hint = "a checkpoint takes 16 bytes a parameter, and checkpoint.keep of them are kept"
        yield Finding("disk", "ok" if free >= _DISK_GIB else "warning", f"{free:.1f} GiB free at {folder}", hint)
    except OSError as error:
        yield Finding("disk", "FAILED", f"{folder}: {error}", "choose another train.run_dir")
    shm = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0
    hint = "start the container with --shm-size=8g or --ipc=host: MPI, NCCL and torch pass data through it"
    yield Finding("shared memory", "ok" if shm >= _SHM_GIB else "warning", f"/dev/shm has {shm:.1f} GiB", hint)
    host = socket.gethostname()
    try:
        with socket.create_server(("", 0)) as server:
            socket.create_connection((host, server.getsockname()[1]), timeout=5).close()
        yield Finding("ports", "ok", f"free ports on {host} can be listened on and reached")
    except OSError as error:
        hint = "one host alone does not need it; for several, each host's name must resolve (/etc/hosts)"
        yield Finding("ports", "warning", f"{host} cannot be reached: {error}", hint)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = f"ulimit -n {_OPEN_FILES} (LimitNOFILE of a service, --ulimit nofile of a container): sockets and shards"
    yield Finding("open files", "ok" if soft >= _OPEN_FILES else "warning", f"{soft} a process, at most {hard}", hint)
    yield check_slurm()


def check_slurm() -> Finding:
    """Slurm, if it is here, and whether srun has a plugin for MPI."""
    if shutil.which("srun") is None:
        return Finding("Slurm", "absent", "no srun: launch/local.sh and mpiexec start ranks")
    code, version = _run(["srun", "--version"])
    if code:
        hint = "start slurmctld, or let slurm.conf be found (SLURM_CONF); without Slurm: launch/local.sh"
        in_job = "SLURM_JOB_ID" in os.environ
        return Finding("Slurm", "FAILED" if in_job else "warning", f"srun failed: {_last(version)}", hint)
    plugins = [name for name in ("pmi2", "pmix") if name in _run(["srun", "--mpi=list"])[1].lower()]
    hint = "MPICH needs the plugin pmi2 or pmix, Open MPI pmix: see srun --mpi=list"
    detail = f"{version}, plugins for MPI: {', '.join(plugins) or 'none'}"
    return Finding("Slurm", "ok" if plugins else "FAILED", detail, hint)


def check_trtllm(python: str) -> Finding:
    """TensorRT-LLM in the environment of `rollout.trtllm.python`."""
    code, said = _run([python, "-c", _TRTLLM])
    hint = "make it an environment of its own, with ray: the guide on TensorRT-LLM"
    return Finding("TensorRT-LLM", "FAILED" if code else "ok", f"{_last(said)} ({python})", hint)


def check_two_ranks(launcher: str | None) -> Finding:
    """Two ranks start, and meet through MPI and torch.distributed (`cli/two_ranks.py`)."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None and mpiexec is None:
        hint = "put the mpiexec of mpi4py's MPI in PATH (module load, or pip install mpich), or give --launcher"
        return Finding("two ranks", "FAILED", "no mpiexec to start them with", hint)
    start = [str(mpiexec), "-n", "2"] if launcher is None else shlex.split(launcher)
    program = ["-m", "mpi4py", "-m", "megatron_tlt.cli.two_ranks", str(_TWO_RANKS_S / 2)]
    code, said = _run([*start, sys.executable, *program])
    if code == 0 and "both ranks met" in said:
        return Finding("two ranks", "ok", f"both ranks met ({' '.join(start)})")
    errors = [line.strip() for line in said.splitlines() if "Error" in line]
    hint = (
        f"run it by hand: {' '.join(start)} python {' '.join(program)}; ranks that see a world of 1 were started by "
        "the mpiexec of another MPI than mpi4py's: MPIEXEC=... launch/local.sh"
    )
    return Finding("two ranks", "FAILED", errors[-1] if errors else _last(said) or f"exit code {code}", hint)


def version_of(name: str) -> str | None:
    """Version of an installed distribution; None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _run(command: Sequence[str], timeout_s: float = _TWO_RANKS_S) -> tuple[int, str]:
    """Exit code and output, stdout before stderr; 127 where the program cannot be run or does not end in time."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 127, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, f"{done.stdout}{done.stderr}".strip()


def _last(text: str) -> str:
    """The last line: where programs print their error."""
    return text.rpartition("\n")[2].strip()
