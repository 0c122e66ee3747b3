"""Exchange of answers with hidden states between engine replicas, once a step.

A replica trains while it waits because its own answers were short, and drafts are needed most for the long ones. So
after each step a few replicas, in turns, broadcast the longest answers in their buffers, and all others add them to
theirs. The bytes sent in a step are bounded, whatever the number of replicas.

Legend: N answers, T tokens of all of them, R rows of hidden states of all of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.buffer import HiddenStateBuffer, Key

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

_MIN_SENDER_BYTES = 4 << 20  # of one sender; with less in all, fewer send at a time
_MAX_SENDERS = 4  # more bytes in all make for longer answers, not for more senders

Answers = Sequence[tuple[Key, DraftSequence]]
Packed = tuple[Answers, list[int], list[int], Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HiddenStateSharing:
    """Which replicas send, and how much. The same on every rank but for `replica` and `is_leader`."""

    replica: int = 0
    num_replicas: int = 1
    ranks_per_replica: int = 1
    bytes: int = 0  # sent after a step by all senders together; 0: nothing is shared
    is_leader: bool = True  # the first rank of its replica, which sends

    def senders(self, turn: int) -> list[int]:
        """Replicas that send in exchange number `turn`; none with one replica or without bytes."""
        if self.num_replicas == 1 or not self.bytes:
            return []
        count = min(self.num_replicas, _MAX_SENDERS, max(1, self.bytes // _MIN_SENDER_BYTES))
        return sorted((turn * count + i) % self.num_replicas for i in range(count))

    def exchange(self, world: World, buffer: HiddenStateBuffer, turn: int) -> None:
        """Adds the longest answers of this turn's senders to the buffers of all other replicas.

        Collective; `turn` is the same on all ranks. Mutates `buffer`.
        """
        senders, mine = self.senders(turn), None
        if self.replica in senders and self.is_leader:
            mine = pack_answers(buffer.longest(self.bytes // len(senders)))
        for sender in senders:
            packed = world.broadcast_object(mine, sender * self.ranks_per_replica)
            if packed is not None and sender != self.replica:
                for key, answer in unpack_answers(packed):
                    buffer.add_shared(key, answer)


def pack_answers(answers: Answers) -> Packed | None:
    """N answers with their tensors joined to tokens [T] and hidden states [R, H]; None if there are none.

    Two tensors are pickled three times as fast as 2 N short ones.
    """
    if not answers:
        return None
    found, empty = [s for _, s in answers], torch.empty(0)
    return (
        [(key, replace(s, token_ids=empty, hidden=empty)) for key, s in answers],
        [s.length for s in found],
        [len(s.hidden) for s in found],
        torch.cat([s.token_ids for s in found]),
        torch.cat([s.hidden for s in found]),
    )


def unpack_answers(packed: Packed) -> Iterator[tuple[Key, DraftSequence]]:
    """The answers given to `pack_answers`, one after the other, each in memory of its own."""
    answers, lengths, rows, tokens, hidden = packed
    parts = zip(answers, tokens.split(lengths), hidden.split(rows), strict=True)
    for (key, answer), own_tokens, own_hidden in parts:
        yield key, replace(answer, token_ids=own_tokens.clone(), hidden=own_hidden.clone())
