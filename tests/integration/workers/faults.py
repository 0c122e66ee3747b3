"""`megatron-tlt ARGV` in which something goes wrong. argv: the fault by its name, as JSON; ARGV.

{"phase": [RANK, PHASE, STEP, KIND]}  when the rank enters the phase behind that many steps; KIND is a signal's name,
                                      "spin", "regex" (holds the GIL), "mpi", or a file that is waited for
{"cached": [RANK, STEP, RESPONSES]}   SIGKILL when the rank has cached so many responses of the step
{"pre_roll": STEP}                    SIGKILL in the third decoding step of the window behind the step
{"nan": [STEPS]}                      the loss of these steps is not a number
{"read_only": STEP}                   checkpoints/ is mounted read-only just before the save of the step (root)
{"most_bytes": N}                     no file may grow beyond so many bytes, as on a disk that is full
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

from megatron_tlt.actor import train_step
from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.cli import main as cli
from megatron_tlt.resilience.rollout_cache import ResponseWriter, RolloutCache
from megatron_tlt.trainer.metrics import RunMetrics
from megatron_tlt.trainer.pre_rollouts import PreRoller


def happen(kind, world):
    """Does not return, but for SIGSTOP after a SIGCONT, and for a file."""
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
    while kind == "spin":
        pass
    if kind == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if kind == "mpi":
        world.comm.recv(source=world.rank, tag=77)
    while kind.startswith("/") and not os.path.exists(kind):
        time.sleep(0.05)


def phase(rank, name, step, kind):
    def fault(metrics, entered):
        if (metrics.world.rank, entered, metrics.state.step) == (rank, name, step):
            happen(kind, metrics.world)

    in_phases(fault)


def in_phases(do):
    """`do(metrics, phase)` in every phase, before its work."""
    plain = RunMetrics.phase

    @contextmanager
    def with_fault(self, name):
        with plain(self, name):
            do(self, name)
            yield

    RunMetrics.phase = with_fault


def cached(rank, step, responses):
    add, begin_step, seen = ResponseWriter.add, RolloutCache.begin_step, []

    def begin(self, number, *policy):
        seen[:] = [self._world.rank, number, 0]
        begin_step(self, number, *policy)

    def add_and_die(self, sample, prompt_crc):
        add(self, sample, prompt_crc)
        seen[2] += 1
        if seen == [rank, step, responses]:
            os.kill(os.getpid(), signal.SIGKILL)

    RolloutCache.begin_step, ResponseWriter.add = begin, add_and_die


def pre_roll(step):
    open_window, generate, seen = PreRoller.open, PreRoller._generate, []

    def open_(self, number):
        seen[:] = [number]
        return open_window(self, number)

    def generate_and_die(self, queue_of, until):
        calls = []

        def asked():
            calls.append(1)
            if seen != [step]:
                return until()
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return False  # however soon the other rank is done

        return generate(self, queue_of, asked)

    PreRoller.open, PreRoller._generate = open_, generate_and_die


def nan(*steps):
    loss_of, now = train_step._loss_of, []
    in_phases(lambda metrics, name: now.__setitem__(slice(None), [metrics.state.step + 1]))

    def loss(*arguments):
        value, metrics = loss_of(*arguments)
        return (value * float("nan") if now[0] in steps else value), metrics

    train_step._loss_of = loss


def read_only(step):
    maybe_save = CheckpointManager.maybe_save

    def save(self, number, *arguments):
        if number == step and self._world.is_main:
            subprocess.run(["mount", "-o", "remount,ro", str(self._directory)], check=True)
        maybe_save(self, number, *arguments)

    CheckpointManager.maybe_save = save


def most_bytes(size):
    """From the first phase on: MPI starts with larger ones."""
    in_phases(lambda metrics, name: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


((fault, given),) = json.loads(sys.argv[1]).items()
globals()[fault](*(given if isinstance(given, list) else [given]))
sys.exit(cli.main(sys.argv[2:]))
