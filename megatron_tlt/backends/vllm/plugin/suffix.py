"""The embedded engine's suffix drafter inside vLLM: alone, or beside the EAGLE drafter (mixed).

    a step's sample  ->  SuffixBridge.note: rows of the drafter follow vLLM's batch, earlier drafts are judged
    a proposal       ->  alone: the suffix draft of each row; mixed: of the rows where it is worth more than EAGLE's

Rows are those of vLLM's batch, in its order, so `RunningRows` is filled here instead of by a scheduler. There is no
history of earlier epochs: the tries hold siblings of this rollout, and the forms of earlier ones.

Legend: B rows of a step, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.suffix import SuffixDrafter
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SamplingParams

_MEMORY = 0.9  # weight of the past in a request's mean of accepted EAGLE tokens
_EXPLORE = 64  # proposals after which EAGLE's draft is taken for every row, whatever it was worth
Lists = list[list[int]]


class SuffixProposer:
    """vLLM's `custom_class` proposer: drafts what `source` returns, nothing before it is set."""

    def __init__(self, vllm_config: Any):
        """As vLLM calls it."""
        self.source: Callable[[Lists], Lists] | None = None

    def load_model(self, target_model: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: Lists, *args: Any, **kwargs: Any) -> Lists:
        """Drafts of every row; none for one whose prompt is still being read."""
        return [[] for _ in sampled_token_ids] if self.source is None else self.source(sampled_token_ids)


class SuffixBridge:
    """A `SuffixDrafter` and the rows of vLLM's batch."""

    def __init__(self, section: SuffixSection, max_requests: int, max_len: int, vocab: int):
        self._rows = RunningRows(max_requests, max_requests, 1, vocab, max_output=max_len)
        self._drafter = SuffixDrafter(section, self._rows)
        self._live: dict[str, Request] = {}  # by vLLM's name
        self._free = list(range(max_requests - 1, -1, -1))
        self._names: list[str] = []  # of the rows
        self._order = 0
        self._last: tuple[list[str], Draft, np.ndarray] | None = None  # names, draft, rows that took it
        self._eagle = np.full(max_requests, 2.0)  # mean accepted EAGLE tokens, by slot
        self._proposals = 0

    # -- what was drawn ---------------------------------------------------------------------------------------

    def note(
        self,
        names: list[str],
        prompts: Callable[[str], tuple[list[int], int]],
        keys: np.ndarray,
        temperature: np.ndarray,
        done: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        out: np.ndarray,
        is_drawn: np.ndarray,
    ) -> None:
        """After a step's sample: `out` [B, K + 1] was drawn behind `done` [B] tokens, where `is_drawn` [B].

        `prompts(name)`: a request's prompt and prompt id; `keys` uint64 [B] of the requests, `temperature` [B].
        """
        self._judge(dict(zip(names, zip(drafted.tolist(), accepted.tolist(), strict=True), strict=True)))
        rows = self._rows
        rows.requests.clear()
        self._names = [name for name, drawn in zip(names, is_drawn, strict=True) if drawn]
        for row, i in enumerate(np.flatnonzero(is_drawn).tolist()):
            request = self._request(names[i], prompts)
            start, count = int(done[i]), int(accepted[i]) + 1
            rows.outputs[request.slot, start : start + count] = out[i, :count]
            rows.requests.append(request)
            rows.slots[row], rows.output_len[row] = request.slot, start + count
            rows.keys[row], rows.temperature[row] = keys[i], temperature[i]
        self._drafter.sync_context(rows, NO_DRAFT)

    def _request(self, name: str, prompts: Callable[[str], tuple[list[int], int]]) -> Request:
        request = self._live.get(name)
        if request is None:
            tokens, prompt_id = prompts(name)
            params = SamplingParams(max_tokens=self._rows.outputs.shape[1])
            prompt = np.array(tokens, np.int32)
            request = Request(prompt, params, prompt_id, 0, self._order, frozenset(), slot=self._free.pop())
            self._order += 1
            self._live[name] = request
            self._drafter.start(request)
            self._eagle[request.slot] = self._eagle.mean()
        return request

    def _judge(self, fed: dict[str, tuple[int, int]]) -> None:
        """Records in the drafter what became of its last drafts, of which vLLM may have fed a part."""
        if self._last is None:
            return
        (names, draft, taken), self._last = self._last, None
        counts = [fed.get(name, (0, 0)) for name in names]
        drafted = np.array([c[0] for c in counts])[draft.row_of]
        accepted = np.array([c[1] for c in counts])[draft.row_of]
        reached = taken[draft.row_of] & (draft.positions < np.minimum(drafted, accepted + 1))
        self._drafter.observe(draft, reached, reached & (draft.positions < accepted))
        for name, is_suffix, (count, ok) in zip(names, taken, counts, strict=True):
            if not is_suffix and count and name in self._live:
                slot = self._live[name].slot
                self._eagle[slot] = _MEMORY * self._eagle[slot] + (1 - _MEMORY) * ok

    def finish(self, name: str) -> None:
        """The request has ended, or is dropped: its siblings may still draft from it."""
        request = self._live.pop(name, None)
        if request is None:
            return
        slot, request.slot = request.slot, -1
        self._free.append(slot)
        self._drafter.finish(request)
        if not self._live:
            self._last = None
            self._drafter.end_generate()

    # -- what is drafted --------------------------------------------------------------------------------------

    def propose_lists(self, sampled: Lists, strategy: DraftStrategy) -> Lists:
        """Drafts of vLLM's rows, where `sampled` has tokens."""
        drafts = iter(self._propose(np.ones(len(self._names), bool), strategy))
        return [next(drafts) if tokens else [] for tokens in sampled]

    def improve(self, names: list[str], proposed: Tensor, strategy: DraftStrategy) -> Tensor:
        """EAGLE's drafts [B, K] with the suffix drafts in place of those that are worth less."""
        drafts, tokens = dict(zip(self._names, self._propose(None, strategy), strict=True)), proposed.clone()
        for row, name in enumerate(names):
            if draft := drafts.get(name):
                tokens[row, : len(draft)] = torch.tensor(draft).to(tokens)
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """The drafter's calibration."""
        return self._drafter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self._drafter.load_state_dict(state)

    def _propose(self, taken: np.ndarray | None, strategy: DraftStrategy) -> Lists:
        """The suffix draft of each row that uses it; `taken`: these rows, None: where it is worth more than EAGLE's."""
        rows = self._rows
        lengths = np.full(rows.num_rows, strategy.draft_len, np.int32)
        draft = self._drafter.propose(rows, lengths, strategy)
        if taken is None:
            self._proposals += 1
            worth = np.bincount(draft.row_of, draft.cumulative_acceptance, minlength=rows.num_rows)
            taken = worth > self._eagle[rows.slots[: rows.num_rows]]
            taken &= self._proposals % _EXPLORE > 0
        self._last = (list(self._names), draft, taken)
        parts = np.split(draft.tokens, np.cumsum(draft.counts)[:-1]) if len(draft.counts) else []
        return [part.tolist() if is_used else [] for part, is_used in zip(parts, taken, strict=True)]
