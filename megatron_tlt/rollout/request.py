"""Requests and prefills, waiting and running. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.models.decoders.keys import request_key
from megatron_tlt.types import Drawn, FinishReason, Sample, SamplingParams, Span

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
    earlier: tuple[Drawn, ...] = ()  # tokens of `output` that earlier calls drew
    takes_turns: bool = False  # its drawn turns go to an environment, which continues or ends the trajectory
    turn_rewards: list[float] = field(default_factory=list)  # of the turns that the environment has answered
    turn_seconds: list[float] = field(default_factory=list)  # as in `types.Sample`
    turn_is_cut: bool = False  # the last drawn turn, by its limit of tokens
    failure: str | None = None  # of the environment
    finish_reason: FinishReason | None = None
    # KV blocks of a finished request, until the next schedule
    blocks: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None  # of a finished request whose engine records them, as in `types.Sample`

    @property
    def key(self) -> int:
        """The request's sampling key, uint64."""
        return request_key(self.params.seed, self.prompt_id, self.sample_index)

    @property
    def turn_start(self) -> int:
        """The place in `output` of the present turn's first token."""
        return self.given[-1][1] if self.given else 0

    @property
    def limit(self) -> int:
        """Tokens of `output` at which the present turn, or the request's part in this call, ends at the latest."""
        most, of_turn, of_call = self.params.max_tokens, self.params.max_turn_tokens, self.params.max_call_tokens
        if self.takes_turns and of_turn:
            most = min(most, self.turn_start + of_turn)
        return min(most, sum(count for _, count in self.earlier) + of_call) if of_call else most

    @property
    def stream(self) -> np.ndarray:
        """Int32: prompt and output. Not while it runs."""
        return np.concatenate((self.prompt, np.asarray(self.output, np.int32)))

    @property
    def computed(self) -> np.ndarray:
        """The stream but for its last token, which is fed next. Not while it runs."""
        return self.stream[:-1]

    def begin_with(self, sample: Sample) -> None:
        """Continues the response that an earlier call left unfinished; before anything is drawn. Mutates."""
        self.output, self.logprobs, self.earlier = list(sample.token_ids), list(sample.logprobs), sample.drawn_by
        if self.stop_strings is not None:
            for token in self.output:  # a stop string may have begun
                self.stop_strings.push(token)

    def end_turn(self) -> None:
        """The drawn turn has ended and goes to the environment. Mutates."""
        self.turn_is_cut, self.finish_reason = self.finish_reason == "length", None

    def give(self, tokens: Sequence[int]) -> None:
        """Continues `output` with tokens that are not drawn: a new turn begins behind them. Mutates."""
        begin = len(self.output)
        self.output += tokens
        self.logprobs += [0.0] * len(tokens)
        self.given += ((begin, len(self.output)),)

    def sample(self, text: str, policy_version: int) -> Sample:
        """The response, once it has ended; `policy_version` drew what no earlier call did."""
        assert self.finish_reason is not None
        name = self.prompt_id, self.sample_index
        sample = Sample(*name, self.output, self.logprobs, text, self.finish_reason, policy_version)
        sample.given, sample.earlier, sample.routed_experts = self.given, self.earlier, self.routed_experts
        sample.turn_rewards, sample.turn_seconds, sample.failure = self.turn_rewards, self.turn_seconds, self.failure
        return sample

    @property
    def is_masked(self) -> bool:
        """Whether sampling must mask tokens (top-k, top-p or min-p). Greedy responses never need to."""
        p = self.params
        return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to compute into the cache, once, and the requests that continue from there.

    A new prompt is one `Prefill` with its n samples as `children`; they draw their next tokens from the same row of
    logits. A request whose `output` begins with given or earlier tokens is one of prompt and output. A preempted
    request is queued again as a `Prefill` of its own, `sampled` already. One that waits for its environment is a
    `Prefill` all the time: its tokens are in the cache, as long as memory lasts, until given ones follow.
    """

    tokens: np.ndarray  # int32 [L]
    children: list[Request]  # not yet started, in order
    sampled: bool = False  # the children have drawn the token behind `tokens` already
    blocks: list[int] = field(default_factory=list)
    done: int = 0  # tokens in the cache
    kept: int = 0  # of these, tokens that were there when the request was parked

    @property
    def order(self) -> int:
        """The place in the queue: that of the first child still to start."""
        return self.children[0].order

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are in the cache."""
        return self.done == len(self.tokens)

    def drop_blocks(self) -> list[int]:
        """Forgets its blocks and that anything was computed; returns them."""
        blocks, self.blocks = self.blocks, []
        self.done = self.kept = 0
        return blocks

    def __lt__(self, other: Prefill) -> bool:
        return self.order < other.order
