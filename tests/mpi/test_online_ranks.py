"""Replicas of the drafter on real ranks: merged into the weighted mean, units that train as one rank would, and long
answers that they give each other.
"""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_merges_are_the_weighted_mean(ranks: int) -> None:
    done = run_ranks(ranks, "tests/mpi/workers/online_ranks.py", "merge")
    assert done.stdout.count("merged as it should") == ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_unit_trains_as_one_rank_would(ranks: int) -> None:
    """Four ranks: two units of two, merged."""
    done = run_ranks(ranks, "tests/mpi/workers/online_ranks.py", "unit")
    assert done.stdout.count("one unit") == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_replicas_give_each_other_answers(ranks: int) -> None:
    """Four ranks: two replicas of two."""
    done = run_ranks(ranks, "tests/mpi/workers/online_ranks.py", "share")
    assert done.stdout.count("shared on rank") == ranks
