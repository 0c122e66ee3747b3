"""From responses with hidden states to packed batches that the drafter trains on.

Legend: L tokens of a sequence, W width of a state, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.model import DraftBatch
from megatron_tlt.types import HiddenStateSample


@dataclass(slots=True)
class DraftSequence:
    """A trajectory, or a window of it, with the policy's hidden states. The last position needs no state."""

    token_ids: Tensor  # [L] int64
    hidden: Tensor  # [L or L - 1, W], as of `HiddenStateSample`
    drawn: np.ndarray  # bool [L], tokens that a draft here may predict; the others are context
    response_start: int  # position of the response's first token
    offset: int = 0  # position of the first token, in a window of a longer sequence
    key: int = 0  # the request's sampling key, to measure how often coupled drafts match

    @classmethod
    def of(cls, sample: HiddenStateSample) -> DraftSequence:
        """A whole trajectory with its hidden states."""
        trajectory, start = sample.trajectory, sample.trajectory.response_start
        ids = torch.from_numpy(np.asarray(trajectory.token_ids, np.int64))
        drawn = np.concatenate((np.zeros(start, np.bool_), trajectory.drawn))
        return cls(ids, sample.hidden, drawn, start, key=sample.key)

    @property
    def length(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def reach(self) -> int:
        """Tokens from the whole response's first one to the last one here, also where only its end is held."""
        return self.offset + self.length

    @property
    def first_base(self) -> int:
        """The first place at which a draft may begin: the next token was drawn, and the pair exists."""
        drawn = np.flatnonzero(self.drawn)
        return max(1, int(drawn[0]) - 1) if len(drawn) else self.length - 1

    @property
    def runs(self) -> np.ndarray:
        """Lengths of the runs of drawn tokens. A draft begins before any of them and ends with its run."""
        edges = np.flatnonzero(np.diff(self.drawn[2:].astype(np.int8), prepend=0, append=0))
        return edges[1::2] - edges[::2]

    @property
    def num_bases(self) -> int:
        """Places at which a draft may begin."""
        return int(self.runs.sum())

    def part(self, begin: int, end: int, context: int = 0) -> DraftSequence:
        """Tokens `begin` .. `end` - 1 (views), of which the first `context` are context."""
        drawn = self.drawn[begin:end].copy()
        drawn[:context] = False
        return replace(
            self,
            token_ids=self.token_ids[begin:end],
            hidden=self.hidden[begin:end],
            drawn=drawn,
            offset=self.offset + begin,
        )


def windows(sequence: DraftSequence, size: int) -> Iterator[DraftSequence]:
    """Windows of at most `size` tokens in which every base of the sequence appears once, and at least one base each.

    A window after the first begins with a quarter of `size` as context only; the drafter sees nothing before it, as
    when drafting starts late in the engine. Positions stay the sequence's.
    """
    first, end = sequence.first_base, sequence.length
    if end <= size:
        yield sequence
        return
    begin = max(0, min(first - 1, first - size // 4))
    while first <= end - 2:
        stop = min(end, begin + size)
        window = sequence.part(begin, stop, context=first + 1 - begin)
        if window.num_bases:
            yield window
        first = stop - 1
        begin = first - size // 4


def group_by_length(sequences: Sequence[DraftSequence], batch_tokens: int) -> list[list[DraftSequence]]:
    """Groups of about equally long sequences whose padded size (count x longest) is within `batch_tokens`.

    Sequences longer than that get a group of their own.
    """
    groups: list[list[DraftSequence]] = []
    for sequence in sorted(sequences, key=lambda s: s.length):
        if not groups or (len(groups[-1]) + 1) * sequence.length > batch_tokens:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def epoch(
    sequences: Sequence[DraftSequence], batch_tokens: int, window: int, rng: np.random.Generator
) -> list[list[DraftSequence]]:
    """All windows of the sequences that have a base once, in groups (`group_by_length`) in a random order."""
    found = [part for s in sequences if s.num_bases for part in windows(s, window)]
    shuffled = [found[i] for i in rng.permutation(len(found))]
    groups = group_by_length(shuffled, batch_tokens)
    return [groups[i] for i in rng.permutation(len(groups))]


def bases_by_step(sequences: Sequence[DraftSequence], steps: int) -> list[int]:
    """Bases that have unrolled step 0, 1, .. `steps` - 1: the loss of those sequences is a mean over them."""
    runs = np.concatenate([np.zeros(0, np.int64), *(s.runs for s in sequences)])
    return [int(np.maximum(0, runs - step).sum()) for step in range(steps)]


def collate(sequences: Sequence[DraftSequence], device: torch.device | str | None = None) -> DraftBatch:
    """One packed batch, on `device` (default: where the sequences are)."""
    starts = [0]
    hidden = []
    for s in sequences:
        starts.append(starts[-1] + s.length)
        hidden.append(s.hidden[: s.length])
        if len(s.hidden) < s.length:
            hidden.append(s.hidden.new_zeros(1, s.hidden.shape[1]))
    return DraftBatch(
        torch.cat([s.token_ids for s in sequences]).to(device),
        torch.cat(hidden).to(device),
        starts,
        [s.first_base for s in sequences],
        [s.offset for s in sequences],
        np.concatenate([s.drawn for s in sequences]),
    )
