"""A block drafter (`dspark`) of the recipe's policy, with random weights: milliseconds and kernels of a draft.

The engine's table holds `CONTEXT` positions a sequence, and a draft must not cost what the table could hold, but what
the sequences have: rows of one batch with a short and a long context stand beside each other.
"""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.gpu.check import Check, random_weights
from benchmarks.gpu.decode import open_engine, require_running
from benchmarks.gpu.result import Result
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.block_drafters import BlockShape, markov_rank
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import SamplingParams

CONTEXT, SMOKE_CONTEXT = 8192, 128  # positions a sequence that the engine is opened for
STEPS = 8  # that are timed


def run(check: Check, found: Result) -> None:
    """By batch and context."""
    sizes = ((1, 20), (2, 20)) if check.smoke else ((1, 1000), (32, 1000), (1, 7000), (32, 7000))
    policy = check.random_policy()
    most, context = max(batch for batch, _ in sizes), SMOKE_CONTEXT if check.smoke else CONTEXT
    given = drafter(ModelConfig.from_hf(policy))
    how = {"drafter": "dspark", "selector": "fixed", "draft_len": 4}
    backend = open_engine(check, policy, most, context, given, **how)
    for batch, behind in sizes:
        row = measure(check, backend, batch, behind)
        found.add_row(row)
        found.note({f"draft_ms_{batch}x{behind}": row["draft_ms"]})


def drafter(policy: ModelConfig) -> SavedDrafter:
    """Random weights of as many layers as the policy takes, five at most."""
    aux = tuple(range(0, policy.num_layers - 1, max(1, policy.num_layers // 5)))[:5]
    shape = BlockShape(len(aux), aux, 8, markov_rank(policy.hidden_size), policy.vocab_size - 1, True)
    config = BlockConfig.of(policy, shape)
    return SavedDrafter(config, random_weights(config.shapes()))


def measure(check: Check, backend: EmbeddedBackend, batch: int, behind: int) -> dict[str, float]:
    """Medians over steps of the whole step and of its draft, the device waited for; kernels of one step."""
    engine, rng = backend.engine, np.random.default_rng(batch)
    assert engine.speculator is not None
    source, drafts, usual = engine.speculator.drafter, [], engine.speculator.drafter.propose

    def timed(*args: object) -> object:
        made: list[object] = []
        drafts.extend(check.seconds(lambda: made.append(usual(*args)), repeats=1, warm_up=0))  # type: ignore[arg-type]
        return made[0]

    for at in range(batch):
        prompt = rng.integers(3, backend.engine.runner.decoder.config.vocab_size - 1, behind).tolist()
        engine.add(prompt, SamplingParams(max_tokens=8 * STEPS, ignore_eos=True), at, indices=[0])
    for _ in range(3):
        engine.step()  # prefill, first draft, captures
    require_running(engine, batch)
    source.propose = timed  # type: ignore[method-assign, assignment]
    steps = check.seconds(engine.step, repeats=STEPS, warm_up=0)
    source.propose = usual  # type: ignore[method-assign]
    kernels = sum(not name.startswith("cuda") for name in check.events(engine.step))
    while not engine.is_idle:
        engine.step()
    times = {"draft_ms": 1e3 * statistics.median(drafts), "step_ms": 1e3 * statistics.median(steps)}
    return {"batch": batch, "context": behind, **times, "kernels": float(kernels)}
