"""What the trained drafter has cached, however the prompt came."""

from __future__ import annotations

import torch

from megatron_tlt.types import SamplingParams
from tests.helpers.engines import small_config, speculating_engine
from tests.helpers.stepping import run_out
from tests.helpers.tiny_models import random_weights

CONFIG = small_config("qwen3")
CHAIN = {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "catch_up": 8}


def test_drafts_do_not_depend_on_how_the_prompt_came() -> None:
    """In one chunk or several: the same pairs at the same slots, and the same drafts behind them."""
    caches, drafted = [], []
    for budget in (128, 17, 16, 3, 1):
        engine = speculating_engine(CONFIG, random_weights(CONFIG, seed=5), speculation=CHAIN, budget=budget)
        engine.add(list(range(1, 41)), SamplingParams(max_tokens=40, ignore_eos=True, seed=3), 0, indices=[0])
        run_out(engine)
        assert engine.speculator is not None and engine.speculator.trained is not None
        caches.append(engine.speculator.trained.kv.data.clone())
        stats = engine.take_stats().speculation
        drafted.append((stats.drafted_tokens, stats.emitted_tokens))
    assert all(torch.equal(cache, caches[0]) for cache in caches) and caches[0].any()
    assert drafted == drafted[:1] * 5 and drafted[0][0] > 30
