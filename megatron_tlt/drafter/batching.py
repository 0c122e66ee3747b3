"""From responses with hidden states to packed batches that the drafter trains on.

Legend: L tokens of a sequence, H hidden size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.eagle.pairs import PairBatch
from megatron_tlt.types import HiddenStateSample


@dataclass(slots=True)
class DraftSequence:
    """A prompt and its response with the policy's hidden states; nothing follows the last position, so it needs
    none."""

    token_ids: Tensor  # [L] int64
    hidden: Tensor  # [L or L - 1, H], after the policy's final norm
    prompt_len: int
    offset: int = 0  # position of the first token, in a window of a longer sequence
    key: int = 0  # the request's sampling key, to measure how often coupled drafts match
    response_at: int | None = None  # position of the response's first token; None: prompt_len (not in a window)

    @classmethod
    def of(cls, sample: HiddenStateSample) -> DraftSequence:
        """A whole response with its hidden states."""
        ids = torch.from_numpy(np.asarray(sample.token_ids, np.int64))
        return cls(ids, sample.hidden, sample.prompt_len, key=sample.key)

    @property
    def response_start(self) -> int:
        """Position of the response's first token."""
        return self.prompt_len if self.response_at is None else self.response_at

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
        """The first place at which a draft may begin: the next token is the response's, and the pair exists."""
        return max(1, self.prompt_len - 1)

    @property
    def num_bases(self) -> int:
        """Places at which a draft may begin; the last token predicts nothing."""
        return max(0, self.length - 1 - self.first_base)

    def part(self, begin: int, end: int, prompt_len: int) -> DraftSequence:
        """Tokens `begin` .. `end` - 1 (views), of which drafts begin behind the first `prompt_len`."""
        return replace(
            self,
            token_ids=self.token_ids[begin:end],
            hidden=self.hidden[begin:end],
            prompt_len=prompt_len,
            offset=self.offset + begin,
            response_at=self.response_start,
        )


def windows(sequence: DraftSequence, size: int) -> Iterator[DraftSequence]:
    """Windows of at most `size` tokens in which every base of the sequence appears once.

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
        yield sequence.part(begin, stop, first + 1 - begin)
        first = stop - 1
        begin = first - size // 4


def pack(sequences: Sequence[DraftSequence], batch_tokens: int) -> list[list[DraftSequence]]:
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
    """All windows of the sequences once, in packs (`pack`) in a random order. What has no base is left out."""
    found = [part for s in sequences if s.num_bases for part in windows(s, window)]
    groups = pack([found[i] for i in rng.permutation(len(found))], batch_tokens)
    return [groups[i] for i in rng.permutation(len(groups))]


def bases_by_step(sequences: Sequence[DraftSequence], steps: int) -> list[int]:
    """Bases that have unrolled step 0, 1, .. `steps` - 1: what the loss of those sequences is a mean over."""
    return [sum(max(0, s.num_bases - j) for s in sequences) for j in range(steps)]


def collate(sequences: Sequence[DraftSequence], device: torch.device | str | None = None) -> PairBatch:
    """One packed batch, on `device` (default: where the sequences are)."""
    starts = [0]
    hidden = []
    for s in sequences:
        starts.append(starts[-1] + s.length)
        hidden.append(s.hidden[: s.length])
        if len(s.hidden) < s.length:
            hidden.append(s.hidden.new_zeros(1, s.hidden.shape[1]))
    return PairBatch(
        torch.cat([s.token_ids for s in sequences]).to(device),
        torch.cat(hidden).to(device),
        starts,
        [s.first_base for s in sequences],
        [s.offset for s in sequences],
    )
