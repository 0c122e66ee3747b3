"""Drafters in training on real ranks: merged into the weighted mean, tensor-parallel groups that train as one rank
would, and responses that replicas send each other.
"""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_merge_group_and_share(ranks: int) -> None:
    """Four ranks: two replicas of two, merged."""
    done = run_ranks(ranks, "tests/mpi/workers/online_ranks.py")
    wanted = ["merged as it should", "shared on rank"] + (["one group"] if ranks % 2 == 0 else [])
    assert {text: done.stdout.count(text) for text in wanted} == dict.fromkeys(wanted, ranks)
