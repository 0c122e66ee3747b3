from megatron_tlt.distributed.launch import Launch, detect_launch


def test_no_launcher_is_one_rank():
    assert detect_launch({}) == Launch("none", 1, 0, 0)


def test_mpiexec_of_mpich():
    env = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}
    assert detect_launch(env) == Launch("mpiexec", 4, 2, 2)


def test_mpiexec_of_open_mpi():
    env = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert detect_launch(env) == Launch("mpiexec (Open MPI)", 8, 5, 1)


STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


def test_srun_step():
    assert detect_launch(STEP) == Launch("srun", 4, 3, 1)
    assert detect_launch({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"}).launcher == "srun"


def test_mpiexec_inside_a_batch_script_counts_more_than_the_job():
    batch = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    assert detect_launch(batch).launcher == "none"
    inside = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
    assert detect_launch(inside) == Launch("mpiexec", 2, 1, None)
