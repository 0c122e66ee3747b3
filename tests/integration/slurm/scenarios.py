"""What is done to jobs. Each scenario submits, acts and waits for the end; the tests look at what it left."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.helpers.mpi import ROOT, forking_python
from tests.helpers.runs import steps_logged, write_config
from tests.integration.slurm.cluster import Cluster

PATIENCE_S = 900  # a job takes 20 s; on a machine with fifty others, minutes
SLURM = ROOT / "slurm"
REWARD = [{"name": "python", "path": "tests.helpers.rewards:slow_vowels", "threshold": 0.2}]
ONE_NODE = ("-N1", "--ntasks-per-node=2", "--gpus-per-node=0", "--time=20")
TWO_NODES = ("-N2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=20")
# In place of Python: says how it was called, and ends as it is told to, which it notes like the real ranks.
RECORDER = """#!/bin/bash
env | grep -E '^(CUDA_VISIBLE|GLOO_SOCKET|NCCL|UCX|SLURM_LOCALID)' | sort
printf 'argument: %s\\n' "$@"
[ -n "${SILENT_EXIT:-}" ] || echo "${RECORDED_EXIT:-0}" >"$MEGATRON_TLT_ATTEMPT/exit"
exit "${RECORDED_EXIT:-0}"
"""


def make_template(folder: Path) -> Path:
    """A tiny run's model, prompts and configuration (absolute paths)."""
    write_config(folder, rewards={"workers": 1, "functions": REWARD}, eval={"every": 3})
    return folder


class Scene:
    """A folder with a space in its name, jobs submitted from there, and what became of them."""

    def __init__(self, cluster: Cluster, folder: Path, template: Path | None = None):
        """`template` is a directory of `make_template`, needed for real runs."""
        self.cluster, self.folder = cluster, folder.with_name(f"{folder.name} folder")
        self.folder.mkdir()
        (self.folder / "tiny.yaml").write_text("" if template is None else (template / "tiny.yaml").read_text())
        self.run_dir = self.folder / "run"
        self.forking = forking_python(self.folder)
        self.recorder = self.folder / "python"
        self.recorder.write_text(RECORDER)
        self.recorder.chmod(0o755)
        self.job = ""
        self.facts: dict[str, str] = {}

    def train(self, *overrides: str, options: tuple[str, ...] = ONE_NODE, slow: float = 0.05, **env: object) -> None:
        """Submits six steps of a tiny run; `slow` are seconds that each of its 16 rewards a rank and step takes."""
        words = ["train.num_steps=6", f"train.run_dir={self.run_dir}", *overrides]
        env = {"IFACE": "lo", "SLOW_REWARD_S": slow, **env}
        self.submit("train", "tiny.yaml", *words, options=options, **env)

    def submit(self, script: str, *words: object, options: tuple[str, ...] = ONE_NODE, **env: object) -> None:
        """Submits one of our scripts from the folder."""
        script_path = SLURM / f"{script}.sbatch"
        self.job = self.cluster.submit(self.folder, script_path, *words, options=options, **env)

    def record(self, script: str, *words: object, code: int = 0, **env: object) -> None:
        """Submits a script whose ranks only tell how they were called; waits for its end."""
        self.submit(script, *words, PYTHON=self.recorder, RECORDED_EXIT=code, **env)
        self.finish()

    def after_steps(self, count: int) -> None:
        """Waits until so many steps are logged."""
        self.cluster.until(lambda: steps_logged(self.run_dir) >= count, PATIENCE_S, self.output)

    def finish(self) -> Scene:
        """Waits for the end of the job."""
        self.facts = self.cluster.wait(self.job, PATIENCE_S)
        return self

    def ranks(self) -> list[psutil.Process]:
        """The job's ranks on this machine."""
        return [p for p in psutil.process_iter(["cmdline"]) if self._is_rank(p.info["cmdline"] or [])]

    def _is_rank(self, command: list[str]) -> bool:
        """A real start, or what stands for a fork."""
        is_python = "mpi4py" in command or any(word.endswith("/stub.py") for word in command)
        return is_python and f"train.run_dir={self.run_dir}" in command and "srun" not in command[0]

    def output(self) -> str:
        """The batch script's output of all attempts."""
        return "".join(f.read_text() for f in self.folder.glob("*.log"))

    def log(self, attempt: int, rank: int = 0) -> str:
        """One rank's output."""
        return (self.folder / f"logs/{self.job}/{attempt}/rank-{rank:05d}.log").read_text()


def whole(scene: Scene) -> Scene:
    scene.train(slow=0, options=TWO_NODES, PYTHON=scene.forking)
    return scene.finish()


