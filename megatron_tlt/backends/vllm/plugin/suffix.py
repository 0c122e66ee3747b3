"""The embedded engine's suffix drafter inside vLLM.

    a step's sample  ->  SuffixBridge.note: rows of the drafter follow vLLM's batch; match rates of the last drafts
    a proposal       ->  the suffix draft of each row

Rows are those of vLLM's batch, in its order, so `RunningRows` is filled here instead of by a scheduler. There is no
history of earlier epochs: the tries hold siblings of this rollout.

Legend: B rows of a step, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_tlt.config.speculation import SuffixSection
from megatron_tlt.models.draft import Draft
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.suffix import SuffixDrafter
from megatron_tlt.types import DraftStrategy, SamplingParams

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
        self._last: tuple[list[str], Draft] | None = None  # names of its rows, draft

    # -- what was drawn ---------------------------------------------------------------------------------------

    def note(
        self,
        names: list[str],
        prompts: Callable[[str], tuple[list[int], list[int], int]],
        keys: np.ndarray,
        temperature: np.ndarray,
        done: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        out: np.ndarray,
        is_drawn: np.ndarray,
    ) -> None:
        """After a step's sample: `out` [B, K + 1] was drawn behind `done` [B] tokens of response, where `is_drawn` [B].

        `prompts(name)`: a request's prompt, the response with which it began, prompt id; `keys` uint64 [B] of the
        requests, `temperature` [B].
        """
        self._observe(dict(zip(names, zip(drafted.tolist(), accepted.tolist(), strict=True), strict=True)))
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
        self._drafter.sync_context(rows)

    def _request(self, name: str, prompts: Callable[[str], tuple[list[int], list[int], int]]) -> Request:
        request = self._live.get(name)
        if request is None:
            tokens, output, prompt_id = prompts(name)
            params = SamplingParams(max_tokens=self._rows.outputs.shape[1])
            prompt = np.array(tokens, np.int32)
            request = Request(prompt, params, prompt_id, 0, self._order, frozenset(), slot=self._free.pop())
            self._rows.outputs[request.slot, : len(output)] = output
            self._order += 1
            self._live[name] = request
            self._drafter.start(request)
        return request

    def _observe(self, fed: dict[str, tuple[int, int]]) -> None:
        """Records in the drafter what became of its last drafts, of which vLLM may have fed a part."""
        if self._last is None:
            return
        (names, draft), self._last = self._last, None
        counts = [fed.get(name, (0, 0)) for name in names]
        drafted = np.array([c[0] for c in counts])[draft.row_of]
        accepted = np.array([c[1] for c in counts])[draft.row_of]
        reached = draft.positions < np.minimum(drafted, accepted + 1)
        self._drafter.observe(draft, reached, reached & (draft.positions < accepted))

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
        lengths = np.full(self._rows.num_rows, strategy.draft_len, np.int32)
        draft = self._drafter.propose(self._rows, lengths, strategy)
        self._last = (list(self._names), draft)
        drafts = iter(np.split(draft.tokens, np.cumsum(draft.counts)[:-1]))
        return [next(drafts).tolist() if tokens else [] for tokens in sampled]

    def state_dict(self) -> dict[str, Any]:
        """The drafter's calibration."""
        return self._drafter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict`'s."""
        self._drafter.load_state_dict(state)
