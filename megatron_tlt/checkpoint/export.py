"""A policy as a Hugging Face directory that `transformers`, an engine or `model.path` can load.

A live one from the ranks, tensor by tensor (`write_hf`); a checkpoint from its files, without a policy (`write_run`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.actor.checkpoint_files import complete_steps, read_manifest
from megatron_tlt.checkpoint.atomic import new_directory, problem_of
from megatron_tlt.checkpoint.convert.hf_dir import copy_companions
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.resume import checkpoint_problems
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.drafter.checkpoint import read_drafter_config, save_drafter
from megatron_tlt.drafter.fingerprint import policy_fingerprint
from megatron_tlt.drafter.state_file import DRAFTER_STATE, load_drafter_state
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.hf_writer import save_hf

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World


def write_hf(policy: MegatronPolicy, world: World, model: ModelSection, out: Path, dtype: str) -> None:
    """Writes every tensor, config.json and the tokenizer's files on rank 0. Collective.

    An existing model in `out` is replaced only when the new one is whole. Raises CheckpointError.
    """
    weights = policy.named_weights()
    if world.is_main:
        save_hf(out, policy.config, weights, dtype=DTYPES[dtype])
        _copy_all_companions(model, out)
    else:
        for _ in weights:  # every rank takes part in gathering each tensor
            pass
    world.barrier()


def export_problems(out: Path, config: Config, overwrite: bool) -> list[ConfigProblem]:
    """Problems with writing the configuration's run as `out`, found without loading it."""
    run_dir = Path(config.train.run_dir)
    resume = config.checkpoint.resume
    problems = checkpoint_problems(resume)
    model = config.model
    sources = model.path, model.megatron_path, model.tokenizer, run_dir, *({resume} - {"auto", "never"})
    if problem := problem_of(out, overwrite, [Path(source) for source in sources if source]):
        problems.append(ConfigProblem("--out", str(out), problem))
    if resume == "never":
        problems.append(ConfigProblem("checkpoint.resume", resume, "must be auto, or a checkpoint: one is exported"))
    if resume == "auto" and not complete_steps(run_dir / "checkpoints"):
        problems.append(ConfigProblem("train.run_dir", str(run_dir), "must be a run with checkpoints"))
    return problems


def write_run(
    checkpoint: Path, ranks: Ranks, model: ModelSection, out: Path, dtype: str, overwrite: bool = False
) -> str:
    """Writes a run's checkpoint, whose files are known to be whole, and its drafter as OUT/drafter; says what it wrote.

    One parameter is in memory at a time, on the host. Any number of ranks shares the files; `out` appears whole or not
    at all, with `overwrite` in the place of a model. Collective. Raises CheckpointError, ConfigError.
    """
    with together(ranks):
        manifest = read_manifest(checkpoint)
        todo = HfConversion.plan(checkpoint, dtype, model.path, verify=False)
    said, drafter = f"policy version {manifest.policy_version}", checkpoint / DRAFTER_STATE
    with new_directory(out, todo.num_bytes, ranks, overwrite, todo.sources) as scratch:
        todo.write_into(scratch, ranks)
        if ranks.is_main:
            _copy_all_companions(model, scratch)
        if ranks.is_main and drafter.is_file():
            state = load_drafter_state(drafter)
            save_drafter(
                scratch / "drafter",
                read_drafter_config(state["about"], todo.config),
                state["model"],
                policy_version=manifest.policy_version,
                trained_steps=int(state["trained_steps"]),
                fingerprint=policy_fingerprint(scratch),
            )
            said += f", drafter in {out / 'drafter'}"
    return said


def _copy_all_companions(model: ModelSection, out: Path) -> None:
    for source in dict.fromkeys((Path(model.path), Path(model.tokenizer or model.path))):
        copy_companions(source, out)
