"""Requests and prefills, waiting and running. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.models.keys import request_key
from megatron_tlt.types import FinishReason, SamplingParams, Span

if TYPE_CHECKING:
    from megatron_tlt.rollout.stops import StopStringFinder


@dataclass(slots=True, eq=False)
class Request:
    """One response in progress.

    `order` is the place in the queue (unique, never changes): smaller arrived earlier. While the request runs
    (`row >= 0`) its newest tokens are in the scheduler's arrays; `output` is filled when it leaves them.
    """

    prompt: np.ndarray  # int32 [P], shared by the samples of one prompt
    params: SamplingParams
    prompt_id: int
    sample_index: int
    order: int
    stop_token_ids: frozenset[int]
    stop_strings: StopStringFinder | None = None
    dataset_id: str = ""  # names the prompt over epochs; "": unknown
    row: int = -1
    slot: int = -1
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    given: tuple[Span, ...] = ()  # of `output`, as in `types.Sample`
    finish_reason: FinishReason | None = None
    # KV blocks of a finished request, until the next schedule
    blocks: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None  # of a finished request whose engine records them, as in `types.Sample`

    @property
    def key(self) -> int:
        """The request's sampling key, uint64."""
        return request_key(self.params.seed, self.prompt_id, self.sample_index)

    @property
    def is_masked(self) -> bool:
        """Whether sampling must mask tokens (top-k, top-p or min-p). Greedy responses never need to."""
        p = self.params
        return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to compute into the cache, once, and the requests that continue from there.

    A new prompt is one `Prefill` with its n samples as `children`; they draw their next tokens from the same row of
    logits. A request whose `output` begins with given tokens is one of prompt and output. A preempted request is queued
    again as a `Prefill` of its own, `sampled` already.
    """

    tokens: np.ndarray  # int32 [L]
    children: list[Request]  # not yet started, in order
    sampled: bool = False  # the children have drawn the token behind `tokens` already
    blocks: list[int] = field(default_factory=list)
    done: int = 0  # tokens in the cache

    @property
    def order(self) -> int:
        """The place in the queue: that of the first child still to start."""
        return self.children[0].order

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are in the cache."""
        return self.done == len(self.tokens)

    def __lt__(self, other: Prefill) -> bool:
        return self.order < other.order
