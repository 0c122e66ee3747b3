"""How much the steps of an engine in another process draft: the embedded engine's selectors on its measured steps.

    step s      forward, sample  ->  record: what the drafts of s brought, and its seconds
                proposal         ->  begin: the selector's length for s + 1; the engine's proposer; end
    step s + 1  ...

The engine (vLLM) proposes at the end of a step what the next one verifies, so a step's seconds run from the end of a
proposal to the end of the sample behind it. A step of length 0 is plain; a trained drafter still reads its tokens then
(one layer's forward), because its cache could not catch up later, and that time counts as the plain step's.

Where rows have a place in a pre-rolled response, and that pays, these draft from there, and the other rows as usual;
such a step teaches the selector nothing, as in the embedded engine.

The engine's scheduler serves its requests in order, each with its whole draft, until a step's budget of tokens is
spent: drafts are as long as leaves room for every row at most. Where a draft of one row would pass the model's last
position, the engine makes no proposal and verifies zeros in all rows, which are not counted.

On GPUs seconds lie between events of the stream, which are read when the next proposal begins. Behind a verified step
they have passed by then, for its tokens have come to the host; behind a plain step this is the measurement's one wait.

Legend: B rows of a step, K drafted tokens of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.backends.token_drafts import Lists, TokenDrafts
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.speculation.counters import SpeculationCounters
from megatron_tlt.rollout.speculation.pre_rollouts import PRE_ROLLED, Choice, choose
from megatron_tlt.rollout.speculation.selector import build_selector
from megatron_tlt.rollout.speculation.step_costs import LEAST_SECONDS
from megatron_tlt.types import NO_DRAFT, StepMeasurement


class StepDrafting:
    """The selector of an engine, what it learns from, and the counts of what was drafted."""

    def __init__(
        self,
        section: SpeculationSection,
        device: torch.device,
        budget: int,
        tokens: TokenDrafts | None = None,
        agree: Callable[[Choice], Choice] = lambda choice: choice,
        clock: Callable[[], Any] | None = None,
    ):
        """`section` drafts with chains. `budget`: most tokens of a step. `tokens`: of the suffix drafter or of
        pre-rolled responses, where these draft. `agree` gives all ranks of an engine the first one's choice.
        """
        self._selector, self.tokens = build_selector(section), tokens
        self._budget, self._agree, self._clock = budget, agree, clock or _clock_of(device)
        self._counters = SpeculationCounters()
        self._choice = Choice(NO_DRAFT)  # of the last proposal
        self._length = 0  # tokens of each row without a pre-rolled one, which may be fewer than the strategy's
        self._rows = 0  # of the last step, with those in the middle of their prompts
        self._has_proposed = False  # since the last step
        self._is_decode = self._is_measured = False  # the last step; whether that and the proposal behind it were
        self._started: Any = None  # when the last proposal began
        self._chosen: Any = None  # when its part by pre-rolled responses was made
        self._drafted: Any = None  # the same, if it drafted
        self._proposed: Any = None  # when it was made
        self._unread: Callable[[], None] | None = None  # reads the seconds of the last step

    def record(
        self,
        drafted: np.ndarray,
        accepted: np.ndarray,
        is_drawn: np.ndarray,
        is_decode: bool,
        was_pre_rolled: np.ndarray | None = None,
    ) -> None:
        """A step of B rows was sampled, of whose `drafted` int [B] tokens the first `accepted` int [B] were right;
        those of `was_pre_rolled` bool [B] were of pre-rolled responses.

        Only rows of `is_drawn` bool [B] are counted: those in the middle of their prompts emit nothing. Steps that
        read prompts teach the selector nothing, nor do those whose drafts were made in such a step.
        """
        if not self._has_proposed:
            self._choice, self._drafted, drafted = Choice(NO_DRAFT), None, np.zeros_like(drafted)
        now, strategy, own = self._clock(), self._choice.strategy, None
        if self._choice.pre_rolled is not None:
            strategy, own = PRE_ROLLED, (self._started, self._chosen)
        if was_pre_rolled is not None and was_pre_rolled.any():
            part = chains(drafted[was_pre_rolled])
            self._counters.add_pre_rolled(part, part.positions < accepted[was_pre_rolled][part.row_of])
        self._rows, drafted, accepted = len(drafted), drafted[is_drawn], accepted[is_drawn]
        at = np.arange(max(strategy.draft_len, int(drafted.max(initial=0))))
        longest = min(strategy.draft_len, self._length)
        hits = (at < accepted[:, None]).sum(0)
        rows, fed, emitted = len(drafted), int((drafted + 1).sum()), int((accepted + 1).sum())
        marks = self._drafted, self._proposed, now
        is_measured = is_decode and self._is_measured
        draft = chains(drafted) if fed > rows else None

        def read() -> None:
            seconds = _seconds(*marks[:2]), max(LEAST_SECONDS, _seconds(*marks[1:]))
            step = StepMeasurement(strategy, rows, fed, *seconds, emitted, longest, hits)
            if is_measured and own is None:
                self._selector.record(step)
            if is_measured and self.tokens is not None:
                self.tokens.record(rows, fed, step.step_seconds, None if own is None else _seconds(*own))
            if is_decode or draft is not None:
                self._counters.add(step, draft)

        self._read()
        self._unread = read
        self._is_decode, self._is_measured, self._has_proposed = is_decode, False, False

    def _read(self) -> None:
        """Reads the last step's seconds, once: the selector learns of a step before it chooses for the next."""
        read, self._unread = self._unread, None
        if read is not None:
            read()

    def begin(self) -> int:
        """How many tokens the drafter drafts for each row in the proposal that begins now; 0: none."""
        self._read()
        began = self._clock()
        pre_rollouts = None if self.tokens is None else self.tokens.pre_rollouts
        self._choice = choice = self._agree(choose(self._selector, pre_rollouts, self._rows))
        self._chosen = self._clock()
        self._started = self._chosen if choice.pre_rolled is None else began
        self._length = choice.longest(self._budget, self._rows)
        return self._length

    def propose_lists(self, sampled: Lists) -> Lists:
        """A whole proposal without a drafter of the engine's, for the rows where `sampled` has tokens."""
        self.begin()
        return self._joined([[] for _ in sampled])

    def end(self, drafts: Tensor) -> Tensor | Lists:
        """The proposal that `begin` began: its drafter has made `drafts` [B, K], where no pre-rolled response does."""
        if self._choice.pre_rolled is not None:
            return self._joined(drafts.tolist())
        self._end()
        return drafts

    def _joined(self, lists: Lists) -> Lists:
        assert self.tokens is not None
        strategy, pre_rolled = self._choice
        lists = self.tokens.propose(replace(strategy, draft_len=self._length), pre_rolled, lists)
        self._end()
        return lists

    def _end(self) -> None:
        is_plain = self._choice == Choice(NO_DRAFT)
        self._drafted = None if is_plain else self._started
        self._proposed = self._started if is_plain else self._clock()
        self._is_measured, self._has_proposed = self._is_decode, True

    def drafter_changed(self) -> None:
        """The trained drafter has new weights."""
        self._read()
        self._selector.drafter_changed()

    def policy_changed(self) -> None:
        """A weight sync of the policy is complete."""
        self._read()
        self._selector.policy_changed()

    def take_stats(self) -> dict[str, Any]:
        """The fields of `SpeculationStats` since the last call. Resets them."""
        self._read()
        return asdict(self._counters.take())


def _clock_of(device: torch.device) -> Callable[[], Any]:
    """A function that marks a time: on CPU in seconds of this thread, as in the embedded engine; on GPUs by an event
    behind the work that is queued, for a step only queues it.
    """
    if device.type != "cuda":
        return time.thread_time

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return mark


def _seconds(start: Any, end: Any) -> float:
    """Between two marks; 0 where the first one is missing. Waits for events that have not passed."""
    if start is None:
        return 0.0
    if isinstance(end, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def chains(drafted: np.ndarray, tokens: np.ndarray | None = None) -> Draft:
    """Chains of `drafted` int [B] tokens, for verifying; without `tokens` int [N], for counting."""
    total = int(drafted.sum())
    tokens = np.zeros(total, np.int32) if tokens is None else tokens
    return Draft(drafted, tokens, np.zeros(total, np.float32))
