"""States that the engine keeps (the final one, or those of two layers before it) against `transformers` (fp32, CPU)."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.types import HiddenStateSample
from tests.helpers.engines import OracleDrafter, RandomSelector, attach, generate_all, make_engine, random_jobs
from tests.helpers.tiny_models import hf_model, model_config, named_weights


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(("family", "aux"), [("qwen2", ()), ("qwen3", (0, 1)), ("llama", (1,))])
def test_kept_states_equal_transformers(family: str, aux: tuple[int, ...], kernels: str) -> None:
    """After plain decoding and after drafts, in little memory, prompts in chunks."""
    model, jobs = hf_model(family), random_jobs(131, 8, seed=8)
    made = {"num_blocks": 10, "max_running": 8, "budget": 50, "aux_layers": aux}
    engines = [make_engine(model_config(model), named_weights(model), kernels, **made) for _ in range(2)]
    known = generate_all(make_engine(model_config(model), named_weights(model), kernels), jobs)
    attach(engines[1], OracleDrafter(known, 131, 0.3), RandomSelector("oracle", 12))
    for engine in engines:
        chunks: list[HiddenStateSample] = []
        engine.collect_hidden_states(HiddenStateCollector(chunks.append))
        responses = generate_all(engine, jobs)
        assert engine.take_stats().preemptions > 0
        assert len(chunks) == sum(len(tokens) > 1 for tokens, _ in responses.values()) > 5
        for chunk in chunks:
            with torch.no_grad():
                out = model(torch.from_numpy(chunk.trajectory.token_ids[None, :-1]).long(), output_hidden_states=True)
            want = [out.hidden_states[i][0] for i in (*(layer + 1 for layer in aux), -1)]
            torch.testing.assert_close(chunk.hidden, torch.cat(want, -1), atol=1e-4, rtol=1e-4)
