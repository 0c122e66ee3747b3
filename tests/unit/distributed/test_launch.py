import pytest

from megatron_tlt.distributed.launch import Launch, detect_launch, foreign_launch

MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SHELL = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
BATCH = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launch("none", 1, 0, 0)),
        (MPICH, Launch("mpiexec", 4, 2, 2)),
        (OPEN_MPI, Launch("mpiexec (Open MPI)", 8, 5, 1)),
        (STEP, Launch("srun", 4, 3, 1)),
        (STEP | {"PMI_SIZE": "4", "PMI_RANK": "3"}, Launch("srun", 4, 3, 1)),
        (BATCH, Launch("none", 1, 0, 0)),
        # The shells of salloc and of adopted processes start one process; `mpirun` in `srun --pty bash` counts.
        (SHELL | {"SLURM_STEP_ID": "4294967290"}, Launch("none", 1, 0, 0)),
        (SHELL | {"SLURM_STEP_ID": "4294967292"}, Launch("none", 1, 0, 0)),
        (SHELL | OPEN_MPI, Launch("mpiexec (Open MPI)", 8, 5, 1)),
        # mpiexec inside a batch script counts more than the job.
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}, Launch("mpiexec", 2, 1, None)),
    ],
)
def test_the_launcher_is_the_innermost(environment, found):
    assert detect_launch(environment) == found


@pytest.mark.parametrize(
    ("environment", "is_foreign"),
    [
        ({"WORLD_SIZE": "8", "RANK": "3"}, True),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False),
        ({"WORLD_SIZE": "8", "PMI_SIZE": "8"}, False),  # such as in the pods of an operator for PyTorch
        ({"WORLD_SIZE": "a"}, False),
        ({}, False),
    ],
)
def test_processes_of_torchrun_are_no_plain_starts(environment, is_foreign):
    """MPI takes each of them for a run of its own."""
    problem = foreign_launch(environment) or ""
    assert problem.startswith("WORLD_SIZE = 8, as torchrun sets it: ranks are started by launch/") == is_foreign
