"""Checks of the machine: GPU and driver, disk, shared memory, ports, Slurm, and two ranks that meet."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from megatron_tlt.cli.doctor.findings import Finding, Output, last_line, run_program
from megatron_tlt.cli.doctor.two_ranks import MET

_DISK_GIB = 10.0
_SHM_GIB = 1.0
_TWO_RANKS_S = 120.0  # for two ranks to start and meet
_GPU_FIELDS = "name,memory.total,driver_version"


def check_gpu() -> Finding:
    """The GPUs and their driver, as `nvidia-smi` sees them. One whose driver does not answer counts where there is a
    device file.
    """
    answer = run_program(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines() if line.strip()]
    if answer.code == 0 and rows:
        kinds = sorted({f"{row[0]} ({row[1]})" for row in rows})
        return Finding("GPU", "ok", f"{len(rows)} x {', '.join(kinds)}, driver {rows[0][-1]}")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("GPU", "absent", "none: everything runs on the CPU")
    hint = "install NVIDIA's driver, load its module (modprobe nvidia), or give the container the GPUs (--gpus all)"
    reason = last_line(answer.err) or last_line(answer.out)
    return Finding("GPU", "failed", f"nvidia-smi does not answer: {reason}", hint)


def check_disk(run_dir: Path) -> Finding:
    """Room and the right to write where runs go."""
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.1f} GiB free at {folder.resolve()}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("disk", "failed", f"{folder}: {error}", "choose another train.run_dir")
    if free < _DISK_GIB:
        hint = "a checkpoint takes 16 bytes a parameter, and checkpoint.keep of them are kept"
        return Finding("disk", "warning", detail, hint)
    return Finding("disk", "ok", detail)


def check_shared_memory() -> Finding:
    """/dev/shm: MPI, NCCL and torch pass data through it; a container's default of 64 MiB is too small."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("shared memory", "warning", "no /dev/shm", "mount a tmpfs there")
    total = shutil.disk_usage(shm).total / 2**30
    if total < _SHM_GIB:
        hint = "start the container with --shm-size=8g or --ipc=host"
        return Finding("shared memory", "warning", f"/dev/shm has {total * 1024:.0f} MiB", hint)
    return Finding("shared memory", "ok", f"/dev/shm has {total:.1f} GiB")


def check_ports() -> Finding:
    """Rank 0 listens on a port that the system chooses; the other ranks must reach it, on other hosts by its name."""
    name = socket.gethostname()
    for host in ("127.0.0.1", name):
        try:
            with socket.create_server(("", 0)) as server:
                socket.create_connection((host, server.getsockname()[1]), timeout=5).close()
        except OSError as error:
            detail = f"{host} cannot be reached: {error}"
            if host == name:
                hint = "ranks on this host alone do not need it; for several hosts its name must resolve (/etc/hosts)"
                return Finding("ports", "warning", detail, hint)
            return Finding("ports", "failed", detail, "the loopback interface is down, or a sandbox forbids listening")
    return Finding("ports", "ok", f"free ports on 127.0.0.1 and {name} can be listened on and reached")


def check_slurm(mpi: str) -> Finding:
    """Slurm, if it is here: its version, and whether srun can start ranks of `mpi`, the library's name and version."""
    srun = shutil.which("srun")
    if srun is None:
        return Finding("Slurm", "absent", "no srun: launch/local.sh and mpiexec start ranks")
    job = os.environ.get("SLURM_JOB_ID")
    return judge_slurm(run_program([srun, "--version"]), run_program([srun, "--mpi=list"]), job, mpi)


def judge_slurm(version: Output, plugins: Output, job: str | None, mpi: str) -> Finding:
    """`check_slurm` from the version and the plugin list that srun prints."""
    if version.code != 0:
        hint = "start slurmctld, or let slurm.conf be found (SLURM_CONF); without Slurm: launch/local.sh"
        detail = f"installed, but srun failed: {last_line(version.err) or last_line(version.out)}"
        return Finding("Slurm", "failed" if job else "warning", detail, hint)
    listed = (plugins.out + plugins.err).lower()
    usable = [name for name in ("pmi2", "pmix") if name in listed]
    detail = f"{version.out}{f', in job {job}' if job else ''}"
    if not usable:
        hint = "MPICH needs the plugin pmi2 or pmix, Open MPI pmix: see srun --mpi=list"
        return Finding("Slurm", "failed", f"{detail}, without pmi2 and pmix", hint)
    if "Open MPI" in mpi:
        if "pmix" not in usable:
            hint = "srun cannot start Open MPI's ranks: start them with its mpiexec, or use MPICH"
            return Finding("Slurm", "warning", f"{detail}, without pmix, which Open MPI needs", hint)
        usable = ["pmix"]
    return Finding("Slurm", "ok", f"{detail}, srun --mpi={' or '.join(usable)}")


def check_two_ranks(launcher: str | None, mpiexec: str | None) -> Finding:
    """Two ranks start, and meet through MPI and torch.distributed."""
    if launcher is None and mpiexec is None:
        hint = "put the mpiexec of mpi4py's MPI in PATH (module load, or pip install mpich), or give --launcher"
        return Finding("two ranks", "failed", "no mpiexec to start them with", hint)
    start = shlex.split(launcher) if launcher is not None else [str(mpiexec), "-n", "2"]
    program = ["-m", "mpi4py", "-m", "megatron_tlt.cli.doctor.two_ranks", str(_TWO_RANKS_S / 2)]
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    answer = run_program(
        [*start, sys.executable, *program],
        _TWO_RANKS_S,
        {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    by = " ".join(start)
    if answer.code == 0 and MET in answer.out:
        line = next(line for line in answer.out.splitlines() if MET in line)
        return Finding("two ranks", "ok", f"{line}, {time.monotonic() - began:.1f} s ({by})")
    errors = [line for line in answer.err.splitlines() if "Error" in line]
    why = errors[-1].strip() if errors else last_line(answer.err) or f"exit code {answer.code}"
    hint = (
        f"run it by hand: {by} python -m mpi4py -m megatron_tlt.cli.doctor.two_ranks 60; ranks that see a world of "
        "1 were started by the mpiexec of another MPI than mpi4py's (row MPI): MPIEXEC=... launch/local.sh"
    )
    return Finding("two ranks", "failed", why, hint)
