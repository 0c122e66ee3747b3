"""Writing the policy as a Hugging Face directory that `transformers`, an engine or `model.path` can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.actor.checkpoint_files import complete_steps
from megatron_tlt.checkpoint.atomic import atomic_directory, problem_of
from megatron_tlt.drafter.checkpoint import described, save_drafter
from megatron_tlt.drafter.fingerprint import policy_fingerprint
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.loader import save_hf

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.distributed.world import World

# Copied from the source's directory where they are there.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def write_hf(policy: MegatronPolicy, world: World, model: ModelSection, out: Path, dtype: str) -> None:
    """Writes every tensor, config.json and the tokenizer's files on rank 0. Collective.

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


def export_problems(out: Path, run_dir: Path, resume: str) -> list[ConfigProblem]:
    """What keeps the run in `run_dir` from being written as `out`, found without loading it."""
    problems = []
    if problem := problem_of(out):
        problems.append(ConfigProblem("--out", str(out), problem))
    if resume == "auto" and not complete_steps(run_dir / "checkpoints"):
        problems.append(ConfigProblem("train.run_dir", str(run_dir), "must be a run with checkpoints"))
    return problems


def write_run(
    policy: MegatronPolicy,
    world: World,
    model: ModelSection,
    out: Path,
    dtype: str,
    drafter: Mapping[str, Any] | None,
) -> None:
    """`write_hf`, and a checkpoint's drafter (`OnlineDrafterTrainer.state_dict`) as OUT/drafter. Collective.

    `out` appears whole or not at all; only rank 0 writes. Raises CheckpointError, OSError.
    """
    with atomic_directory(out) if world.is_main else nullcontext(out) as scratch:
        write_hf(policy, world, model, scratch, dtype)
        if world.is_main and drafter is not None:
            save_drafter(
                scratch / "drafter",
                described(drafter["about"], policy.config),
                drafter["model"],
                policy_version=policy.policy_version,
                trained_steps=int(drafter["trained_steps"]),
                fingerprint=policy_fingerprint(scratch),
            )


def copy_companions(source: Path, out: Path) -> None:
    """Copies tokenizer and generation files from one model directory to another, those that are there."""
    if source.resolve() == out.resolve():
        return
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
