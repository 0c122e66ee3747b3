"""`ForwardStateCollector`: hidden states of a step's responses from the policy's own forward, for engines without them.

Every response that is trained on passes the policy with the weights that generated it: in the forward that scores it,
where log-probs are needed before the update (several mini-batches, a KL in the reward), else in the update's. The
collector reads the first of these passes and adds none. Responses without a gradient have neither pass and are not
collected.

    rows of chosen responses, by hooks -> host -> along the pipeline to the response's owner -> its drafter's buffer
      last stage: state behind the final norm
      every stage: outputs of its auxiliary layers

All ranks of a replica have its responses, so they choose and distribute them alike, without communication.

Legend: L tokens of a response with its prompt, T rows of a micro-batch, H hidden size, C columns: H of each auxiliary
layer, ascending, and H of the final state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.actor.compat import current_device
from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.actor.microbatch import MicroBatch, response_len
from megatron_tlt.models.decoders.torch.transfer import HostCopies, HostCopy
from megatron_tlt.types import LEAST_TRAINED, HiddenStateSample, TrainSequence

# isort: split
# megatron comes after compat.
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Key = tuple[int, int]  # prompt, sample
Sink = Callable[[Sequence[HiddenStateSample], int], None]
"""Gets this rank's responses of a step, and how many of its replica's exceeded the budget."""


class ForwardStateCollector:
    """Reads one pipeline stage of the policy. A sample's `hidden` is [L - 1, C], as the rollout engine's."""

    def __init__(
        self,
        module: GPTModel,
        groups: ActorGroups,
        sink: Sink,
        budget_bytes: int,
        dtype: torch.dtype,
        layers: Sequence[int] = (),
        seed: int = 0,
    ):
        """Hooks `module`. `sink` is called once a step. A step's responses of one rank take at most `budget_bytes` of
        its host's memory on their way, in `dtype`; `layers`: auxiliary ones, from 0; `seed` chooses what stays.
        """
        config = module.config
        self._groups, self._sink, self._dtype, self._seed = groups, sink, dtype, seed
        self._gathers = bool(config.sequence_parallel)
        self._copies = HostCopies(current_device())
        stages, hidden = groups.dims.pp, config.hidden_size
        # A rank of the last stage holds the responses of its whole pipeline until they are sent.
        self._budget = budget_bytes // stages
        self._row = hidden * (len(layers) + 1) * dtype.itemsize
        # The stage that computes each column's state.
        self._stage_of = [layer * stages // config.num_layers for layer in sorted(layers)] + [stages - 1]
        self._hidden_size = hidden
        self._seen: set[Key] = set()
        self._chosen: list[tuple[TrainSequence, int]] = []  # with their owner among the replica's ranks
        self._left: dict[Key, int] = {}  # owners of those that no forward has passed yet
        self._parts: dict[tuple[Key, int], HostCopy] = {}  # by column: states that this rank has read
        self._places: list[tuple[Key, int, int]] = []  # rows of the forward under way that this rank reads
        self._whole: MicroBatch | None = None  # that micro-batch, if any rank of its stage reads some
        # Ranks of one stage share its responses out; their places among the owners of a stage.
        self._width = groups.dims.tp * groups.dims.cp
        self._place = groups.at.cp * groups.dims.tp + groups.at.tp
        self._version = self._left_out = 0
        self._hook(module, {layer: column for column, layer in enumerate(sorted(layers))})

    def _hook(self, module: GPTModel, columns: dict[int, int]) -> None:
        def reader(column: int) -> Callable[..., None]:
            return lambda _module, _args, output: self._read(column, output[0] if isinstance(output, tuple) else output)

        for layer in module.decoder.layers:
            if (number := layer.layer_number - 1) in columns:
                layer.register_forward_hook(reader(columns[number]))
        if self._groups.is_last_stage:
            module.decoder.register_forward_hook(reader(len(columns)))

    # -- a step, in this order --------------------------------------------------------------------------------

    @contextmanager
    def collecting(self, sequences: Sequence[TrainSequence], version: int) -> Iterator[None]:
        """Around forwards of the weights of `version` over `sequences`, the replica's responses of a step: collects
        those that no forward has passed yet, and emits them at the end. Collective over the replica.
        """
        new = [s for s in sequences if _key(s) not in self._seen and response_len(s) >= LEAST_TRAINED]
        self._seen = {_key(s) for s in sequences}
        self._version = version
        self._chosen = choose(new, self._width * self._groups.dims.pp, self._budget, self._row, self._seed)
        self._left = {_key(s): owner for s, owner in self._chosen}
        self._left_out = len(new) - len(self._chosen)
        self._parts = {}
        yield
        if new:
            self._sink(self._exchanged(), self._left_out)

    @contextmanager
    def reading(self, batch: MicroBatch) -> Iterator[None]:
        """Around the forward of one micro-batch; a recomputed one, in backward, is not read."""
        keys = [] if batch.is_filler else [_key(s) for s in batch.sequences]
        owners = [self._left.pop(key, None) for key in keys]
        rows = zip(keys, owners, batch.sequences, batch.packing.starts, strict=False)
        self._places = [
            (key, start, start + sequence.trajectory.length - 1)
            for key, owner, sequence, start in rows
            if owner is not None and owner % self._width == self._place
        ]
        self._whole = batch if any(owner is not None for owner in owners) else None
        try:
            yield
        finally:
            self._places, self._whole = [], None

    def _read(self, column: int, hidden: Tensor) -> None:
        """Takes this rank's rows of a state [T, 1, H], of which it has a part under sequence and context parallel."""
        if self._whole is None:
            return
        with torch.no_grad():
            hidden = hidden.detach()
            if self._gathers:
                hidden = gather_from_sequence_parallel_region(hidden)
            if (order := self._whole.packing.to_whole) is not None:
                hidden = gather_from_sequence_parallel_region(hidden, group=self._groups.cp)
                hidden = hidden.index_select(0, order)
            for key, begin, end in self._places:
                rows = hidden[begin:end, 0].to(self._dtype, copy=True)
                self._parts[key, column] = self._copies.start(rows)

    # -- from the stages to the owners ------------------------------------------------------------------------

    def _exchanged(self) -> list[HiddenStateSample]:
        """This rank's responses, their columns from all stages. Ranks of a pipeline send in one order, so none waits
        for ever.
        """
        samples = []
        for sequence, owner in self._chosen:
            stage, place = divmod(owner, self._width)
            if place != self._place:
                continue
            columns = [self._column(sequence, c, stage) for c in range(len(self._stage_of))]
            if stage == self._groups.at.pp:
                samples.append(self._sample(sequence, torch.cat([c for c in columns if c is not None], -1)))
        assert not self._parts, "every part has an owner"
        return samples

    def _column(self, sequence: TrainSequence, column: int, owner: int) -> Tensor | None:
        """One column's state [L - 1, H] on stage `owner`, None on the others."""
        stage, at, pipeline = self._stage_of[column], self._groups.at.pp, self._groups.pipeline
        if at == stage:
            part = self._parts.pop((_key(sequence), column))
            if stage == owner:
                return part.wait_pageable()
            dist.send(part.wait().view(torch.uint8), pipeline[owner])
        elif at == owner:
            shape = sequence.trajectory.length - 1, self._hidden_size
            rows = torch.empty(shape, dtype=self._dtype)
            dist.recv(rows.view(torch.uint8), pipeline[stage])
            return rows
        return None

    def _sample(self, sequence: TrainSequence, hidden: Tensor) -> HiddenStateSample:
        trajectory = replace(sequence.trajectory, policy_version=self._version, routed_experts=None)
        return HiddenStateSample(trajectory, hidden)


def choose(
    sequences: Sequence[TrainSequence], num_owners: int, budget_bytes: int, row_bytes: int, seed: int
) -> list[tuple[TrainSequence, int]]:
    """Responses to collect, with their owners, each of which gets about as many bytes and at most `budget_bytes`.

    Where that is short a random choice stays, a function of the seed and the responses' names: a fair sample of
    lengths.
    """

    def place(sequence: TrainSequence) -> Any:
        return np.random.default_rng((seed, *_key(sequence))).random()

    used, chosen = [0] * num_owners, []
    for sequence in sorted(sequences, key=place):
        owner = min(range(num_owners), key=used.__getitem__)
        size = (sequence.trajectory.length - 1) * row_bytes
        if used[owner] + size <= budget_bytes:
            used[owner] += size
            chosen.append((sequence, owner))
    return chosen


def _key(sequence: TrainSequence) -> Key:
    return sequence.trajectory.prompt_id, sequence.trajectory.sample_index
