"""A throw-away Slurm on this machine: several virtual nodes, loopback only, no systemd, nothing outside one directory.

Debian: apt-get install --no-install-recommends slurm-wlm munge. Up in about a second. Only processes whose ids are in
the directory's own files are ever signalled.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
# A requeued job may start when its old credential has expired: after two minutes by default.
AuthInfo=socket={home}/run/munge.sock,cred_expire=5
CredType=cred/munge
# MPICH names shared memory after the job: two clusters on one machine must not count from the same number.
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
TmpFS={home}/tmp/%n
SlurmctldPidFile={home}/run/slurmctld.pid
SlurmdPidFile={home}/run/slurmd.%n.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# From SIGTERM to SIGKILL; sites have 30.
KillWait={kill_wait}
MinJobAge=600
MessageTimeout=60
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in (*DAEMONS, "sbatch", "scontrol") if shutil.which(name, path=path) is None]


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    for first in range(27800 + os.getpid() % 97 * 100, 60000, 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


class Cluster:
    """`count` nodes n1, n2, ... of 8 CPUs and 8 GPUs (character devices that lead nowhere) in directory `home`."""

    def __init__(self, home: Path, count: int = 4, kill_wait: int = 20):
        self.home, self.count = home, count
        conf = home / "etc/slurm.conf"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_", "SBATCH_"))}
        self.env["SLURM_CONF"] = str(conf)
        self.env["PATH"] = os.pathsep.join([self.env.get("PATH", ""), "/usr/sbin", "/sbin"])
        for name in ("etc", "state", "run", "log", "dev"):
            (home / name).mkdir(parents=True)
        for node in range(1, count + 1):
            (home / f"spool/n{node}").mkdir(parents=True)
            (home / f"tmp/n{node}").mkdir(parents=True)
        for gpu in range(8):  # slurmd asks only whether it is a character device
            (home / f"dev/gpu{gpu}").symlink_to("/dev/null")
        port = free_ports(count + 1)
        host, user = socket.gethostname(), getpass.getuser()
        address = f"NodeHostname={host} NodeAddr=127.0.0.1"
        nodes = "\n".join(f"NodeName=n{n} {address} Port={port + n}" for n in range(1, count + 1))
        facts = {"host": host, "port": port, "home": home, "user": user, "nodes": nodes}
        text = _CONF.format(**facts, kill_wait=kill_wait, first_job=1000 + os.getpid() % 60000 * 1000)
        conf.write_text(text)
        (home / "etc/gres.conf").write_text(f"AutoDetect=off\nName=gpu File={home}/dev/gpu[0-7]\n")

    def up(self) -> None:
        """Starts the daemons; returns when every node is idle."""
        run = self.home / "run"
        key = run / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.home.chmod(0o755)
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "seed"}
        words = [f"--{name}={run / file}" for name, file in files.items()]
        self.run("munged", "--force", "--num-threads=2", f"--log-file={self.home}/log/munged.log", *words)
        conf = self.env["SLURM_CONF"]  # absolute: the daemons change their directory
        self.run("slurmctld", "-c", "-f", conf)
        for node in range(1, self.count + 1):
            self.run("slurmd", "-N", f"n{node}", "-f", conf)
        self.until(lambda: self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%T").split() == ["idle"] * self.count)

    def down(self) -> None:
        """Cancels what runs and kills the daemons that came up: they have nothing to save, and take seconds to end."""
        if (self.home / "run/slurmctld.pid").exists():
            # Whatever is wrong with a job or a daemon, nothing of the cluster may stay.
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.run("scancel", "--user", getpass.getuser())
                self.until(lambda: not self.run("squeue", "-h").strip(), seconds=90)
        for file in (self.home / "run").glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)

    def run(self, *command: str, **env: str) -> str:
        """A command's output; a failure shows stdout and stderr."""
        done = subprocess.run(
            [str(c) for c in command], env={**self.env, **env}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, script: Path, *words: object, options: tuple[str, ...] = (), **env: object) -> str:
        """Submits from `folder`; the job's number."""
        command = ["sbatch", "--parsable", *options, str(script), *map(str, words)]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**self.env, **{k: str(v) for k, v in env.items()}},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str, seconds: float = 300) -> dict[str, str]:
        """The job's facts when it has ended for good."""
        self.until(lambda: self.facts(job)["JobState"] in ENDED, seconds, lambda: str(self.facts(job)))
        return self.facts(job)

    def until(self, condition, seconds: float = 60, say=lambda: "") -> None:
        """Waits for a condition; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not true within {seconds:g} s: {say()}"
            time.sleep(0.1)
