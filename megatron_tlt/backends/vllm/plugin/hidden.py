"""Collects a value of each position of running responses in vLLM: hidden states, to train the drafter, or experts.

Each new request takes a slot of `max_len` positions while there is one; a slot is read and freed when its request has
ended. A rejected draft's position is written again by the next step, so the last value of a position is the response's.
Drafts may lie behind the longest request; nothing of those is kept.
Every position passes here: there is no prefix cache.

Legend: S slots, L positions of the longest request, W width of a state or of a token's experts, T tokens of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.backends.vllm.plugin import compat

HIDDEN = "tlt_hidden"  # in `SamplingParams.extra_args`: whether the request's hidden states are collected


class PositionTap:
    """States of some running requests, as many as fit a budget of bytes."""

    def __init__(
        self,
        runner: Any,
        max_len: int,
        max_requests: int,
        budget_bytes: int | None = None,
        states: Callable[[Any], Tensor] = compat.states,
        is_taken: Callable[[str], bool] = lambda request: True,
    ):
        """`states` reads those of a forward's tokens [T, W] from its output. Without a budget there is room for all.

        `is_taken`: whether a request's states will be taken; others get no slot.
        """
        self._runner, self._budget, self._max_len = runner, budget_bytes, max_len
        self._max_requests, self._states, self._is_taken = max_requests, states, is_taken
        self._pool: Tensor | None = None  # [S * L + 1, W]; the last row is for positions without a slot
        self._free: list[int] = []
        self._slots: dict[str, int] = {}
        self._refused: set[str] = set()
        compat.hook_forward(runner, self._seen)

    def _seen(self, output: Any, positions: Tensor) -> None:
        states, requests = self._states(output), compat.request_ids(self._runner)
        if self._pool is None:
            if not any(map(self._is_taken, requests)):  # a pre-rollout, an evaluation
                return
            self._make_pool(states)
        assert self._pool is not None
        starts = compat.row_starts(self._runner)
        total = int(starts[-1])
        trash = len(self._pool) - 1
        bases = np.array([self._base(request) for request in requests])
        if (bases < 0).all():
            return
        counts = np.diff(starts)
        base = torch.from_numpy(np.repeat(bases, counts)).to(states.device)
        at = positions[:total].to(base)
        where = torch.where((base >= 0) & (at < self._max_len), base + at, trash)
        self._pool.index_copy_(0, where, states[:total].detach())

    def _make_pool(self, like: Tensor) -> None:
        width = like.shape[-1]
        slots = self._max_requests
        if self._budget is not None:
            slots = min(slots, self._budget // (self._max_len * width * like.element_size()))
        # Memory that is never written is never touched on a CPU.
        self._pool = like.new_empty(slots * self._max_len + 1, width)
        self._free = list(range(slots))[::-1]

    def release(self) -> None:
        """Frees the memory until the next forward of which states are taken; only without requests."""
        assert not self._slots
        self._pool = None

    def _base(self, request: str) -> int:
        """First row of the request's slot; -1: it has none."""
        slot = self._slots.get(request)
        if slot is None:
            if not self._free or request in self._refused or not self._is_taken(request):
                self._refused.add(request)
                return -1
            slot = self._slots[request] = self._free.pop()
        return slot * self._max_len

    def take(self, request: str, count: int) -> Tensor | None:
        """States [count, W] of the positions 0 .. count - 1 of a request that has ended; frees its slot.

        None: they were not kept. The tensor is a view, valid until the next forward.
        """
        self._refused.discard(request)
        slot = self._slots.pop(request, None)
        if slot is None or self._pool is None:
            return None
        self._free.append(slot)
        at = slot * self._max_len
        return self._pool[at : at + count]