def warned(scene: Scene) -> Scene:
    """The warning before the time limit, at once."""
    scene.train(PYTHON=scene.forking)
    scene.after_steps(2)
    scene.cluster.run("scancel", "--signal=USR1", "--batch", scene.job)
    return scene.finish()


def timed_out(scene: Scene) -> Scene:
    """Slurm's own warning, a minute before the limit, which is moved to where the job is in the middle of its steps."""
    scene.train("stop.warning_s=40", options=(*ONE_NODE, "--signal=B:USR1@60"), slow=0.7)
    scene.after_steps(2)
    started = time.mktime(time.strptime(scene.cluster.facts(scene.job)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    minutes = math.ceil((time.time() - started + 30) / 60)
    scene.cluster.run("scontrol", "update", f"JobId={scene.job}", f"TimeLimit={minutes}")
    scene.cluster.until(lambda: scene.cluster.facts(scene.job)["Restarts"] != "0", PATIENCE_S, scene.output)
    scene.cluster.run("scontrol", "update", f"JobId={scene.job}", "TimeLimit=20")
    return scene.finish()


def cancelled(scene: Scene) -> Scene:
    scene.train(slow=0.2, PYTHON=scene.forking)
    scene.after_steps(1)
    scene.cluster.run("scancel", scene.job)
    return scene.finish()


def killed(scene: Scene) -> Scene:
    """One rank dies of SIGKILL."""
    scene.train(slow=0.3, PYTHON=scene.forking)
    scene.after_steps(3)  # the first checkpoint is published at the end of the second step
    os.kill(scene.ranks()[-1].pid, signal.SIGKILL)
    return scene.finish()


def requeued(scene: Scene) -> Scene:
    """The job is requeued by an operator."""
    scene.train(slow=0.1, PYTHON=scene.forking)
    scene.after_steps(2)
    scene.cluster.run("scontrol", "requeue", scene.job)
    return scene.finish()


def preempted(scene: Scene) -> Scene:
    """A job of higher priority takes the node."""
    scene.train(slow=0.1, PYTHON=scene.forking, options=(*ONE_NODE, "-wn6"))
    scene.after_steps(2)
    scene.cluster.run("srun", "-p", "high", "-w", "n6", "--exclusive", "sleep", "1")
    return scene.finish()


def wrong_config(scene: Scene) -> Scene:
    """Its ranks are real starts, which take ten seconds each if they get further; the others' are forks."""
    scene.train("train.num_step=3")
    return scene.finish()


def wrong_pair(scene: Scene) -> Scene:
    """An MPI library and a plugin of srun that do not speak to each other."""
    scene.train(MPI="none", MAX_STALLS=0, PYTHON=scene.forking)
    return scene.finish()


def crash_loop(scene: Scene) -> Scene:
    scene.record("train", "tiny.yaml", code=3, MAX_STALLS=1)
    return scene


def eight_gpus(scene: Scene) -> Scene:
    options = ("-N2", "--ntasks-per-node=2", "--gpus-per-node=8")
    scene.record("train", "configs/quickstart.yaml", options=options, IFACE="ib0")
    return scene


def converted(scene: Scene) -> Scene:
    words = ["--hf", ROOT / "assets/demo-policy", "--out", scene.folder / "megatron"]
    scene.submit("convert", "hf-to-megatron", *words, PYTHON=scene.forking)
    return scene.finish()


def chained(scene: Scene) -> Scene:
    """Two jobs of one name, one after the other, in place of requeueing."""
    options = (*ONE_NODE, "--dependency=singleton", "--job-name=chain", "--no-requeue")
    env = {"PYTHON": scene.recorder, "RECORDED_EXIT": 75}
    scene.submit("train", "tiny.yaml", options=options, **env)
    first = scene.job
    scene.submit("train", "tiny.yaml", options=options, **{**env, "RECORDED_EXIT": 0})
    scene.finish()
    scene.first = scene.cluster.wait(first)  # type: ignore[attr-defined]
    return scene


_LONGEST_FIRST = timed_out, requeued, preempted, killed, warned, cancelled, whole, eight_gpus, wrong_config, wrong_pair
SCENARIOS: dict[str, Callable[[Scene], Scene]] = {
    play.__name__: play for play in (*_LONGEST_FIRST, crash_loop, converted, chained)
}


def run_here(cluster: Cluster, folder: Path, *command: object, **env: object) -> subprocess.CompletedProcess[str]:
    """A command of a login node, in `folder`."""
    environment = {**cluster.env, **{k: str(v) for k, v in env.items()}}
    return subprocess.run(
        [str(c) for c in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
