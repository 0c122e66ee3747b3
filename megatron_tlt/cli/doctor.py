"""`megatron-tlt doctor`: what this machine lacks to run, and how to get it. Writes the cache of `build.py` only."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_tlt.cli.exit_codes import FAILED, OK
from megatron_tlt.distributed.launch import ON_THIS_MACHINE
from megatron_tlt.distributed.processors import cpu_lines
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.native.build import BF16, COMPILERS, find_compiler, library_path, missing_for_triton

LIBRARIES = ("megatron-core", "mpi4py", "transformers", "numpy", "pydantic")
TRANSFORMER_ENGINE = "2.9", "2.12"  # from and below: the extra "dev" of megatron-core 0.16.1's metadata
_DISK_GIB, _SHM_GIB, _OPEN_FILES = 10.0, 1.0, 1024  # two ranks need some 150 files
_TWO_RANKS_S = 120.0  # for two ranks to start and meet
_CUDNN = r"""
import importlib, re, torch
try:
    importlib.import_module("transformer_engine.pytorch")
except Exception:
    pass  # a finding of its own names what is installed
folders = re.findall(r"(/.*)/libcudnn[^/]*\n", open("/proc/self/maps").read())
print("cudnn", torch.backends.cudnn.version(), *sorted(set(folders)), sep="\t")
"""


class Finding(NamedTuple):
    """One check's result, and how to mend it."""

    name: str
    status: Literal["ok", "absent", "warning", "FAILED"]  # absent: not needed here; warning: works, with a catch
    detail: str
    hint: str = ""


def add_doctor(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "say what this machine lacks to run, and how to get it"
    does = "Starts two ranks, compiles the decoder in C into its cache, changes nothing else."
    command = commands.add_parser("doctor", help=text, description=f"{text}. {does}")
    command.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will go (default: runs)")
    command.add_argument("--launcher", help="what starts two ranks (default: mpiexec -n 2)")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    gpu = check_gpu()
    findings = [*describe(), gpu, *check_software(gpu.status != "absent"), *check_machine(args.run_dir)]
    findings += [check_slurm(), check_two_ranks(args.launcher)]
    for name, status, detail, hint in findings:
        print(f"{status:<8} {name:<18}  {detail}")
        if status in ("warning", "FAILED"):
            print(f"{'':<28} -> {hint}")
    failed = ", ".join(finding.name for finding in findings if finding.status == "FAILED")
    print(f"\nrequired: {failed}" if failed else "\neverything required is here")
    return FAILED if failed else OK


def describe() -> Iterator[Finding]:
    """What a report of a fault needs beside the findings: this program, the system, the processor."""
    code, lines = _run(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])
    commit = "no git commit" if code else lines[-1]
    yield Finding("megatron-tlt", "ok", f"{version_of('megatron_tlt')}, {commit}, Python {sys.version.split()[0]}")
    names = sorted(line.partition(":")[2].strip() for line in cpu_lines("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"
    yield Finding("system", "ok", f"{platform.platform()}, {processor}, {memory:.0f} GiB")


def check_gpu() -> Finding:
    """GPUs by `nvidia-smi`; one whose driver gives no answer counts where there is a device file."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Finding("GPU", "absent", "CUDA_VISIBLE_DEVICES is empty: everything runs on the CPU")
    code, lines = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if code == 0:
        return Finding("GPU", "ok", f"{len(lines)} x {lines[0]}")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "absent", "none: everything runs on the CPU")
    hint = "install NVIDIA's driver, load its module (modprobe nvidia), or give the container (--gpus all) or the job "
    hint += "(--gpus-per-node) its GPUs"
    return Finding("GPU", "FAILED", f"nvidia-smi: {lines[-1]}", hint)


def check_software(has_gpu: bool) -> Iterator[Finding]:
    """Libraries, compiler, torch, Transformer Engine."""
    versions = {name: version_of(name) for name in LIBRARIES}
    found = ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
    yield Finding("libraries", "ok" if all(versions.values()) else "FAILED", found, "make setup")
    yield check_compiler(has_gpu)
    yield check_torch(has_gpu)
    yield check_transformer_engine(has_gpu)
    if has_gpu:
        yield check_cudnn()


def check_compiler(has_gpu: bool) -> Finding:
    """A C compiler that builds the decoder in C, and beside a GPU Python's headers: Triton needs both."""
    if has_gpu and (missing := missing_for_triton()) is not None:
        return Finding(
            "C compiler", "FAILED", missing, "apt-get install gcc python3-dev, on every node: Triton needs both"
        )
    hint = (
        f"apt-get install gcc ({COMPILERS}), on every node; without: rollout.kernels=torch (slow; TLT may change bits)"
    )
    try:
        for options in ((), BF16):
            library_path(options)
    except BackendError as error:
        first, *said = str(error).splitlines()
        wrong = [line.strip() for line in said if "error:" in line.lower()][:1]
        is_compilers = bool(said) or find_compiler() is None  # else the cache's, whose error names the mend
        return Finding("C compiler", "warning", " ".join([first, *wrong]), hint if is_compilers else "")
    return Finding("C compiler", "ok", str(find_compiler()), hint)


def check_torch(has_gpu: bool) -> Finding:
    """torch's build fits the machine, and has NCCL where there is a GPU."""
    import torch

    cuda, has_nccl = torch.version.cuda, torch.distributed.is_nccl_available()
    detail = f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'without CUDA'}{', NCCL' if has_nccl else ''})"
    if has_gpu and not (cuda and has_nccl):
        hint = "pip install -r requirements.txt on the GPU machine: its wheel is the CUDA build"
        return Finding("torch", "FAILED", f"{detail}, but there is a GPU, which needs CUDA and NCCL", hint)
    sees = not has_gpu or torch.cuda.is_available()
    hint = f"the driver is too old for CUDA {cuda} (13 needs 580 or newer), or CUDA_VISIBLE_DEVICES hides all GPUs"
    return Finding("torch", "ok" if sees else "FAILED", detail if sees else f"{detail}, but it sees no GPU", hint)


