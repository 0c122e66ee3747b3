"""Our batch scripts on a real Slurm: whatever happens to a job, it ends as promised and loses nothing."""

import json
import re

import pytest

from tests.helpers.runs import assert_same_checkpoint, rows
from tests.integration.slurm.scenarios import ONE_NODE, SLURM, Scene, run_here

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.nightly]
LAST = "checkpoints/step-000006"


def ended(scenes, name):
    """A scene that was played; its job's state, exit code and restarts."""
    scene = scenes[name].result()
    facts = scene.facts
    return scene, (facts["JobState"], facts["ExitCode"], facts["Restarts"])


def steps_saved(scene):
    return int((scene.run_dir / "checkpoints/latest").read_text().strip().removeprefix("step-"))


def test_an_undisturbed_job_trains_to_its_end(scenes):
    scene, end = ended(scenes, "whole")
    assert end == ("COMPLETED", "0:0", "0"), scene.output()
    assert [row["step"] for row in rows(scene.run_dir)] == [1, 2, 3, 4, 5, 6]
    logs = scene.folder / "logs"
    assert (logs / "latest").resolve() == (logs / scene.job / "latest").resolve() == logs / scene.job / "0"
    assert "6 / 6" in scene.log(0)  # of the table at its end
    assert (logs / scene.job / "0/rank-00001.log").exists()


