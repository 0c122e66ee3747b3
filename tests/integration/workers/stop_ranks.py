"""Runs jobs in one world; each is ended by a signal to one rank as it enters a phase, then run on to its end.

argv: a JSON file of {name: {"config", "overrides", "at": [phase, steps done] or null, "rank", "signals": [names]}}, and
where rank 0 writes {name: [ended by the signal?, steps saved then, step dropped?, the second start ended, too?]}.
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from megatron_tlt.actor.checkpoint_files import read_latest, step_of
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.resilience.shutdown import STORE_KEY
from megatron_tlt.resilience.signals import StopSignals
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.trainer.metrics import RunMetrics
from megatron_tlt.trainer.setup import build_trainer

_phase = RunMetrics.phase
pending: list = []  # of this rank: the phase, and what to send
installed: list = []  # signal handlers of the present start


@contextmanager
def phase_with_signal(self, name):
    with _phase(self, name):
        if pending and pending[0] == [name, self.state.step]:
            (signals,) = installed
            for index, number in enumerate(pending[1]):
                os.kill(os.getpid(), getattr(signal, number))
                while signals.count < index + 1:
                    time.sleep(0.01)
                signals._last -= 100  # the next one is no echo
            pending.clear()
            time.sleep(0.05)  # the thread tells the other ranks
        yield


def give_workers_on(self):
    """One reward worker for all starts of a rank: its imports take as long as a step."""
    if self._workers:
        spare.append(self._workers)
        self._workers = []


def take_workers_over(self):
    if spare and not self._workers:
        self._workers = spare.pop()
    _warm_up(self)


RunMetrics.phase = phase_with_signal
spare: list = []
_warm_up = RewardPool.warm_up
RewardPool.warm_up, RewardPool.close = take_workers_over, give_workers_on


def run_once(job, world):
    """(ended by a signal, steps saved, dropped) of one start."""
    signals = StopSignals().install()
    installed[:] = [signals]
    config = load_config(job["config"], job["overrides"], Config)
    trainer = build_trainer(config, world, signals)
    ended = trainer.run()
    trainer.close()
    world.barrier()
    if world.is_main:
        world.store.delete_key(STORE_KEY)  # one world for all starts, where every start has its own
    world.barrier()
    latest = read_latest(Path(config.train.run_dir) / "checkpoints")
    return ended, 0 if latest is None else step_of(latest), trainer.shutdown.has_dropped_step


def body(world):
    told = {}
    for name, job in jobs.items():
        pending[:] = [job["at"], job["signals"]] if job["at"] and job["rank"] == world.rank else []
        told[name] = [*run_once(job, world)]
        if job["at"]:
            told[name].append(run_once(job, world)[0])
    for worker in (worker for workers in spare for worker in workers):
        worker.close()
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(told))


jobs = json.loads(Path(sys.argv[1]).read_text())
sys.exit(run_on_every_rank(load_config(next(iter(jobs.values()))["config"], [], Config).distributed, 1, body))