def check_transformer_engine(has_gpu: bool) -> Finding:
    """Transformer Engine (fused layers, FP8) in a version that megatron-core takes. `make gpu-check` runs it."""
    version = version_of("transformer-engine")
    low, high, here = ([int(n) for n in v.split(".")[:2]] for v in (*TRANSFORMER_ENGINE, version or "0"))
    hint = f"pip install --no-build-isolation -r requirements-gpu.txt ({' <= version < '.join(TRANSFORMER_ENGINE)})"
    if low <= here < high:
        return Finding("Transformer Engine", "ok", str(version))
    lacking = version or "not installed: local layers, no FP8"
    return Finding("Transformer Engine", "warning" if has_gpu or version else "absent", lacking, hint)


def check_cudnn() -> Finding:
    """cuDNN's version, and the folders that a process with torch and Transformer Engine has loaded it from."""
    code, lines = _run([sys.executable, "-c", _CUDNN])
    version, *folders = next((line.split("\t")[1:] for line in lines if line.startswith("cudnn\t")), [lines[-1]])
    hint = "remove the system's cuDNN, or CUDNN_HOME=.../site-packages/nvidia/cudnn: two versions in one process fail"
    status: Literal["ok", "warning"] = "ok" if code == 0 and len(folders) < 2 else "warning"
    return Finding("cuDNN", status, f"{version} of {' and '.join(folders) or 'no folder'}", hint)


def check_machine(run_dir: Path) -> Iterator[Finding]:
    """Disk, shared memory, open files."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    hint = "choose another train.run_dir: checkpoint.keep checkpoints take 16 bytes a parameter each"
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 2**30
        yield Finding("disk", "ok" if free >= _DISK_GIB else "warning", f"{free:.1f} GiB free at {folder}", hint)
    except OSError as error:
        yield Finding("disk", "FAILED", f"{folder}: {error}", hint)
    shm = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0
    hint = "start the container with --shm-size=8g or --ipc=host: MPI, NCCL and torch pass data through it"
    yield Finding("shared memory", "ok" if shm >= _SHM_GIB else "warning", f"/dev/shm has {shm:.1f} GiB", hint)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = f"ulimit -n {_OPEN_FILES} (LimitNOFILE of a service, --ulimit nofile of a container): sockets and shards"
    yield Finding("open files", "ok" if soft >= _OPEN_FILES else "warning", f"{soft} a process, at most {hard}", hint)


def check_slurm() -> Finding:
    """Slurm, if it is here, and whether srun has a plugin for MPI."""
    if shutil.which("srun") is None:
        return Finding("Slurm", "absent", "no srun: launch/local.sh and mpiexec start ranks")
    code, lines = _run(["srun", "--mpi=list"])
    if code:
        hint = "start slurmctld, or let slurm.conf be found (SLURM_CONF); without Slurm: launch/local.sh"
        return Finding("Slurm", "FAILED" if "SLURM_JOB_ID" in os.environ else "warning", lines[-1], hint)
    plugins = [name for name in ("pmi2", "pmix") if name in " ".join(lines).lower()]
    hint = "MPICH needs the plugin pmi2 or pmix, Open MPI pmix: see srun --mpi=list"
    return Finding("Slurm", "ok" if plugins else "FAILED", f"plugins for MPI: {', '.join(plugins) or 'none'}", hint)


def check_two_ranks(launcher: str | None) -> Finding:
    """Two ranks start, and meet through MPI and torch.distributed (`cli/two_ranks.py`)."""
    start = shlex.split(launcher or "mpiexec -n 2")  # that beside Python, if there is one
    program = ["-m", "mpi4py", "-m", "megatron_tlt.cli.two_ranks", str(_TWO_RANKS_S / 2)]
    here = {} if launcher else ON_THIS_MACHINE  # of a launcher that was named the user decides
    code, lines = _run([*start, sys.executable, *program], **here)
    if code == 0:
        return Finding("two ranks", "ok", f"both ranks met ({' '.join(start)})")
    errors = [line.strip() for line in lines if "Error" in line] or lines
    hint = "pip install mpi4py mpich, or load the site's MPI (module load). Ranks that see a world of 1 have another "
    hint += f"MPI's mpiexec than mpi4py's. By hand: {' '.join(start)} python {' '.join(program)}"
    return Finding("two ranks", "FAILED", errors[-1], hint)


def version_of(name: str) -> str | None:
    """Version of an installed distribution; None: not installed."""
    return next((found.version for found in metadata.distributions(name=name)), None)


def _run(command: Sequence[str], **variables: str) -> tuple[int, list[str]]:
    """Exit code and lines, stdout's before stderr's; 127 where the program cannot be run or does not end in time.

    `variables`: more of its environment.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": _TWO_RANKS_S}
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    options["env"] = {**os.environ, "PATH": programs, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    try:
        done = subprocess.run(list(command), check=False, stdin=subprocess.DEVNULL, **options)
    except (subprocess.TimeoutExpired, OSError) as error:
        return 127, [str(error)]
    return done.returncode, f"{done.stdout}{done.stderr}".strip().splitlines() or [""]
