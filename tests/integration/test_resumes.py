"""Kills of one or both of two ranks at random moments, each resumed.

KILLS_SEED in the environment chooses the moments; without it every call has others, and a failure shows its seed.
"""

import os
import random
import subprocess
import time

import pytest

from tests.helpers import stub
from tests.helpers.mpi import ROOT, launcher, rank_environment, ranks_of, run_ranks, server
from tests.helpers.runs import TLT_ON, assert_same_checkpoint, rows, steps_logged, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.nightly]
SEED = int(os.environ.get("KILLS_SEED") or random.randrange(10**6))
TRAIN = ["-m", "megatron_tlt", "train"]
KILLS = 5


def start_and_kill(arguments, run_dir, output, moments, usual):
    """Starts two ranks; kills one or both, up to `usual` seconds after the start or after one of three logged steps."""
    wanted = steps_logged(run_dir) + moments.randrange(4)
    victims, pause = moments.choice(((0,), (1,), (0, 1))), moments.uniform(0.0, usual)
    command = [*launcher(2), *TRAIN, *arguments]
    with output.open("w") as file:
        job = subprocess.Popen(command, env=rank_environment(), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    while job.poll() is None and (len(ranks_of(job)) < 2 or steps_logged(run_dir) < wanted):
        time.sleep(0.05)
    time.sleep(pause)
    ranks = ranks_of(job)
    assert len(ranks) == 2, (SEED, output.read_text()[-4000:])
    for victim in victims:
        ranks[victim].kill()
    assert job.wait(timeout=300) != 0
    stub.settle(server())


def test_two_ranks_killed_at_random_end_at_the_weights_of_a_run_left_alone(tmp_path):
    """The killed run trains a drafter and decodes ahead; the other does neither."""
    moments, run_dir, alone = random.Random(SEED), tmp_path / "killed", tmp_path / "alone"
    config = write_config(tmp_path, checkpoint={"every": 2, "keep": 2}, eval={"every": 3})
    server()  # its imports are no part of the usual time
    begun = time.monotonic()
    run_ranks(2, TRAIN, str(config), f"train.run_dir={tmp_path / 'timed'}", *TLT_ON, "train.num_steps=2")
    usual = (time.monotonic() - begun) / 2
    endless = [str(config), f"train.run_dir={run_dir}", *TLT_ON, "idle.pre_rollout=true", "train.num_steps=10000"]
    for number in range(KILLS):
        start_and_kill(endless, run_dir, tmp_path / f"output-{number}", moments, usual)
    num_steps = max(steps_logged(run_dir), 2) // 2 * 2 + 2
    last = f"train.num_steps={num_steps}"
    output = run_ranks(2, TRAIN, *endless, last).stdout
    assert "resumed after step" in output, SEED
    run_ranks(2, TRAIN, str(config), f"train.run_dir={alone}", last)
    assert_same_checkpoint(*(run / f"checkpoints/step-{num_steps:06d}" for run in (alone, run_dir)))
    names = ("step", "reward/mean", "length/mean", "policy/loss", "policy/grad_norm")
    figures = [[[row[name] for name in names] for row in rows(run)] for run in (alone, run_dir)]
    assert figures[0] == figures[1] and len(figures[0]) == num_steps, SEED
