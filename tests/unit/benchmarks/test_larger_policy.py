"""Larger policies and drafters compute what the small ones do, and stay so under training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo_traces import generate

from benchmarks.lib.larger_policy import deepen, widen, widen_drafter
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.types import SamplingParams
from tests.helpers.engines import speculating_engine
from tests.helpers.mpi import ROOT
from tests.helpers.runs import make_model

POLICY, DRAFTER = ROOT / "assets/demo-policy", ROOT / "assets/demo-drafter"
EAGLE = {"drafter": "eagle", "selector": "fixed", "draft_len": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies")
    make_model(path / "small")
    deepen(path / "small", 5, path / "deep")
    widen(path / "small", 160, path / "wide")
    widen(path / "small", 160, path / "wider", hidden_size=96, max_positions=512)  # sqrt(3) is rounded
    return path


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["deep", "wide", "wider"])
def test_the_logits_are_those_of_the_small_policy(folder: Path, kind: str):
    tokens = torch.arange(1, 40)[None]
    small, large = load(folder / "small"), load(folder / kind)
    assert sum(p.numel() for p in large.parameters()) > sum(p.numel() for p in small.parameters())
    torch.testing.assert_close(large(tokens).logits, small(tokens).logits, rtol=0, atol=1e-5)


def test_an_update_leaves_every_added_value_zero(folder: Path):
    small, large = load(folder / "small"), load(folder / "wider")
    before = {name: p.detach().clone() for name, p in large.named_parameters()}
    optimizer = torch.optim.AdamW(large.parameters(), lr=1e-3, weight_decay=0.0)
    for seed in range(3):
        tokens = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(seed))
        large(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, known), (_, p) in zip(small.named_parameters(), large.named_parameters(), strict=True):
        inside = tuple(slice(size) for size in known.shape)
        assert not torch.equal(p[inside], before[name][inside]), name
        added = p.detach().clone()
        added[inside] = 0.0
        assert not added.any(), name


def test_responses_and_accepted_drafts_are_those_of_the_small_policy(tmp_path: Path):
    small = ModelConfig.from_hf(POLICY)
    wide = widen(POLICY, 512, tmp_path / "policy", hidden_size=256)
    large = ModelConfig.from_hf(wide)
    widen_drafter(DRAFTER, small, large, tmp_path / "drafter")
    prompts = [HFTokenizer(POLICY).encode_chat(example.prompt) for example in generate(6, seed=7)]

    def responses(policy: Path, drafter: Path, config: ModelConfig):
        weights = load_drafter(drafter, config).weights
        engine = speculating_engine(
            config, list(iter_weights(policy, config)), drafter_weights=dict(weights), speculation=EAGLE
        )
        for at, prompt in enumerate(prompts):
            engine.add(prompt, SamplingParams(max_tokens=64, ignore_eos=True, seed=1), at)
        outputs = {request.prompt_id: request.output for request in engine.run()}
        return outputs, engine.take_stats().speculation.accepted_at

    expected, accepted = responses(POLICY, DRAFTER, small)
    assert sum(accepted) > 2 * accepted[0]  # the drafter is a good one
    assert responses(wide, tmp_path / "drafter", large) == (expected, accepted)


def test_refuses_a_hidden_size_that_is_no_multiple(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="multiple of 32"):
        widen(folder / "small", 160, tmp_path / "odd", hidden_size=80)
