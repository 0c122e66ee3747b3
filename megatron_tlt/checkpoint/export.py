"""Writing the policy as a Hugging Face directory that `transformers`, an engine or `model.path` can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.checkpoint.atomic import reveal, scratch_beside
from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.drafter.fingerprint import policy_fingerprint
from megatron_tlt.errors import ConfigProblem
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


def export_problems(out: Path, run_dir: Path, resume: str) -> list[ConfigProblem]:
    """What keeps the run in `run_dir` from being written as `out`, as far as can be told without loading it."""
    problems = []
    try:
        if out.exists() or out.is_symlink():
            allowed = "exists: an export is never written over something, name a new directory"
            problems.append(ConfigProblem("--out", str(out), allowed))
        elif not out.parent.is_dir():
            problems.append(ConfigProblem("--out", str(out), f"{out.parent} does not exist: make it first"))
    except OSError as error:
        problems.append(ConfigProblem("--out", str(out), str(error)))
    if resume == "auto" and not (run_dir / "checkpoints").is_dir():
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
    """`write_hf` and, with the state of one, `write_drafter` below it. `out` appears whole or not at all. Collective.

    A killed process leaves `.NAME.unfinished-*` behind. Raises CheckpointError, OSError.
    """
    scratch = scratch_beside(out) if world.is_main else out  # only rank 0 writes
    try:
        write_hf(policy, world, model, scratch, dtype)
        if world.is_main:
            if drafter is not None:
                write_drafter(drafter, policy, scratch / "drafter", policy_fingerprint(scratch))
            reveal(scratch, out)
    except BaseException:
        if world.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_drafter(
    state: Mapping[str, Any], policy: MegatronPolicy, out: Path, fingerprint: Mapping[str, str]
) -> None:
    """Writes a checkpoint's drafter (`OnlineDrafterTrainer.state_dict`) as a `drafter_path` directory. One rank only.

    `fingerprint` is that of `policy` (`policy_fingerprint`). Raises CheckpointError if the drafter does not fit it.
    """
    save_drafter(
        out,
        policy.config,
        state["model"],
        policy_version=policy.policy_version,
        trained_steps=int(state["trained_steps"]),
        fingerprint=fingerprint,
    )


def copy_companions(source: Path, out: Path) -> None:
    """Copies tokenizer and generation files from one model directory to another, those that are there."""
    if source.resolve() == out.resolve():
        return
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
