"""Hidden states that the actor's forward hands out, against the rollout engine's decoders of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from tests.helpers.tiny_models import read_hidden_states
from tests.mpi.workers.actor_common import HIDDEN, WeightedNll, say, sequences, share, train_batch
from tests.mpi.workers.actor_scenario import copy_of, make_policy

LAYERS = (0, 2)  # of four: with two stages, one on each
_ROOM = 1 << 24


def of_engine(directory: Path) -> dict[int, Tensor]:
    """[L - 1, 3H] of each response by its prompt, from the rollout engine's decoder in C."""
    config = ModelConfig.from_hf(directory)
    decoder = build_decoder(config, aux_layers=LAYERS)
    decoder.load_weights(iter_weights(directory, config))
    texts = [s.trajectory.token_ids[:-1].tolist() for s in sequences(18)]
    return dict(enumerate(read_hidden_states(decoder, texts, 16, 4096)))


def hidden_states(world: Any, root: Path, kind: str = "qwen3") -> None:
    """In the update's forward, in that of the old log-probs, and in one that scores responses: `HIDDEN`."""
    wanted = of_engine(root / kind)
    for layout, forward in HIDDEN[world.size]:
        _collect(world, root / kind, wanted, layout, forward)
    if world.size == 1:
        _within_budget(world, root / kind)


def _collect(world: Any, directory: Path, wanted: dict[int, Tensor], layout: dict[str, Any], forward: str) -> None:
    collected, plain = (make_policy(world, directory, loss=WeightedNll(), **layout) for _ in range(2))
    taken: list[Any] = []
    collected.collect_hidden_states(lambda found, _: taken.append(found), _ROOM, torch.float32, LAYERS)
    mine = share(sequences(18), collected.dims.dp, collected.groups.at.dp)
    if forward == "scoring":
        collected.logprobs(mine, 0.8)
    batch = train_batch([mine], [50.0]) if forward == "update" else train_batch([mine[:3], mine[3:]], [50.0, 80.0])
    for policy in (collected, plain):
        policy.train_step(batch)
    assert len(taken) == 1, "one pass of each response is read"
    error = max((float((s.hidden - wanted[s.trajectory.prompt_id]).abs().max()) for s in taken[0]), default=0.0)
    found = [s.trajectory for s in taken[0]]
    tokens = all(np.array_equal(t.token_ids, sequences(18)[t.prompt_id].trajectory.token_ids) for t in found)
    other = copy_of(plain.named_weights())
    same = tokens and all(torch.equal(t, other[n]) for n, t in collected.named_weights())
    views = world.all_gather_object((error, same, [s.trajectory.prompt_id for s in taken[0]]))
    say(
        world,
        case="hidden_states",
        layout=layout,
        forward=forward,
        error=max(view[0] for view in views),
        same=all(view[1] for view in views),
        responses=[view[2] for view in views],
    )


def _within_budget(world: Any, directory: Path) -> None:
    """Of one step's responses as many as fit, whatever their order; of the next step's, others."""
    policy, every = make_policy(world, directory, loss=WeightedNll(), keep_reference=False), sequences(18)
    row = 64 * 4
    budget = sum(s.trajectory.length - 1 for s in every) * row // 3
    taken: list[Any] = []
    policy.collect_hidden_states(lambda *step: taken.append(step), budget, torch.float32)
    for order in (every, every[::-1], [s for s in every if s.trajectory.prompt_id % 2]):
        policy.logprobs(order, 1.0)
        policy.model.collector._seen.clear()
    sizes = [sum(s.hidden.nbytes for s in found) for found, _ in taken]
    ids = [sorted(s.trajectory.prompt_id for s in found) for found, _ in taken]
    full = 0.6 < sizes[0] / budget <= 1 and sizes[2] <= budget
    counted = [len(i) + left for i, (_, left) in zip(ids, taken, strict=True)]
    say(world, case="hidden_states_budget", full=full, same=ids[0] == ids[1], counted=counted)
