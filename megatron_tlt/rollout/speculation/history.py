"""Earlier responses to each prompt, for the suffix drafter and to expect lengths, in bounded memory.

Scored responses of all ranks are added in one order, so that all ranks have the same history: any of them may
generate the next epoch of a prompt.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_tlt.types import PastResponse, Prompt

_OVERHEAD = 200  # bytes of a prompt, and of a response beside its tokens, about


@dataclass(slots=True)
class _PromptHistory:
    responses: list[PastResponse]  # best first
    size: int  # bytes
    mean_length: float  # tokens of all responses of the latest epoch, also of those not kept


class ResponseHistory:
    """Of each prompt the best responses of its latest epochs. Prompts updated longest ago are dropped first."""

    def __init__(self, epochs: int, responses: int, mib: int):
        """At most `responses` responses of a prompt, from its last `epochs` epochs; at most `mib` MiB in all.

        With `responses` 0 only lengths are kept.
        """
        self._epochs, self._responses, self._most_bytes = epochs, responses, mib << 20
        self._prompts: OrderedDict[str, _PromptHistory] = OrderedDict()  # updated longest ago first
        self._bytes = 0

    @property
    def most_responses(self) -> int:
        """Most responses of a prompt whose tokens are kept; 0: lengths only."""
        return self._responses

    def remember(self, responses: Sequence[PastResponse]) -> None:
        """Keeps scored responses, in the order given. Those without a `dataset_id` are not kept. Mutates."""
        by_prompt: dict[str, list[PastResponse]] = {}
        for response in responses:
            if response.dataset_id:
                by_prompt.setdefault(response.dataset_id, []).append(_copy(response))
        for name, new in by_prompt.items():
            old = self._forget(name)
            everything = new + (old.responses if old is not None else [])
            epochs = sorted({a.prompt_id for a in everything})[-self._epochs :]
            latest = [a.length for a in new if a.prompt_id == epochs[-1]]
            mean = sum(latest) / len(latest) if latest else (old.mean_length if old is not None else 0.0)
            kept = [a for a in everything if a.prompt_id in epochs and len(a.token_ids) == a.length]
            kept.sort(key=_worst_last)  # stable: equals stay in the order given
            self._keep(name, kept[: self._responses], mean)
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._prompts)))

    def of(self, dataset_id: str) -> list[PastResponse]:
        """The kept responses to a prompt: best scores first, later epochs first among equals."""
        known = self._prompts.get(dataset_id)
        return list(known.responses) if known is not None else []

    def expected_length(self, dataset_id: str) -> float | None:
        """Mean tokens of the responses of the prompt's latest epoch; None for a prompt without history."""
        known = self._prompts.get(dataset_id)
        return known.mean_length if known is not None else None

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts with the longest expected responses first: a long response started late would run alone at the end.

        Equals stay in their order; prompts never seen before are expected to be average.
        """
        lengths = [self.expected_length(p.dataset_id) for p in prompts]
        past = [n for n in lengths if n is not None]
        usual = sum(past) / len(past) if past else 0.0
        order = sorted(range(len(prompts)), key=lambda i: -(usual if (n := lengths[i]) is None else n))
        return [prompts[i] for i in order]

    def state_dict(self) -> dict[str, Any]:
        """Expected lengths by prompt, JSON-able: a resumed run must start its prompts in the same order.

        Responses are left out: they only improve drafts, and would fill the manifest of every checkpoint.
        """
        return {"mean_lengths": {name: q.mean_length for name, q in self._prompts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, in place of everything."""
        self._prompts = OrderedDict()
        self._bytes = 0
        for name, mean in state["mean_lengths"].items():
            self._keep(name, [], float(mean))

    def _keep(self, name: str, responses: list[PastResponse], mean_length: float) -> None:
        size = _OVERHEAD + sum(a.token_ids.nbytes + _OVERHEAD for a in responses)
        self._prompts[name] = _PromptHistory(responses, size, mean_length)
        self._bytes += size

    def _forget(self, name: str) -> _PromptHistory | None:
        known = self._prompts.pop(name, None)
        if known is not None:
            self._bytes -= known.size
        return known


def readable_tokens(responses: Sequence[PastResponse], most: int) -> list[PastResponse]:
    """The responses of one epoch, without the tokens of those that a history of `most` responses a prompt cannot
    keep."""
    best = sorted(range(len(responses)), key=lambda i: _worst_last(responses[i]))[:most]
    none = np.empty(0, np.int32)
    return [a if i in best else replace(a, token_ids=none) for i, a in enumerate(responses)]


def _worst_last(response: PastResponse) -> tuple[float, int]:
    """Sorting key: better scores first, then later epochs."""
    return math.inf if math.isnan(response.score) else -response.score, -response.prompt_id


def _copy(response: PastResponse) -> PastResponse:
    """A copy with its own tokens: the given ones may be a view of a large array, which must not be kept alive."""
    return replace(response, token_ids=np.array(response.token_ids, np.int32))
