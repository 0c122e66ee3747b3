"""Drafts of tokens alone inside an engine's process: the suffix drafter, and places in pre-rolled responses.

    a step's sample  ->  TokenDrafts.note: rows follow the engine's batch; match rates of the last drafts
    a proposal       ->  each row's draft, from its pre-rolled response or else by the drafter

Rows are those of the engine's batch, in its order, so `RunningRows` is filled here instead of by a scheduler. There is
no history of earlier epochs: the tries hold siblings of this rollout.

Legend: B rows of a step, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.base import Drafter, NoDrafter
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST, PreRolledDrafter
from megatron_tlt.rollout.speculation.suffix import SuffixDrafter
from megatron_tlt.types import DraftStrategy, SamplingParams

Lists = list[list[int]]


class Began(NamedTuple):
    """A request as it came."""

    prompt: list[int]
    output: list[int]  # of its response, behind the prompt
    prompt_id: int  # which its siblings share
    limit: int  # tokens at which the response ends
    pre_rolled: list[int]  # response that an earlier policy drew with the same keys; empty: none


class TokenDrafts:
    """A `SuffixDrafter`, `PreRolledDrafter`, and the rows of the engine's batch."""

    def __init__(
        self,
        section: SpeculationSection,
        max_requests: int,
        max_len: int,
        vocab: int,
        longest: int,
        verify_rows: int,
        budget: int,
    ):
        """At most `longest` tokens are drafted of a pre-rolled response. `verify_rows`, `budget`: see
        `PreRolledDrafter.of`.
        """
        self._rows = RunningRows(max_requests, max_requests, 1, vocab, max_output=max_len)
        self._drafter: Drafter = NoDrafter()
        if section.drafter == "suffix":
            self._drafter = SuffixDrafter(section.suffix, self._rows)
        self._pre_rolled: dict[tuple[int, int], np.ndarray] = {}  # by prompt id and `Request.order`
        longest = min(longest, LONGEST)
        self.pre_rollouts = PreRolledDrafter.of(section, self._rows, budget, verify_rows, max_requests, longest)
        self.pre_rollouts.begin(self._pre_rolled)
        self._live: dict[str, Request] = {}  # by the engine's name
        self._free = list(range(max_requests - 1, -1, -1))
        self._names: list[str] = []  # of the rows
        self._at: list[int] = []  # of the rows, in the engine's batch
        self._order = 0
        self._last: tuple[list[str], Draft] | None = None  # the drafter's: names of its rows, draft
        self._drafted: set[str] = set()  # requests whose last draft was of a pre-rolled response

    # -- what was drawn ---------------------------------------------------------------------------------------

    def note(
        self,
        names: list[str],
        began: Callable[[str], Began],
        keys: np.ndarray,
        temperature: np.ndarray,
        done: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        out: np.ndarray,
        is_drawn: np.ndarray,
    ) -> np.ndarray:
        """After a step's sample: `out` [B, K + 1] was drawn behind `done` [B] tokens of response, where `is_drawn` [B].
        Returns bool [B]: rows that had drafted from pre-rolled responses.

        `keys` uint64 [B] of the requests, `temperature` [B].
        """
        self._observe(dict(zip(names, zip(drafted.tolist(), accepted.tolist(), strict=True), strict=True)))
        rows = self._rows
        rows.requests.clear()
        self._at = np.flatnonzero(is_drawn).tolist()
        self._names = [names[i] for i in self._at]
        for row, i in enumerate(self._at):
            request = self._request(names[i], began)
            start, count = int(done[i]), int(accepted[i]) + 1
            rows.outputs[request.slot, start : start + count] = out[i, :count]
            rows.requests.append(request)
            rows.slots[row], rows.output_len[row] = request.slot, start + count
            rows.limit[row] = request.limit
            rows.keys[row], rows.temperature[row] = keys[i], temperature[i]
        self._drafter.sync_context(rows)
        was_pre_rolled = np.array([name in self._drafted for name in names], np.bool_)
        self._drafted.clear()
        return was_pre_rolled

    def _request(self, name: str, began: Callable[[str], Began]) -> Request:
        request = self._live.get(name)
        if request is None:
            tokens, output, prompt_id, limit, pre_rolled = began(name)
            params = SamplingParams(max_tokens=limit)
            prompt, order = np.array(tokens, np.int32), self._order
            request = Request(prompt, params, prompt_id, order, order, frozenset(), slot=self._free.pop())
            self._rows.outputs[request.slot, : len(output)] = output
            self._order += 1
            self._live[name] = request
            self._drafter.start(request)
            if pre_rolled:
                self._pre_rolled[prompt_id, order] = np.array(pre_rolled, np.int32)
            self.pre_rollouts.start(request)
        return request

    def _observe(self, fed: dict[str, tuple[int, int]]) -> None:
        """Records in the drafter what became of its last drafts, of which the engine may have fed a part."""
        if self._last is None:
            return
        (names, draft), self._last = self._last, None
        counts = [fed.get(name, (0, 0)) for name in names]
        drafted = np.array([c[0] for c in counts])[draft.row_of]
        accepted = np.array([c[1] for c in counts])[draft.row_of]
        reached = draft.positions < np.minimum(drafted, accepted + 1)
        self._drafter.observe(draft, reached, reached & (draft.positions < accepted))

    def record(self, running: int, rows: int, step_seconds: float, own_seconds: float | None) -> None:
        if self._pre_rolled:
            self.pre_rollouts.record(running, rows, step_seconds, own_seconds)

    def finish(self, name: str) -> None:
        """The request has ended, or is dropped: its siblings may still draft from it."""
        request = self._live.pop(name, None)
        if request is None:
            return
        self._pre_rolled.pop((request.prompt_id, request.order), None)
        slot, request.slot = request.slot, -1
        self._free.append(slot)
        self._drafter.finish(request)
        if not self._live:
            self._last = None
            self._drafter.end_generate()

    # -- what is drafted --------------------------------------------------------------------------------------

    def propose(self, strategy: DraftStrategy, pre_rolled: Draft | None, lists: Lists) -> Lists:
        """Drafts of its rows: those `pre_rolled`, else by the drafter where `strategy` drafts, else as in `lists`."""
        counts = np.zeros(self._rows.num_rows, np.int32) if pre_rolled is None else pre_rolled.counts
        draft = pre_rolled
        if strategy.draft_len and self._drafter.kind != "none":
            lengths = np.where(counts, 0, strategy.draft_len).astype(np.int32)
            other = self._drafter.propose(self._rows, lengths, strategy)
            self._last = (list(self._names), other)
            draft = other if pre_rolled is None else pre_rolled.join(other)
        if draft is None or not draft.num_tokens:
            return lists
        of_row = np.split(draft.tokens, np.cumsum(draft.counts)[:-1])
        for at, name, tokens, count in zip(self._at, self._names, of_row, counts, strict=True):
            if len(tokens):
                lists[at] = tokens.tolist()
            if count:
                self._drafted.add(name)
        return lists
