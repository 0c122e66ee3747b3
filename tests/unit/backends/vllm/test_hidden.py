"""Hidden states by request: rejected drafts are overwritten, what finds no room is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.backends.vllm.plugin import compat
from megatron_tlt.backends.vllm.plugin.hidden import PositionTap

H, L = 3, 8


class Runner:
    """What the tap reads of a model runner: the rows of a forward."""

    def __init__(self) -> None:
        self.input_batch: Any = None
        self.query_start_loc: Any = None

    def set(self, **counts: int) -> None:
        starts = np.cumsum([0, *counts.values()])
        self.input_batch = SimpleNamespace(num_reqs=len(counts), req_ids=list(counts))
        self.query_start_loc = SimpleNamespace(np=starts)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(compat, "hook_forward", lambda runner, seen: setattr(runner, "seen", seen))
    return Runner()


def forward(runner: Any, value: float, **positions: list[int]) -> None:
    """A forward whose state at a position p is `value + p`; two padding rows behind."""
    runner.set(**{name: len(p) for name, p in positions.items()})
    flat = torch.tensor([*(p for some in positions.values() for p in some), 0, 0])
    runner.seen((value + flat.float())[:, None].expand(-1, H), flat)


def test_states_behind_the_layers_that_eagle3_reads_come_first() -> None:
    final, low, mid, high = (torch.full((2, H), float(i)) for i in range(4))
    assert compat.states(final) is final
    assert compat.states((final, [low, mid, high]))[0, ::H].tolist() == [1, 2, 3, 0]


def test_the_last_state_of_each_position_is_kept(runner: Runner) -> None:
    tap = PositionTap(runner, L, 8, budget_bytes=2 * L * H * 4, is_taken=lambda request: request != "x")
    forward(runner, 50.0, x=[0, 1])  # its hidden states have no reader: no slot
    assert tap._pool is None, "nor memory for others"
    forward(runner, 100.0, x=[2], a=[0, 1, 2], b=[0, 1])
    forward(runner, 200.0, b=[2, 3, 4], a=[3], c=[0])  # b's drafts at 3 and 4 are rejected; c finds no slot
    forward(runner, 300.0, b=[3], a=[4])
    b, a = tap.take("b", 4), tap.take("a", 5)
    assert b is not None and a is not None
    assert b[:, 0].tolist() == [100, 101, 202, 303]
    assert a[:, 2].tolist() == [100, 101, 102, 203, 304]
    assert tap.take("c", 1) is None and tap.take("x", 3) is None
    forward(runner, 500.0, e=[0], f=[0])
    assert tap.take("e", 1) is not None and tap.take("f", 1) is not None, "both slots are free again"


def test_drafts_behind_the_longest_request_leave_other_requests_states(runner: Runner) -> None:
    tap = PositionTap(runner, L, 8, budget_bytes=2 * L * H * 4)
    forward(runner, 100.0, a=[L - 2], b=[0])
    forward(runner, 200.0, a=[L - 1, L, L + 1])
    a, b = tap.take("a", L), tap.take("b", 1)
    assert a is not None and b is not None
    assert a[-1, 0] == 200 + L - 1 and b[0, 0] == 100


def test_released_memory_is_taken_again_by_the_next_forward(runner: Runner) -> None:
    tap = PositionTap(runner, L, 8, budget_bytes=2 * L * H * 4)
    for value in (100.0, 200.0):
        forward(runner, value, a=[0, 1], b=[0])
        a, b = tap.take("a", 2), tap.take("b", 1)
        assert a is not None and b is not None and a[:, 0].tolist() == [value, value + 1]
        tap.release()
        assert tap._pool is None
