"""Updates that leave out responses without a gradient against updates with all responses, by algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.algorithms.base import Algorithm
from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmName, AlgorithmSection
from megatron_tlt.distributed.world import World
from megatron_tlt.trainer.batch_assembly import BatchAssembler
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup
from tests.mpi.workers.actor_common import VOCAB, ZERO_ADVANTAGES, relative_error, say
from tests.mpi.workers.actor_scenario import ADAM, copy_of, make_policy, named_gradients

MAX_TOKENS, TEMPERATURE = 24, 0.8
RESPONSES = 3
# Whether each group's rewards are equal, in two steps of two mini-batches of two prompts. Nothing is left out of the
# first mini-batch, the next two have a gradient of zero, the last one is mixed. So its gradients, which are compared,
# are taken at weights of the same bits; a mixed update by Adam would magnify the rounding of another order of sums.
STEPS = ((False, False, True, True), (True, True, False, True))


def zero_advantages(world: World, root: Path) -> None:
    """Errors by algorithm: gradients (relative) and whether weights and positions are the same bits before them."""
    layout = {"pp": 2} if world.size == 4 else {}
    outcomes = {name: compare(world, root, layout, name) for name in ZERO_ADVANTAGES[world.size]}
    say(world, case="zero_advantages", layout=layout, outcomes=outcomes)


def compare(world: World, root: Path, layout: dict[str, Any], name: AlgorithmName) -> dict[str, Any]:
    """One algorithm with and without the responses that have no gradient."""
    section = AlgorithmSection(name=name, mini_batches=2)
    less, whole = build_algorithm(section, MAX_TOKENS), build_algorithm(section, MAX_TOKENS)
    whole.has_gradient = whole.trained  # type: ignore[method-assign]
    after, gradients, figures = zip(*(train(world, root, layout, a) for a in (less, whole)), strict=True)
    return {
        "same_bits": all(torch.equal(after[0][name], wanted) for name, wanted in after[1].items()),
        "gradients": relative_error(gradients[0], gradients[1])[0],
        "less": figures[0],
        "whole": figures[1],
    }


def train(
    world: World, root: Path, layout: dict[str, Any], algorithm: Algorithm
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """(weights after the first step, gradients of the last update, figures of both steps)."""
    optimizer = ADAM.model_copy(update={"weight_decay": 0.1})
    policy = make_policy(world, root / "qwen3", optimizer, algorithm, keep_reference=False, **layout)
    assembler = BatchAssembler(world, policy, algorithm, TEMPERATURE, len(STEPS[0]))
    figures = []
    for step in range(len(STEPS)):
        mine = groups(step)[world.rank :: world.size]
        table, parts = assembler.exchange(mine, mine)
        out = policy.train_step(assembler.build_batch(parts, table))
        figures.append(
            {
                "version": out.policy_version,
                "position": policy.optimizer_steps,
                "steps": out.metrics["optimizer_steps"],
                "tokens": out.metrics["tokens"],
                "skipped": table.metrics()["update/skipped_tokens"],
                "all": float(table.rewards.length.sum()),
            }
        )
        if step == 0:
            after = copy_of(policy.named_weights())
    return after, copy_of(named_gradients(policy)), figures


def groups(step: int) -> list[SampleGroup]:
    """Random responses of one step, the same on every rank."""
    rng = np.random.default_rng(step)
    made = []
    for index, is_equal in enumerate(STEPS[step]):
        prompt_id = step * len(STEPS[step]) + index
        prompt = Prompt(prompt_id, f"q{prompt_id}", tuple(rng.integers(0, VOCAB, 5).tolist()), "")
        samples = [
            Sample(prompt_id, i, rng.integers(0, VOCAB, n).tolist(), [-4.5] * int(n), "", "stop", step)
            for i, n in enumerate(rng.integers(1, MAX_TOKENS, RESPONSES))
        ]
        values = [0.3] * RESPONSES if is_equal else [float(i == 1) for i in range(RESPONSES)]
        made.append(SampleGroup(prompt, samples, [RewardResult(v, v == 1) for v in values]))
    return made
