import re
import time

import pytest

from megatron_tlt.observe.attempt import VARIABLE
from tests.helpers.mpi import run_one, run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [1, 4])
def test_exchange_delivers_to_the_named_ranks_only_and_a_large_value_once(ranks):
    out = run_ranks(ranks, "tests/mpi/workers/exchange.py").stdout
    # Not by lines: mpiexec may put the newline of one rank behind the text of another.
    assert sorted(re.findall(r"ok \d+", out)) == [f"ok {r}" for r in range(ranks)]


def test_a_rank_that_raises_ends_the_job_and_is_named_with_phase_and_error():
    started = time.monotonic()
    done = run_ranks(3, "tests/mpi/workers/fault.py", "raise", "1", check=False, timeout=60)
    assert done.returncode != 0
    assert "rank 1 failed in phase rollout, step 3: RuntimeError: made to fail" in done.stdout
    assert time.monotonic() - started < 40  # the others sleep for 60 s: they were ended


def test_what_every_rank_finds_is_said_once():
    done = run_ranks(3, "tests/mpi/workers/fault.py", "shared", "-1", check=False, timeout=60)
    assert done.returncode != 0
    assert done.stdout.count("TrainingError: made to fail") == 1


@pytest.mark.parametrize(
    ("how", "rank", "where"),
    [
        ("hang", "2", "phase rollout, step 3"),
        ("stop", "0", "an unknown phase, its store does not answer"),  # its store keeps the phases of all ranks
    ],
)
def test_a_rank_that_does_not_arrive_is_named_when_the_collective_times_out(how, rank, where):
    done = run_ranks(3, "tests/mpi/workers/fault.py", how, rank, check=False, timeout=60)
    assert done.returncode != 0
    assert "failed in phase exchange, step 3" in done.stdout
    assert f"not arrived: rank {rank} (still in {where})" in done.stdout


def test_a_rank_that_does_not_connect_ends_the_job_in_phase_start(tmp_path):
    given = {"env": {VARIABLE: str(tmp_path)}, "check": False, "timeout": 60}
    done = run_ranks(3, "tests/mpi/workers/fault.py", "start", "1", **given)
    assert done.returncode != 0 and "Traceback" not in done.stdout
    assert re.search(r"failed in phase start: rank [02] of 3 on .* could not connect .* within 4 s", done.stdout)
    assert (tmp_path / "exit").read_text().strip() == "1"


ALONE = """
import os, sys
from megatron_tlt.cli.main import main
rank, lacks = os.environ["PMI_RANK"], sys.argv[1]
if rank == "1" and lacks == "module":
    sys.modules["megatron_tlt.trainer.setup"] = None
sys.exit(main(["train", "no.yaml" if lacks == "file" else "configs/quickstart.yaml"]))
"""


@pytest.mark.parametrize(
    ("lacks", "codes", "said"),
    [("file", [2], "config file = 'no.yaml'"), ("module", [1, 9], "ModuleNotFoundError")],  # 9: see `mpi.launcher`
)
def test_a_rank_that_fails_before_mpi_starts_ends_all_with_its_error(tmp_path, lacks, codes, said):
    """A module that its machine lacks: the other one would wait in MPI_Init. Or both lack a file."""
    done = run_ranks(2, ["-c", ALONE], lacks, env={VARIABLE: str(tmp_path)}, check=False, timeout=30)
    assert done.returncode in codes and done.stdout.count(said) == 1, done.stdout
    assert (tmp_path / "exit").read_text() == f"{codes[0]}\n"


NAMELESS = """
import os, socket, sys
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.run import DistributedSection
socket.gethostname = lambda: "host-" + os.environ["PMI_RANK"]
def unknown(name):
    raise socket.gaierror(-2, "Name or service not known")
socket.gethostbyname = unknown
sys.exit(run_on_every_rank(DistributedSection(device="cpu"), 1, lambda world: 0))
"""


def test_a_host_name_that_does_not_resolve_is_named_with_a_remedy():
    done = run_ranks(2, ["-c", NAMELESS], check=False, timeout=60)
    assert done.returncode != 0 and "Traceback" not in done.stdout
    assert "phase start: rank 0 finds no address of host-0 at which" in done.stdout
    assert "Name or service not known): set GLOO_SOCKET_IFNAME" in done.stdout


INTERRUPTED = """
import sys, time
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.run import DistributedSection
def body(world):
    try:
        world.barrier()
        raise KeyboardInterrupt
    finally:
        if world.is_main:
            time.sleep(1)
            print("removed what was unfinished", flush=True)
sys.exit(run_on_every_rank(DistributedSection(device="cpu"), 1, body))
"""


def test_ctrl_c_of_a_command_with_nothing_to_save_is_one_line_and_no_failure():
    done = run_ranks(2, ["-c", INTERRUPTED], check=False, timeout=60)
    assert done.returncode in (130, 9) and "Traceback" not in done.stdout and "failed" not in done.stdout
    assert done.stdout.count("megatron-tlt: ended by Ctrl-C") == 1
    assert "removed what was unfinished" in done.stdout, "before another rank ends it"


SHARED = """
import os, re, sys
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
world = World.start(DistributedSection(), 1)
names = set(re.findall(r"/dev/shm/mpich\\w+", open("/proc/self/maps").read()))
world.barrier()
print(f"mapped {len(names)} left {sum(map(os.path.exists, names))};", end="", flush=True)
world.barrier()
sys.exit(2)
"""


LATE = """
import time
from pathlib import Path
from megatron_tlt.checkpoint import resume
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.together import together
from megatron_tlt.distributed.world import World
world = World.start(DistributedSection(timeout_s=1.0), 1)
world.enter("score", 1)
def late(*_, **__):
    time.sleep(2.4 * world.rank)
{wait}
print(f"all {{sum(world.all_gather_object(1))}};", end="", flush=True)
world.close()
"""
WAITS = {
    "alone": "late(); world.wait_for_all()",
    "together": "with together(world): late()",
    "checksums": "resume.files.damage_of = late; resume._problem(world, Path())",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ranks_wait_for_a_late_one_longer_than_a_collective_may_take_and_name_it(wait):
    done = run_ranks(2, ["-c", LATE.format(wait=WAITS[wait])])
    assert done.stdout.count("all 2;") == 2 and done.stdout.count("s for rank 1 in phase score") == 2


HIDDEN = """
import os
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
world = World.start(DistributedSection(device="cpu"), 1)
print(f"sees {os.environ['CUDA_VISIBLE_DEVICES']!r};", end="", flush=True)
world.close()
"""


def test_a_run_on_cpus_hides_gpus_from_megatron():
    assert run_one("-c", HIDDEN, CUDA_VISIBLE_DEVICES="0,1")[1].count("sees '';") == 1


def test_a_refused_command_leaves_no_file_in_shared_memory():
    """With an exit code other than 0 MPI is aborted, after which MPICH removes nothing."""
    done = run_ranks(2, ["-c", SHARED], check=False)
    assert done.returncode != 0 and done.stdout.count("mapped 1 left 0;") == 2, done.stdout


def test_the_world_must_have_the_size_that_the_launcher_promised():
    # No launcher at all, but an environment that claims five tasks: what a wrong --mpi flag looks like.
    claims = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
    code, said = run_one("tests/mpi/workers/exchange.py", check=False, **claims)
    assert code != 0
    assert "srun started 5 ranks, but MPI has 1" in said
