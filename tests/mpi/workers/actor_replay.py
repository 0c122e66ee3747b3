"""Drafters of the demo policy, trained on the hidden states of either source. Needs tools/ on the path."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.measure import measure
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.loader import weight_reader
from megatron_tlt.types import HiddenStateSample, TrainSequence
from tests.helpers.demo import POLICY, demo_chunks, demo_config, demo_tables
from tests.mpi.workers.actor_common import WeightedNll, say
from tests.mpi.workers.actor_scenario import make_policy


def replay(world: Any) -> None:
    """Drafters of the demo policy, trained on the engine's hidden states of each step, and on the actor's of the step
    before, without the answers that have no gradient: what their drafts are worth on other answers.
    """
    tables, shape, steps = demo_tables(), demo_config(), 4
    answers = [demo_chunks(96, seed, version=seed) for seed in range(steps)]
    policy = make_policy(world, POLICY, loss=WeightedNll(), keep_reference=False)
    engine, actor = _trainer(shape, False), _trainer(shape, True)
    policy.collect_hidden_states(actor.take_step, 1 << 30, torch.float32)
    windows = dict.fromkeys((engine, actor), 0)
    for step in range(steps + 1):
        engine.begin_step(step, lambda: tables)
        actor.begin_step(step, lambda: tables)
        for sample in answers[step] if step < steps else ():
            engine.buffer.add(sample)
        for trainer in [engine] * (step < steps) + [actor] * (step > 0):
            for _ in range(40):
                trainer.train_step()
            trainer.merge(lambda _: None)
            windows[trainer] += 1
        if step < steps:
            policy.policy_version = step
            policy.logprobs([_as_trained(s) for s in answers[step] if s.prompt_id % 3], 1.0)
    assert windows == {engine: steps, actor: steps}
    others = [DraftSequence.of(s, s.hidden) for s in demo_chunks(32, 99)]
    options = {"steps": 4, "temperature": 1.0, "batch_tokens": 1024, "window": 1024}
    found = []
    for trainer in (_trainer(shape, False), engine, actor):
        trainer.model.load_state_dict(trainer.weights())
        found.append(sum(measure(trainer.model, *tables, others, **options).overlap))
    say(world, case="replay", start=found[0], engine=found[1], actor=found[2])


def _trainer(shape: ModelConfig, from_actor: bool) -> OnlineDrafterTrainer:
    model = EagleModel(shape)
    model.initialise(0)
    model.start_from_policy(weight_reader(str(POLICY), shape))
    section = DrafterSection(online={"micro_step_tokens": 512, "draft_steps": 2})
    return OnlineDrafterTrainer(model, section, from_actor=from_actor)


def _as_trained(sample: HiddenStateSample) -> TrainSequence:
    nothing = np.zeros(len(sample.token_ids) - sample.prompt_len, np.float32)
    ids = sample.token_ids.astype(np.int64)
    names = sample.prompt_id + 1000 * sample.policy_version, sample.sample_index
    return TrainSequence(*names, ids, sample.prompt_len, nothing, nothing, nothing)


if __name__ == "__main__":
    world = World.start(DistributedSection(device="cpu"), threads=1)
    replay(world)
    world.close()
