"""What is traced of a few responses' drafts, compared with the engine's own counters and responses."""

from __future__ import annotations

import pytest

from tests.helpers.engines import (
    OracleDrafter,
    RandomSelector,
    attach,
    generate_all,
    make_engine,
    random_jobs,
    small_config,
)
from tests.helpers.tiny_models import random_weights


def traced(spoil: float, prompt_ids=None, **options):
    """An engine that has served with half-right drafts, what plain decoding gives, and the traced runs."""
    config = small_config("qwen3")
    weights, jobs = random_weights(config, seed=5), random_jobs(131, 8, seed=3)
    expected = generate_all(make_engine(config, weights), jobs)
    engine = make_engine(config, weights, **options)
    attach(engine, OracleDrafter(expected, 131, spoil), RandomSelector("oracle", 6))
    assert engine.speculator is not None
    everybody = {key[0] for key in expected}
    engine.speculator.start_trace(everybody if prompt_ids is None else prompt_ids)
    assert generate_all(engine, jobs) == expected
    return engine, expected, engine.speculator.trace.runs


@pytest.mark.parametrize(("spoil", "blocks"), [(0.4, 200), (0.4, 24), (1.0, 24), (0.0, 200)])
def test_runs_account_for_every_accepted_token(spoil, blocks):
    engine, expected, runs = traced(spoil, num_blocks=blocks)
    stats = engine.take_stats()
    assert stats.speculation.row_steps > 0
    gained = 0
    for key, response in expected.items():
        tokens, end = response[0], 0
        for position, accepted, refused in runs(*key):
            assert position >= end, "runs do not overlap: at least the policy's own token lies between"
            end = position + accepted + 1
            gained += min(accepted, len(tokens) - position - 1)
            if refused and position + accepted < len(tokens):
                assert refused[0] != tokens[position + accepted]
    assert gained == stats.speculation.emitted_tokens - stats.speculation.row_steps
