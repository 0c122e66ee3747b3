"""Random drafters, also as others publish them, responses with hidden states, and online trainers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.drafters.base import Format
from megatron_tlt.drafters.checkpoint import save_drafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.export.drafter import export_files, write_export
from megatron_tlt.drafters.model import DrafterConfig, DrafterModel
from megatron_tlt.drafters.training.batching import DraftSequence
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.drafters.training.training_state import STATE_NAMES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import HiddenStateSample, Trajectory
from tests.helpers.tiny_models import random_tensors

FAMILIES = {
    "qwen2": ModelConfig("qwen2", 101, 64, 2, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=512),
    "qwen3": ModelConfig("qwen3", 101, 64, 2, 4, 4, 32, 96, qk_norm=True, max_position_embeddings=512),
    "llama": ModelConfig("llama", 101, 64, 2, 8, 1, 16, 96, max_position_embeddings=512),
}
LAYERS = 8
DEEP = {name: replace(policy, num_layers=LAYERS) for name, policy in FAMILIES.items()}  # of which eagle3 reads three


@contextmanager
def catching_up(most: int) -> Iterator[None]:
    """Drafts of rows that are opened inside cache at most so many missing pairs of a row."""
    native, plain = (f"megatron_tlt.drafters.{name}.CATCH_UP" for name in ("eagle.native_decoder", "torch_decoder"))
    with patch(native, most), patch(plain, most):
        yield


def random_drafter(config: ModelConfig | DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Full tensors of a drafter, of kind eagle for a policy; a reduced vocabulary is a random subset."""
    made = EagleConfig.of(config) if isinstance(config, ModelConfig) else config
    shapes = {name: shape for name, shape in made.shapes().items() if name not in ("d2t", "t2d")}
    out = dict(random_tensors(shapes, seed))
    if made.reduced:
        order = torch.randperm(made.policy.vocab_size, generator=torch.Generator().manual_seed(seed))
        ids = order[: made.draft_vocab_size].sort().values
        known = torch.zeros(made.policy.vocab_size, dtype=torch.bool)
        known[ids] = True
        out |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return out


def spread(model: DrafterModel, logits: Tensor) -> Tensor:
    """Logits [.., V] of those over the drafter's tokens [.., Vd]: -inf for the others."""
    if (ids := model.token_ids()) is None:
        return logits
    out = logits.new_full((*logits.shape[:-1], model.config.policy.vocab_size), float("-inf"))
    return out.index_copy_(-1, ids, logits)


def export_drafter(directory: Path, out: Path, form: Format, dtype: torch.dtype = torch.bfloat16) -> None:
    """What tools/export_drafter.py does."""
    write_export(export_files(directory, out, form, dtype), out)


def published(
    folder: Path,
    config: DrafterConfig,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda *_: None,
    engine: Format = "sglang",
) -> Path:
    """A random drafter as users of `engine` have it, in a new directory of `folder`. `change` alters the contents of
    its config.json and its tensors in place.
    """
    save_drafter(folder / "ours", config, random_drafter(config))
    out = folder / f"published-{len([*folder.iterdir()])}"
    export_drafter(folder / "ours", out, engine, torch.float32)
    about, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(about, tensors)
    (out / "config.json").write_text(json.dumps(about))
    save_file(tensors, out / "model.safetensors")
    return out


def layer_outputs(config: ModelConfig, length: int, seed: int = 3) -> Tensor:
    """Made-up outputs of every layer, [L, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.num_layers, length, config.hidden_size, generator=generator)


def random_sequence(config: ModelConfig | DrafterConfig, length: int, prompt_len: int, seed: int = 0) -> DraftSequence:
    """A response of length T with the hidden states that a drafter reads, of kind eagle for a policy.

    For eagle3 [T, 4H], the columns of `layer_outputs` and a final state; else [T - 1, H].
    """
    policy = config if isinstance(config, ModelConfig) else config.policy
    layers = () if isinstance(config, ModelConfig) else config.aux_layers
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    tokens = torch.randint(0, policy.vocab_size, (length,), generator=generator)
    states = torch.randn(length - (not layers), policy.hidden_size, generator=generator)
    if layers:
        outputs = layer_outputs(policy, length, seed)
        states = torch.cat([*(outputs[i] for i in layers), states], -1)
    return DraftSequence.of(HiddenStateSample(trajectory(tokens.numpy(), prompt_len), states))


def lookup_tables(config: ModelConfig, seed: int = 5) -> tuple[Tensor, Tensor]:
    """An embedding and an LM head, [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 0.3


def random_chunk(config: ModelConfig, length: int, prompt_id: int = 0, version: int = 0) -> HiddenStateSample:
    """Made-up tokens, three of them a prompt, and hidden states: a function of the arguments."""
    length = int(length)
    generator = torch.Generator().manual_seed(length * 1000 + prompt_id)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    hidden = torch.randn(length - 1, config.hidden_size, generator=generator)
    return HiddenStateSample(trajectory(tokens.numpy(), 3, prompt_id, version), hidden)


def trajectory(token_ids: np.ndarray, prompt_len: int, prompt_id: int = 0, version: int = 0) -> Trajectory:
    """These tokens, all drawn behind the prompt's."""
    logprobs = np.zeros(len(token_ids) - prompt_len, np.float32)
    return Trajectory(prompt_id, 0, token_ids.astype(np.int32), logprobs, policy_version=version)


CONFIG = FAMILIES["qwen2"]
LENGTHS = (40, 12, 25, 33, 60, 18, 22, 51)


def online_trainer(
    tp: TensorParallel | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    first_prompt: int = 0,
    dtype: str = "fp32",
    from_actor: bool = False,
    tokens: int | None = None,
    fresh: bool = True,
    warmup: int = 3,
    mean_decay: float | None = None,
    world: Any = None,
    sharing: HiddenStateSharing | None = None,
    **online,
) -> OnlineDrafterTrainer:
    """A trainer whose buffer holds responses of policy version 0; `online` are options, `tokens` the size of a
    vocabulary to be chosen.
    """
    model = EagleModel(EagleConfig.of(CONFIG, tokens))
    model.initialise(0)
    options = {"lr": 3e-3, "start_lr": 3e-3, "draft_steps": 3, "micro_step_tokens": 64} | online
    section = DrafterSection(dtype=dtype, online=options)
    places = {"tp": tp, "world": world, "sharing": sharing}
    trainer = OnlineDrafterTrainer(model, section, **places, from_actor=from_actor, fresh=fresh)
    trainer._trainer.rate = trainer._trainer.rate._replace(warmup_steps=warmup)
    if mean_decay is not None:
        trainer._decay = mean_decay
    trainer.begin_step(0, lambda: lookup_tables(CONFIG))
    for i, length in enumerate(lengths):
        trainer.buffer.add(random_chunk(CONFIG, length, first_prompt + i))
    return trainer


def everything(trainer: OnlineDrafterTrainer) -> Tensor:
    """Weights, their mean and moments, flat, before or after a merge. Collective in a tensor-parallel group."""
    state = trainer._state
    return torch.cat([whole.flatten().clone() for kind in STATE_NAMES for _, whole in state._gathered(kind)])
