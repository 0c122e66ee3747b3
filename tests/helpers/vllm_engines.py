"""A real vLLM on CPU around the demo policy, started once for all tests of a process."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.backends.vllm.build import build_backend as build_vllm
from megatron_tlt.backends.vllm.launch import ENVIRONMENT, find_python
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.engine_process import VllmSection
from megatron_tlt.config.lr_schedule import LearningRate
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.speculation import BanditSection, SpeculationSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.drafters.model import DrafterConfig, DrafterModel
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, collate, epoch
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.types import HiddenStateSample, Prompt
from tests.helpers.mpi import ROOT

NEEDS_VLLM = (
    pytest.mark.slow,
    pytest.mark.nightly,  # a start of vLLM takes 15 seconds
    pytest.mark.skipif(find_python(VllmSection()) is None, reason=f"no vLLM in {ENVIRONMENT}: make setup-vllm"),
)
MODEL = ModelSection(path=str(ROOT / "assets/demo-policy"), max_context=512)
SHAPE = ModelConfig.from_hf(MODEL.path)
DRAFTER = ROOT / "assets/demo-drafter"
QUESTIONS = ("3 + 4", "12 + 5 + 9", "90 + 1 + 22 + 8", "Sort these numbers: 5, 3, 99, 1")
RUNNING = 6  # requests at a time, so that others wait
_started: list[VllmBackend] = []


def demo_prompts(tokenizer: HFTokenizer) -> list[Prompt]:
    return [Prompt(i, str(i), tuple(tokenizer.encode_chat(q)), q) for i, q in enumerate(QUESTIONS)]


def demo_weights(seed: int | None, path: str = MODEL.path) -> dict[str, Tensor]:
    """The policy's tensors, or those of another policy near it."""
    generator = torch.Generator().manual_seed(seed or 0)
    tensors = dict(iter_weights(path, ModelConfig.from_hf(path)))
    if seed is not None:
        tensors = {
            n: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) if t.ndim > 1 else t
            for n, t in tensors.items()
        }
    return tensors


# Every step draws how much it drafts: 4 tokens, 2 or none.
ANY_LENGTH = SpeculationSection(
    drafter="eagle", selector="beg_mab", bandit=BanditSection(arms=(4, 2, 0), thresholds=(1,), epsilon=1.0)
)


def running_vllm() -> VllmBackend:
    """vLLM with our EAGLE drafter and drafts of changing lengths; another one if the last was killed."""
    if not (_started and _started[-1].process.is_alive):
        _started.append(start_vllm(load_drafter(DRAFTER, SHAPE), ANY_LENGTH))
    return _started[-1]


def start_vllm(
    drafter: SavedDrafter | None,
    speculation: SpeculationSection,
    model: ModelSection = MODEL,
    keep_routed_experts: bool = False,
    takes_drafts: bool = False,
    **engine: int,
) -> VllmBackend:
    """vLLM with this drafter and arguments, without weights of the policy; closed when the process ends."""
    rollout = RolloutSection(
        backend="vllm",
        max_running_requests=RUNNING,
        speculation=speculation,
        vllm=VllmSection(engine=engine),  # type: ignore[arg-type]
    )
    started = build_vllm(
        EngineOptions(
            rollout,
            model,
            SyncSection(verify=True),
            device="cpu",
            tokenizer=HFTokenizer(MODEL.path),
            drafter=drafter,
            keep_layers=(),
            keep_routed_experts=keep_routed_experts,
            keep_tables=True,
            takes_drafts=takes_drafts,
        )
    )
    atexit.register(started.close)
    return started


def trained_drafter(
    config: DrafterConfig,
    samples: Iterable[HiddenStateSample],
    tables: tuple[Tensor, Tensor],
    read: Callable[[str], Tensor],
) -> DrafterModel:
    """A drafter that drafts some tokens right and some not. `read`: the policy's weights, by their names."""
    model, data = KINDS[config.kind].build_model(config), [DraftSequence.of(sample) for sample in samples]
    counts = torch.bincount(torch.cat([s.token_ids for s in data]), minlength=config.policy.vocab_size)
    model.start_fresh(0, read, tables[1], counts)
    section = DrafterSection(lr=5e-3, num_steps=70, draft_steps=2)
    rate = LearningRate(5e-3, 4, "cosine")
    trainer = DrafterTrainer(model, section, temperature=1.0, rate=rate)
    for seed in range(70):
        trainer.step(collate(epoch(data, 512, 256, np.random.default_rng(seed))[0]), tables)
    return model
