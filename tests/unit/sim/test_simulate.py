import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.sim.modes import on_nodes, simulate
from megatron_tlt.sim.result import SIM_PHASES
from megatron_tlt.sim.simulate import Simulation
from tests.helpers.mpi import ROOT
from tests.helpers.sim import few_steps, sim_config  # noqa: F401

EAGLE = ("rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=x")
QUICK = "rollout.speculation.selector=beg_mab"  # which is asked for fewer steps
BULK = (
    "workload.prompts_per_step=64",
    "workload.lengths.median=2000",
    "workload.lengths.sigma=1.0",
    "rollout.max_tokens=16384",
)


def test_phases_add_up_and_tokens_are_counted():
    point = Simulation(sim_config(*BULK)).run("off")
    for record in point.steps:
        assert set(record.phases) == set(SIM_PHASES)
        assert record.seconds == pytest.approx(sum(record.phases.values()))
    assert point.seconds == pytest.approx(sum(r.seconds for r in point.steps) / 2)
    assert point.mean.tokens == (point.steps[0].tokens + point.steps[1].tokens) / 2


def test_modes_give_the_same_responses_in_different_times():
    result = simulate([sim_config(*BULK, *EAGLE, QUICK)], ["off", "suffix", "frozen", "tlt"])
    off, suffix, frozen, tlt = result.points
    assert len({p.steps[0].tokens for p in result.points}) == 1
    assert tlt.seconds < off.seconds and suffix.seconds < off.seconds and suffix.seconds != frozen.seconds
    trained = [p.mean.recovered_gpu_seconds for p in result.points]
    assert trained[:3] == [0, 0, 0] and 0 < trained[3] <= tlt.mean.idle_gpu_seconds
    assert tlt.steps[-1].quality > frozen.steps[-1].quality
    by_mode = {c.mode: c for c in result.comparisons}
    assert set(by_mode) == {"suffix", "frozen", "tlt"}
    assert by_mode["tlt"].e2e == pytest.approx(off.seconds / tlt.seconds)


def test_more_nodes_take_less_time_and_give_speculation_more_to_gain():
    config = sim_config(*BULK, *EAGLE, QUICK, "workload.prompts_per_step=128")
    result = simulate(on_nodes(config, [1, 8]), ["off", "tlt"])
    gains = [c.e2e for c in result.comparisons]
    seconds = [p.seconds for p in result.points if p.mode == "tlt"]
    assert gains[0] < gains[1] and seconds[0] > seconds[1]


@pytest.mark.slow
@pytest.mark.nightly
def test_1024_gpus_for_100_steps_in_a_gib():
    """512 engines of 2 GPUs, in a process of its own for its memory."""
    script = "from tests.unit.sim.test_simulate import simulate_1024; simulate_1024()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def _peak_bytes():
    """Of this process alone: getrusage's maximum begins with that of the process which started this one."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


def simulate_1024():
    """Ends with an error where it takes too much."""
    paper = ("workload.lengths.median=1200", "workload.lengths.sigma=1.2", "rollout.max_tokens=32768")
    size = ("cluster.nodes=128", "workload.steps=100", "workload.prompts_per_step=1024", "rollout.tp=2")
    config = sim_config(*EAGLE, *paper, *size, "idle.train_drafter=true")
    point = Simulation(config).run("tlt")
    assert _peak_bytes() < 2**30
    assert point.gpus == 1024 and len(point.steps) == 100
