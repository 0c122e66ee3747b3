"""What engine replicas give each other of a step's answers, when all ranks meet.

A replica trains while it waits because its own answers were short, and the long ones that others still work on are
what it would have to learn from. So after a step some replicas, in turns, hand the longest answers that they hold to
all others, who train on them in the steps to come. Bytes are bounded, whatever the number of replicas.

Legend: N answers, T tokens of all of them, R rows of hidden states of all of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.buffer import Key

_LEAST_BYTES = 4 << 20  # of one sender; below that, fewer send at a time
_MOST_SENDERS = (
    4  # the more bytes there are, the longer are the answers, not the more numerous those who send
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who gives, and how much. The same on every rank but for `replica`."""

    replica: int = 0
    replicas: int = 1
    ranks: int = 1
    """Of one replica; its first one speaks for it."""
    bytes: int = 0
    """That is sent after a step, in all; 0: nothing is shared."""

    def senders(self, turn: int) -> list[int]:
        """Replicas that give in exchange number `turn`; none if there is nobody to give to."""
        if self.replicas == 1 or not self.bytes:
            return []
        count = min(self.replicas, _MOST_SENDERS, max(1, self.bytes // _LEAST_BYTES))
        return sorted((turn * count + i) % self.replicas for i in range(count))


@dataclass(frozen=True, slots=True)
class Parcel:
    """N answers whose tensors travel as two: of many short ones three times as fast as 2 N tensors."""

    answers: list[tuple[Key, DraftSequence]]  # without their tensors
    lengths: list[int]  # tokens of each
    rows: list[int]  # of hidden states of each
    tokens: Tensor  # [T] int64
    hidden: Tensor  # [R, H]


def wrap(answers: Sequence[tuple[Key, DraftSequence]]) -> Parcel | None:
    """One parcel of them; None if there are none."""
    if not answers:
        return None
    found, none = [s for _, s in answers], torch.empty(0)
    return Parcel(
        [(key, replace(s, token_ids=none, hidden=none)) for key, s in answers],
        [s.length for s in found],
        [len(s.hidden) for s in found],
        torch.cat([s.token_ids for s in found]),
        torch.cat([s.hidden for s in found]),
    )


def unwrap(parcel: Parcel) -> Iterator[tuple[Key, DraftSequence]]:
    """What `wrap` was given, one after the other; nobody else holds their memory."""
    tokens, hidden = parcel.tokens.split(parcel.lengths), parcel.hidden.split(parcel.rows)
    for (key, answer), own_tokens, own_hidden in zip(parcel.answers, tokens, hidden, strict=True):
        yield key, replace(answer, token_ids=own_tokens.clone(), hidden=own_hidden.clone())
