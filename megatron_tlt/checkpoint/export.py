"""A policy as a Hugging Face directory that `transformers`, an engine or `model.path` can load.

A live one from the ranks, tensor by tensor (`write_hf`); a checkpoint from its files, without a policy (`write_run`),
or of its adapters alone a PEFT directory (`write_adapter`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.actor.checkpoint_files import complete_steps, read_manifest
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.atomic import new_directory, problem_of
from megatron_tlt.checkpoint.companions import copy_run_companions
from megatron_tlt.checkpoint.convert.adapted import AdaptedReader
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.resume import checkpoint_problems
from megatron_tlt.config.json_reader import read_object
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.drafters.checkpoint import read_drafter_config, save_drafter
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.drafters.state_file import DRAFTER_STATE, load_drafter_state
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.config.actor import LoraSection
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World

EXPORT, ADAPTER_EXPORT = "export", "export --adapter"


def write_hf(policy: MegatronPolicy, world: World, model: ModelSection, out: Path, dtype: str) -> None:
    """Writes every tensor, config.json (the model's with another type) and the tokenizer's files on rank 0. Collective.

    An existing model in `out` is replaced only when the new one is whole. Raises CheckpointError.
    """
    weights = policy.named_weights()
    if world.is_main:
        hf_config = read_object(Path(model.path) / "config.json")
        save_hf(out, policy.config, weights, dtype=DTYPES[dtype], hf_config=hf_config)
        copy_run_companions(Path(model.path), Path(model.tokenizer_path), out)
    else:
        for _ in weights:  # every rank takes part in gathering each tensor
            pass
    world.wait_for_all()  # the first one's disk may take longer than a collective may


def export_problems(out: Path, config: Config, overwrite: bool, adapter: bool = False) -> list[ConfigProblem]:
    """Problems with writing the configuration's run as `out`, found without loading it."""
    run_dir = Path(config.train.run_dir)
    resume = config.checkpoint.resume
    problems = checkpoint_problems(resume)
    model = config.model
    started_from = config.actor.lora and config.actor.lora.adapter_path
    sources = model.path, model.megatron_path, model.tokenizer, started_from, run_dir, *({resume} - {"auto", "never"})
    command = ADAPTER_EXPORT if adapter else EXPORT
    if problem := problem_of(out, command, overwrite, [Path(source) for source in sources if source]):
        problems.append(ConfigProblem("--out", str(out), problem))
    if resume == "never":
        problems.append(ConfigProblem("checkpoint.resume", resume, "must be auto, or a checkpoint: one is exported"))
    if resume == "auto" and not complete_steps(run_dir / "checkpoints"):
        problems.append(ConfigProblem("train.run_dir", str(run_dir), "must be a run with checkpoints"))
    return problems


def write_run(
    checkpoint: Path,
    ranks: Ranks,
    model: ModelSection,
    out: Path,
    dtype: str,
    overwrite: bool = False,
    lora: LoraSection | None = None,
) -> str:
    """Writes a run's checkpoint, whose files are known to be whole, and its drafter as OUT/drafter; says what it wrote.

    `lora`: the run's adapters, which are merged into its base. One parameter is in memory at a time, on the host. Any
    number of ranks shares the files; `out` appears whole or not at all, with `overwrite` in the place of an older
    export.
    Collective. Raises CheckpointError, ConfigError.
    """
    with together(ranks):
        source = checkpoint if lora is None else AdaptedReader(TorchDistReader(checkpoint), model, lora)
        todo = HfConversion.plan(source, dtype, model.path, verify=False)
    with new_directory(out, EXPORT, todo.num_bytes, ranks, overwrite, todo.sources) as scratch:
        todo.write_into(scratch, ranks)
        if ranks.is_main:
            copy_run_companions(Path(model.path), Path(model.tokenizer_path), scratch)
            return _write_drafter(checkpoint, scratch, todo.config, scratch, out)
    return ""


def write_adapter(
    checkpoint: Path,
    ranks: Ranks,
    model: ModelSection,
    out: Path,
    dtype: str,
    lora: LoraSection,
    overwrite: bool = False,
) -> str:
    """Writes a run's adapters as a PEFT directory, and its drafter as OUT/drafter, on rank 0; says what it wrote.

    Neither names its base where that is `model.megatron_path`: the text says so.
    `out` appears whole or not at all, with `overwrite` in the place of an older export of adapters.
    Collective. Raises CheckpointError, ConfigError.
    """
    with together(ranks):
        config, source = (
            ModelConfig.from_hf(model.path),
            AdaptedReader(TorchDistReader(checkpoint), model, lora),
        )
        source.check(config)
    with new_directory(out, ADAPTER_EXPORT, source.num_factor_bytes, ranks, overwrite, [checkpoint]) as scratch:
        if ranks.is_main:
            source.write_peft(scratch, config, DTYPES[dtype])
            base = model.megatron_path
            said = _write_drafter(checkpoint, scratch, config, None if base else Path(model.path), out)
            return said if base is None else f"{said}; the base is {base}: tools/convert_megatron_to_hf.py writes it"
    return ""


def _write_drafter(checkpoint: Path, scratch: Path, config: ModelConfig, policy: Path | None, out: Path) -> str:
    """Writes the checkpoint's drafter, if it has one, as SCRATCH/drafter; what the directory `out` holds, in words.

    `policy`: the Hugging Face directory that the drafter belongs to; None where there is none.
    """
    manifest, file = read_manifest(checkpoint), checkpoint / DRAFTER_STATE
    said = f"policy version {manifest.policy_version}"
    if not file.is_file():
        return said
    state = load_drafter_state(file)
    save_drafter(
        scratch / "drafter",
        read_drafter_config(state["about"], config),
        state["model"],
        policy_version=manifest.policy_version,
        trained_steps=int(state["trained_steps"]),
        fingerprint="" if policy is None else policy_fingerprint(policy),
    )
    return f"{said}, drafter in {out / 'drafter'}"
