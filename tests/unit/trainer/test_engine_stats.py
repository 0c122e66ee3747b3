"""The counters of two calls of one engine as one."""

from megatron_tlt.trainer.engine_stats import joined
from megatron_tlt.types import EngineStats, SpeculationStats


def test_counters_are_added_by_key_and_index_and_moments_follow_each_other():
    first = EngineStats(steps=3, seconds=1.5, started=100.0, running_curve=[(0.0, 4), (1.0, 0)], parked_spans=[(1, 2)])
    first.speculation = SpeculationStats({"none": 2, "suffix_3": 1}, 4, 9, 7, by_batch={2: [4, 7]}, drafted_at=[4, 3])
    first.speculation.switches = [(100.5, True)]
    second = EngineStats(steps=2, seconds=0.5, started=110.0, running_curve=[(0.5, 2)], preemptions=1)
    second.speculation = SpeculationStats({"none": 5}, 1, 2, 1, by_batch={2: [1, 1], 4: [2, 2]}, drafted_at=[1, 1, 1])
    second.speculation.switches = [(111.0, True)]
    total = joined(first, second)
    assert (total.steps, total.seconds, total.started, total.preemptions) == (5, 2.0, 100.0, 1)
    assert total.running_curve == [(0.0, 4), (1.0, 0), (10.5, 2)] and total.parked_spans == [(1, 2)]
    spec = total.speculation
    assert spec.steps_by_strategy == {"none": 7, "suffix_3": 1}
    assert (spec.row_steps, spec.drafted_tokens, spec.emitted_tokens) == (5, 11, 8)
    assert spec.by_batch == {2: [5, 8], 4: [2, 2]} and spec.drafted_at == [5, 4, 1]
    assert spec.switches == [(100.5, True), (111.0, True)]
    assert joined(first, EngineStats(started=110.0)) == first
