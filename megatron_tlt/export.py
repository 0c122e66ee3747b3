"""Writing the policy as a Hugging Face directory that `transformers`, an engine or `model.path` can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.loader import save_hf

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.distributed.world import World

# What makes a model directory complete besides weights and config.json, where the source has it.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def write_hf(policy: MegatronPolicy, world: World, model: ModelSection, out: Path, dtype: str) -> None:
    """Streams every tensor to rank 0, which writes them with config.json and the tokenizer's files. Collective.

    An existing model in `out` is replaced only when the new one is whole. Raises CheckpointError.
    """
    weights = policy.named_weights()
    if world.is_main:
        save_hf(out, policy.config, weights, dtype=DTYPES[dtype])
        for source in dict.fromkeys((Path(model.path), Path(model.tokenizer or model.path))):
            copy_companions(source, out)
    else:
        for _ in weights:  # every rank takes part in gathering each tensor
            pass
    world.barrier()


def write_drafter(state: Mapping[str, Any], policy: MegatronPolicy, out: Path) -> None:
    """Writes the drafter of a checkpoint (`OnlineTrainer.state_dict`) as a directory for `drafter_path`. One rank only.

    Raises CheckpointError if it is not this policy's.
    """
    save_drafter(
        out,
        policy.config,
        state["model"],
        policy_version=policy.policy_version,
        trained_steps=int(state["trained_steps"]),
    )


def copy_companions(source: Path, out: Path) -> None:
    """Copies tokenizer and generation files from one model directory to another, those that are there."""
    if source.resolve() == out.resolve():
        return
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
