"""Trains several configurations in one world, one by one. argv: a JSON file of [[config, overrides, fault], ...].

With a fault other than null ranks are uneven; by name, something is wrong with the drafter's training.
"""

import json
import sys
import time
from pathlib import Path

import torch

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.distributed.world import World
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.errors import BackendError, DrafterError
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.trainer.pre_rollouts import PreRoller
from megatron_tlt.trainer.setup import build_trainer

SLOW_S = 0.4  # what the last rank adds once the others have ended their rollouts, so that they have time
SLOW_STEP_S = 0.02  # what its engine's steps take longer with the fault "slow engine"
GENERATE, LEARN, WEIGHTS = EmbeddedBackend.generate, OnlineDrafterTrainer._learn, OnlineDrafterTrainer.weights
STEP, PRE_ROLL = Engine.step, PreRoller._generate


def be_last(world: World) -> None:
    """Returns to the last rank when the others have ended as many rollouts, however late a loaded machine made them."""
    number = world.store.add(f"ended/{world.rank}", 1)
    latest = time.monotonic() + 60
    while world.rank == world.size - 1:
        if min(world.store.add(f"ended/{rank}", 0) for rank in range(world.size)) == number:
            time.sleep(SLOW_S)
            return
        if time.monotonic() > latest:
            raise TimeoutError("another rank has ended fewer rollouts for a minute")
        time.sleep(0.01)


def break_it(fault: str, world: World) -> None:
    """The last rank is slow, in its engine's steps or behind them, and `fault` happens."""
    ahead = []  # not empty: `generate` pre-rolls, which not all ranks do

    def generate(self, *args, **options):
        samples = GENERATE(self, *args, **options)
        if fault != "slow engine" and not ahead:
            be_last(world)
        return samples

    def learn(self, sample):
        if fault == "crash" and world.rank == 0 and self.trained_steps >= 2:
            raise DrafterError("broken on purpose")
        return LEARN(self, sample)

    def weights(self):
        tensors = WEIGHTS(self)
        if fault == "nan" and self.version:
            return {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
        return tensors

    def step(self):
        if fault == "slow engine" and world.rank == world.size - 1:
            time.sleep(SLOW_STEP_S)
        return STEP(self)

    def pre_roll(self, *args):
        ahead.append(self)
        try:
            samples = PRE_ROLL(self, *args)
        finally:
            ahead.clear()
        if fault == "pre-roll":
            raise BackendError("broken on purpose")
        return samples

    EmbeddedBackend.generate, Engine.step, PreRoller._generate = generate, step, pre_roll
    OnlineDrafterTrainer._learn, OnlineDrafterTrainer.weights = learn, weights


def body(world: World) -> None:
    for path, overrides, fault in json.loads(Path(sys.argv[1]).read_text()):
        if fault is not None:
            break_it(fault, world)
        trainer = build_trainer(load_config(path, overrides, Config), world)
        trainer.run()
        if isinstance(trainer.drafter, OnlineDrafterTrainer):  # one drafter: the same bits on every rank
            parts = WEIGHTS(trainer.drafter).values()
            mine = torch.cat([p.flatten() for p in parts]).numpy().tobytes()
            assert len(set(world.all_gather_object(mine))) == 1
            assert trainer.drafter.unpublished() is None, "the last one serves"
        trainer.close()
        world.barrier()


first, overrides, _ = json.loads(Path(sys.argv[1]).read_text())[0]
sys.exit(run_on_every_rank(load_config(first, overrides, Config).distributed, 1, body))