@pytest.mark.parametrize("name", ["warned", "timed_out", "killed", "preempted", "requeued"])
def test_an_interrupted_job_starts_again_and_gets_to_the_same_weights(scenes, name):
    scene, (state, code, restarts) = ended(scenes, name)
    assert (state, code) == ("COMPLETED", "0:0"), scene.output()
    assert int(restarts) >= 1
    assert "resumed after step" in scene.log(int(restarts))
    assert [row["step"] for row in rows(scene.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert_same_checkpoint(ended(scenes, "whole")[0].run_dir / LAST, scene.run_dir / LAST)


@pytest.mark.parametrize("name", ["warned", "timed_out"])
def test_a_warned_job_saves_and_asks_to_be_requeued(scenes, name):
    scene, _ = ended(scenes, name)
    assert "SIGUSR1: time is nearly up" in scene.output()
    assert "exit code 75" in scene.output()
    # Which of the two depends on how fast the machine is.
    left = re.search(
        r"SIGUSR1: (between two steps|the unfinished (step|evaluation) is dropped); saved after step \d", scene.log(0)
    )
    assert left, scene.log(0)
    assert "rewards failed" not in scene.log(0), "the signal was for the ranks, not for their workers"


def test_what_slurm_requeues_by_itself_is_left_to_it(scenes):
    scene, _ = ended(scenes, "requeued")
    first = re.split(rf"job {scene.job} attempt [1-9]", scene.output())[0].splitlines()[:-1]
    assert first[-1].endswith("Slurm has requeued this job by itself: nothing to do here"), scene.output()
    assert "cannot requeue" not in scene.output()
    assert not (scene.folder / f"logs/{scene.job}/stalls").exists()
    assert (scene.folder / f"logs/{scene.job}/0/exit").read_text().strip() == "75"


def test_a_killed_rank_ends_the_attempt_and_costs_no_more_than_a_step(scenes):
    scene, _ = ended(scenes, "killed")
    assert "requeueing (attempts in a row without a new checkpoint step: 0 of 2)" in scene.output()
    words = re.findall(r"^megatron-tlt: rank \d (\(host|failed)", scene.output(), re.MULTILINE)
    assert words[0] == "(host", "who was killed comes before those who only lost a connection"
    assert "exit code 1" in scene.output()  # 1 of the rank that lost its peer, or 137
    start = int((scene.folder / f"logs/{scene.job}/1/start").read_text())
    assert start >= 1


def test_a_cancelled_job_saves_and_is_not_requeued(scenes):
    scene, (state, _, restarts) = ended(scenes, "cancelled")
    assert (state, restarts) == ("CANCELLED", "0"), scene.output()
    assert re.search("SIGTERM: (between two steps|the unfinished step)", scene.log(0))
    assert "this script does not requeue it" in scene.output()
    assert steps_saved(scene) == len(rows(scene.run_dir)) >= 1
    assert scene.ranks() == []


def test_a_wrong_configuration_is_printed_once_and_not_tried_again(scenes):
    scene, end = ended(scenes, "wrong_config")
    assert end == ("FAILED", "2:0", "0"), scene.output()
    assert "train.num_step = 3: unknown key; did you mean train.num_steps?" in scene.output()
    assert "not requeued" in scene.output()


def test_a_wrong_pair_of_mpi_and_srun_is_refused(scenes):
    scene, end = ended(scenes, "wrong_pair")
    assert end == ("FAILED", "1:0", "0"), scene.output()
    assert "srun started 2 ranks, but MPI has 1" in scene.output()
    assert not (scene.run_dir / "metrics.jsonl").exists()


def test_a_crash_loop_gives_up(scenes):
    scene, end = ended(scenes, "crash_loop")
    assert end == ("FAILED", "3:0", "1"), scene.output()
    assert "giving up: 2 attempts in a row have written no new checkpoint step" in scene.output()


def test_where_ranks_cannot_note_their_exit_code_sruns_counts_while_the_job_runs(cluster, tmp_path):
    """Where Slurm has ended or requeued it, as after a node has failed, they are not."""
    scene = Scene(cluster, tmp_path / "lost")
    scene.record("train", "tiny.yaml", SILENT_EXIT=1)
    assert (scene.facts["JobState"], scene.facts["ExitCode"]) == ("COMPLETED", "0:0"), scene.output()
    assert "the ranks could not write their exit code to " in scene.output()


def test_ranks_see_all_gpus_of_their_node_and_the_network_that_was_named(scenes):
    scene, end = ended(scenes, "eight_gpus")
    assert end == ("COMPLETED", "0:0", "0"), scene.output()
    for rank in range(4):
        said = scene.log(0, rank).splitlines()
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in said
        assert {"GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=ib0", "UCX_MEMTYPE_CACHE=n"} <= set(said)
        assert f"SLURM_LOCALID={rank % 2}" in said
        assert f"argument: {SLURM.parent}/configs/quickstart.yaml" in said


def test_convert_runs_on_the_ranks(scenes):
    scene, end = ended(scenes, "converted")
    assert end == ("COMPLETED", "0:0", "0"), scene.output()
    assert json.loads((scene.folder / "megatron/config.json").read_text())
    assert list((scene.folder / "megatron").rglob("*.distcp"))


def test_a_chain_of_jobs_goes_on_whatever_the_exit_code(scenes):
    scene, end = ended(scenes, "chained")
    assert (scene.first["JobState"], scene.first["ExitCode"], scene.first["Restarts"]) == ("FAILED", "75:0", "0")
    assert end == ("COMPLETED", "0:0", "0")
    assert scene.facts["StartTime"] >= scene.first["EndTime"]


def test_fine_tuning_can_be_submitted_from_anywhere(cluster, tmp_path):
    """Also by those whose sbatch passes no environment on: the ranks get what the script sets."""
    scene = Scene(cluster, tmp_path / "sft")
    options = (*ONE_NODE, "--no-requeue", "--export=PYTHON,RECORDED_EXIT")
    scene.record("sft", "configs/sft-demo.yaml", "sft.num_steps=3", code=5, options=options)
    assert (scene.facts["JobState"], scene.facts["ExitCode"]) == ("FAILED", "5:0"), scene.output()
    assert "argument: sft.num_steps=3" in scene.log(0).splitlines()
    assert (scene.folder / f"logs/{scene.job}/0/exit").read_text().strip() == "5"


def test_an_allocation_in_hand_is_used_and_the_exit_code_comes_back(cluster, tmp_path):
    scene = Scene(cluster, tmp_path / "salloc")
    launcher = SLURM.parent / "launch/interactive.sh"
    words = ["salloc", "-Q", *ONE_NODE, launcher, "configs/quickstart.yaml", "train.num_steps=1"]
    done = run_here(cluster, scene.folder, *words, PYTHON=scene.recorder, RECORDED_EXIT=7)
    assert done.returncode == 7, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"{rank}: argument: train.num_steps=1" in done.stdout.splitlines()
    assert not (scene.folder / "logs").exists()
    assert not list(SLURM.parent.glob(".megatron-tlt-*"))
