"""Which ranks hang, which are slow."""

import itertools

from megatron_tlt.resilience import hang_detector as detector
from megatron_tlt.resilience.heartbeat import Heartbeat


def beat(rank, order=5, silent=0.0, phase="update", **more):
    return Heartbeat(
        "a", rank, 4, f"n{rank // 2}", 100 + rank, 1, phase=phase, order=order, silent_seconds=silent, **more
    )


def hung(*beats):
    return [b.rank for b in detector.find_hung(beats, 60.0)]


def test_all_in_one_collective_are_all_named_and_ended_ranks_never():
    assert hung(beat(0, 5, 61), beat(1, 5, 61)) == [0, 1]
    assert hung(beat(0, 5, 61), beat(1, 4, 900, outcome="done")) == [0]
    assert hung() == []


def test_hung_against_all_cases_of_three_ranks():
    """Named: silent ranks with no working rank at their phase or behind, and of these the furthest behind."""
    ranks = [(order, silent, phase) for order in (1, 2) for silent in (0, 99) for phase in ("x", "idle")]
    for case in itertools.product(ranks, repeat=3):
        beats = [beat(i, order, silent, phase) for i, (order, silent, phase) in enumerate(case)]
        free = [
            b
            for b in beats
            if b.silent_seconds > 60
            and all(w.silent_seconds > 60 or w.phase == "idle" or w.order > b.order for w in beats)
        ]
        assert hung(*beats) == [b.rank for b in free if b.order == min(f.order for f in free)]


def test_expectation_is_robust():
    assert detector.phase_limit([1.0, 2.0], 3, 0) == 0.0
    assert detector.phase_limit([1.0, 1.0, 1.0], 3, 30) == 30
    assert detector.phase_limit([100.0] * 5, 3, 30) == 300
    assert detector.phase_limit([100.0] * 5 + [9000.0], 3, 30) == 300  # one outlier changes nothing


def test_slow_are_the_ranks_that_the_others_wait_for():
    late = {"phase_seconds": 50.0, "limit_seconds": 30.0}
    beats = [beat(0, 6, **late), beat(1, 5, **late), beat(2, 5, phase_seconds=20.0, limit_seconds=30.0)]
    assert [b.rank for b in detector.find_slow(beats)] == [1]
    assert detector.find_slow([beat(0, phase_seconds=500.0)]) == []  # nothing expected yet
    assert detector.find_slow([beat(0, phase="idle", **late)]) == []


def test_conditions_and_the_worst_first():
    rows = [
        (beat(0), 0.0),
        (beat(1, outcome="killed"), 0.0),
        (beat(2, process="T"), 1.0),
        (beat(3, silent=40, hang_s=60.0), 1.0),
        (beat(4, phase_seconds=9.0, limit_seconds=3.0), 1.0),
        (beat(5), 36.0),
        (beat(6, outcome="done"), 999.0),
        (beat(7, order=4), 0.0),
    ]
    conditions = {b.rank: detector.condition(b, age) for b, age in rows}
    assert conditions == {
        0: "running", 1: "killed", 2: "stopped", 3: "silent", 4: "slow", 5: "lost", 6: "done", 7: "running"
    }  # fmt: skip
    ordered = sorted(((b, conditions[b.rank]) for b, _ in rows), key=detector.severity)
    assert [b.rank for b, _ in ordered] == [1, 5, 2, 3, 4, 7, 0, 6]
