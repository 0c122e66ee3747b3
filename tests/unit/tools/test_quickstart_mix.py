"""The quickstart asks what the demo policy was taught."""

from pathlib import Path

import demo_traces

from megatron_tlt.config.load import load_config

ROOT = Path(__file__).resolve().parents[3]


def test_tasks_and_answer_pattern_are_those_of_the_traces():
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    for source in (config.data.train, config.data.eval):
        asked = [(t.name, t.weight, dict(t.params)) for t in source.tasks]
        assert asked == [(s.dataset, s.weight, dict(s.params)) for s in demo_traces.MIX]
    assert config.rewards.functions[0].pattern == demo_traces.ANSWER_PATTERN
