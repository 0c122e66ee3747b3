"""The KV cache's memory is released between rollouts, and the responses stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.types import GenerateCall, HiddenStateSample, Prompt, SamplingParams
from tests.helpers.mpi import run_one
from tests.helpers.tiny_models import TINY

PROMPTS = [Prompt(i, f"q{i}", tuple(range(4 + i)), "d") for i in range(4)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def backend_of(model_dir: Path, release_cache: bool, kernels: str = "auto", drafter: str = "none", mib: int = 4):
    speculation = SpeculationSection(drafter=drafter, selector="fixed", draft_len=3)
    rollout = RolloutSection(kv_cache_mib=mib, kernels=kernels, speculation=speculation, release_cache=release_cache)
    model = ModelSection(path=str(model_dir), max_context=128)
    trained = None
    if speculation.trained:
        torch.manual_seed(0)
        made = EagleModel(EagleConfig.of(TINY))
        trained = SavedDrafter(made.config, made.state_dict())
    backend = build_backend(EngineOptions(rollout, model, drafter=trained, keep_layers=()))
    push_policy(model_dir, backend)
    return backend


def responses(backend: EmbeddedBackend) -> list[tuple[list[int], list[float]]]:
    return [(list(s.token_ids), list(s.logprobs)) for s in backend.generate(GenerateCall(PROMPTS, PARAMS, 3))]


def held(backend: EmbeddedBackend) -> int:
    """Bytes of the policy's and the drafter's cache and of hidden states."""
    engine = backend.engine
    caches = [engine.runner.kv.data]
    if engine.runner.pages is not None:
        caches.append(engine.runner.pages.data)
    if engine.speculator is not None and engine.speculator.trained is not None:
        caches.append(engine.speculator.trained.kv.data)
    return sum(c.untyped_storage().nbytes() for c in caches)


@pytest.mark.parametrize(("kernels", "drafter"), [("native", "none"), ("native", "eagle"), ("torch", "eagle")])
def test_responses_are_the_same_with_the_cache_released_between_rollouts(model_dir, kernels, drafter):
    kept, released = (backend_of(model_dir, on, kernels, drafter) for on in (False, True))
    assert held(released) == 0 < held(kept)
    found: list[list[HiddenStateSample]] = [[], []]
    for _ in range(2):
        for backend, states in zip((kept, released), found, strict=True):
            backend.collect_hidden_states(states.append if drafter == "none" else None)
        assert responses(released) == responses(kept)
        assert held(released) == 0
    assert [len(states) for states in found] == [24 * (drafter == "none")] * 2
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(*found, strict=True))
    if drafter != "none":
        assert released.take_stats().speculation.drafted_tokens > 0


def test_the_memory_really_goes_back_to_the_system(model_dir):
    """In a process of its own: malloc keeps small caches for itself in one that has freed larger things before."""
    script = "from tests.unit.backends.test_release import gives_back; import sys; gives_back(sys.argv[1])"
    run_one("-c", script, model_dir)


def gives_back(model_dir):
    """A cache that was touched everywhere: as much resident memory less."""
    backend = backend_of(model_dir, False, "torch", mib=64)
    backend.engine.runner.kv.data.fill_(0.0)
    size = held(backend)
    assert size > 4 << 20
    responses(backend)
    before = _resident()
    backend.release()
    backend.release()
    freed = before - _resident()
    assert 0.9 * size < freed < 1.2 * size
    backend.resume()
    backend.resume()
    assert responses(backend)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
