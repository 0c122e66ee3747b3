import itertools
import random

import pytest

from megatron_tlt.idle.state import RankState, StateTracker, seconds_in

BUSY, IDLE, TRAINING = RankState.BUSY, RankState.IDLE, RankState.TRAINING


class Ticks:
    """A clock that jumps by odd amounts at every reading."""

    def __init__(self) -> None:
        self.rng, self.time = random.Random(5), 1000.0

    def now(self) -> float:
        self.time += self.rng.random()
        return self.time


def test_spans_cover_the_phase_without_gap_or_overlap():
    clock = Ticks()
    tracker = StateTracker(clock.now)
    begun = clock.time
    walk = [IDLE, TRAINING, IDLE, TRAINING, BUSY]
    for state in walk:
        tracker.to(state)
    spans = tracker.finish()
    assert [s.state for s in spans] == [BUSY, *walk]
    assert spans[0].start == begun
    assert spans[-1].end == clock.time
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert seconds_in(spans, *RankState) == pytest.approx(clock.time - begun, rel=1e-12)
    assert seconds_in(spans, IDLE, TRAINING) == pytest.approx(spans[4].end - spans[1].start, rel=1e-12)
