"""The device of a rank: one GPU of its own, or the CPU with all GPUs hidden; NCCL's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_tlt.errors import DistributedError, shortened

_DEVICE_FILES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIDDEN = "", "-1"  # its values by which users hide all GPUs
_UNSEEN_GPU = (
    "distributed.device = 'auto': this machine has a GPU that torch does not see. Its driver may be too old (CUDA 13.0 "
    "needs 580), this torch may be a CPU build (`megatron-tlt doctor` tells), or the job asked for no GPU "
    "(--gpus-per-node under Slurm). With 'cpu' the run is on CPUs"
)


def hide_gpus() -> None:
    """Hides all GPUs from this process and its children. Before MPI and megatron, which take the GPU that they see."""
    os.environ[_VISIBLE] = ""


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank, the current one if it is a GPU. `wanted`: as `distributed.device`.

    Raises DistributedError where torch sees no GPU although one is wanted, or is there and not hidden.
    """
    # Megatron overlaps communication with computation by the order of launches: one hardware queue keeps it. CUDA reads
    # the variable when it makes the device's context, which `set_device` does.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    use_cuda = torch.cuda.is_available() if wanted == "auto" else wanted == "cuda"
    if not use_cuda:
        is_hidden = os.environ.get(_VISIBLE) in _HIDDEN
        if wanted == "auto" and not is_hidden and any(_DEVICE_FILES.glob("nvidia[0-9]*")):
            raise DistributedError(_UNSEEN_GPU)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DistributedError("distributed.device = 'cuda', but torch sees no CUDA device")
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_uuid(device: torch.device) -> str | None:
    """Which GPU of all machines this is; None: the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_gpus(hosts: Sequence[str], gpus: Sequence[str | None]) -> None:
    """Raises DistributedError where two ranks have the same GPU, which NCCL refuses with a bus id alone, and where some
    have none: their groups would be of another kind.

    `hosts` and `gpus` (as of `gpu_uuid`) by rank. Local ranks say nothing: a launcher may show each rank one GPU alone.
    """
    without = dict.fromkeys(host for host, gpu in zip(hosts, gpus, strict=True) if gpu is None)
    if without and any(gpus):
        raise DistributedError(
            f"ranks on {shortened([*without])} see no GPU, and others do: let them see theirs (--gpus of a container, "
            "--gpus-per-node under Slurm), or take CPUs on all (distributed.device=cpu)"
        )
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host and gpus[rank] is not None]
        count = len({gpus[rank] for rank in ranks})
        if count < len(ranks):
            named = ", ".join(map(str, ranks[:8])) + (" .." if len(ranks) > 8 else "")
            raise DistributedError(
                f"ranks {named} on {host} see {count} GPU(s) in all, and each rank needs one of its own: start {count} "
                f"there (-n {count}), let them see more, or take CPUs (distributed.device=cpu, CUDA_VISIBLE_DEVICES='')"
            )


def set_nccl_environment() -> None:
    """This program's settings of NCCL, where the user has not set them. Before the first group."""
    # Buffers of captured collectives are registered as one allocation each, which growing segments are not
    # (pytorch#158029): replays would hang.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # All algorithms connect with the communicator, not at their first use: their memory can be measured.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def leave_hangs_to_the_watchdog() -> None:
    """Keeps PyTorch from ending the ranks that wait in an NCCL collective for too long, where the user has not set it.

    It would end them by SIGABRT in a thread of its own, without an error in Python: this program's watchdog would name
    a waiting rank as the one that died, not the one that hangs. Errors of NCCL then wait for the watchdog, too. Before
    the first group.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # at a timeout or an error
    # Some eight minutes later on all ranks, and where a CUDA call blocks PyTorch's own watchdog.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
