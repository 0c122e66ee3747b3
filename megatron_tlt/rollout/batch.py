"""One step's work as the scheduler decides it, and its result. Torch-free.

Legend: D decoding rows, C prefill chunks, T tokens = D + all chunks, F first tokens to draw, R = D + F.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.rollout.request import Prefill, Request

if TYPE_CHECKING:
    from megatron_tlt.rollout.speculation.verify import Accepted


@dataclass(slots=True)
class PrefillChunk:
    """Tokens `start:end` of one prefill."""

    prefill: Prefill
    start: int
    end: int

    @property
    def draws(self) -> bool:
        """Whether the children's first tokens are drawn from the logits of the chunk's last row."""
        return self.end == len(self.prefill.tokens) and not self.prefill.sampled


@dataclass(slots=True)
class Batch:
    """Decoding rows come first (one token each), then the chunks in queue order."""

    num_decode: int
    chunks: list[PrefillChunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to), before the forward
    started: list[Request] = field(default_factory=list)  # requests that got their row for this step

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token of a running request."""
        return not self.chunks

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no row."""
        return self.num_decode == 0 and not self.chunks

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_decode + sum(c.end - c.start for c in self.chunks)

    @property
    def num_draws(self) -> int:
        """R, tokens that this step samples."""
        return self.num_decode + len(self.first_draws)

    @property
    def first_draws(self) -> list[Request]:
        """The F requests that draw their first token in this step, in the order of the result's rows."""
        return [child for chunk in self.chunks if chunk.draws for child in chunk.prefill.children]


@dataclass(slots=True)
class StepResult:
    """Sampled tokens: of the decoding rows, then of `Batch.first_draws`.

    After a speculative step row `r` has `counts[r]` tokens, one after another; without `counts` each row has one.
    """

    tokens: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]
    counts: np.ndarray | None = None  # int32 [D]
    accepted: Accepted | None = None  # of a speculative step: the result of verification

    def keep(self, mask: np.ndarray, counts: np.ndarray) -> None:
        """Drops the tokens where `mask` (bool [R]) is False, which leaves `counts` int32 [D] of each row. Mutates."""
        self.tokens, self.logprobs, self.counts = self.tokens[mask], self.logprobs[mask], counts
