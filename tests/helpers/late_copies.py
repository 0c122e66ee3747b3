"""Reads of paged states that are done some polls later, as copies from a GPU are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_tlt.models.decoders.torch.transfer import HostCopy
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates


class Late:
    """A CUDA event that is done after `polls` queries; `on_wait` gets the queries left where one waits for it."""

    def __init__(self, polls: int, on_wait: Callable[[int], None]):
        self.polls, self._on_wait = polls, on_wait

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def synchronize(self) -> None:
        self._on_wait(self.polls)


def delay_reads(monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[int], None]) -> None:
    """From now on a read of `count` positions is done after `count % 4` queries."""
    start = PagedHiddenStates.start_read

    def late(pages: PagedHiddenStates, blocks: list[int], count: int) -> HostCopy:
        return HostCopy(start(pages, blocks, count).wait(), Late(count % 4, on_wait))

    monkeypatch.setattr(PagedHiddenStates, "start_read", late)
