"""Online trainers over small random drafters, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.drafters.training.training_state import STATE_NAMES
from tests.helpers.hidden_states import random_chunk
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables

CONFIG = FAMILIES["qwen2"]
LENGTHS = (40, 12, 25, 33, 60, 18, 22, 51)


def online_trainer(
    tp: TensorParallel | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    first_prompt: int = 0,
    dtype: str = "fp32",
    from_actor: bool = False,
    tokens: int | None = None,
    fresh: bool = True,
    warmup: int = 3,
    mean_decay: float | None = None,
    world: Any = None,
    sharing: HiddenStateSharing | None = None,
    **online,
) -> OnlineDrafterTrainer:
    """A trainer whose buffer holds responses of policy version 0; `online` are options, `tokens` the size of a
    vocabulary to be chosen.
    """
    model = EagleModel(EagleConfig.of(CONFIG, tokens))
    model.initialise(0)
    options = {"lr": 3e-3, "start_lr": 3e-3, "draft_steps": 3, "micro_step_tokens": 64} | online
    section = DrafterSection(dtype=dtype, online=options)
    places = {"tp": tp, "world": world, "sharing": sharing}
    trainer = OnlineDrafterTrainer(model, section, **places, from_actor=from_actor, fresh=fresh)
    trainer._trainer.rate = replace(trainer._trainer.rate, warmup=warmup)
    if mean_decay is not None:
        trainer._decay = mean_decay
    trainer.begin_step(0, lambda: lookup_tables(CONFIG))
    for i, length in enumerate(lengths):
        trainer.buffer.add(random_chunk(CONFIG, length, first_prompt + i))
    return trainer


def everything(trainer: OnlineDrafterTrainer) -> Tensor:
    """Weights, their mean and moments, flat, before or after a merge. Collective in a tensor-parallel group."""
    state = trainer._state
    return torch.cat([whole.flatten().clone() for kind in STATE_NAMES for _, whole in state._gathered(kind)])
