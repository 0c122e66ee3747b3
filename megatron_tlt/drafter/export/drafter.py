"""From a drafter directory to an export for a serving engine, with a model card.

| format | drafter of kind eagle | of kind eagle3 |
|---|---|---|
| hf | our own directory with a card | the same |
| sglang | Llama and Qwen2 policies | any policy |
| vllm | Llama and Qwen2 policies | any policy |
| trtllm | refused | any policy |
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_tlt.drafter.checkpoint import CONFIG, WEIGHTS, cast_tensors, load_drafter, write_directory
from megatron_tlt.drafter.export.engines import ExportFiles, Format, engine_files
from megatron_tlt.drafter.export.model_card import model_card
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.eagle.config import DrafterConfig
from megatron_tlt.models.loader import iter_weights


def export_drafter(
    directory: str | Path,
    out: str | Path,
    form: Format,
    dtype: torch.dtype = torch.bfloat16,
    policy: str | Path | None = None,
) -> ExportFiles:
    """Reads the drafter directory, writes the export to `out` and returns what was written.

    Raises what `export_files` raises, and CheckpointError if `out` cannot be written.
    """
    files = export_files(directory, out, form, dtype, policy)
    write_export(files, Path(out))
    return files


def write_export(files: ExportFiles, out: Path) -> None:
    """Raises CheckpointError if `out` cannot be written."""
    write_directory(out, files.tensors, {**files.json, "README.md": files.card})


def export_files(
    directory: str | Path, out: str | Path, form: Format, dtype: torch.dtype, policy: str | Path | None
) -> ExportFiles:
    """What an export to the new directory `out` consists of.

    `policy` is a Hugging Face directory. It must have the drafter's shape; format hf copies its embedding and LM head.
    Everything that can be wrong is found here: ConfigError for what the engine cannot run, or an `out` that exists,
    CheckpointError for a drafter or policy that is torn or does not fit.
    """
    if Path(out).exists() or Path(out).is_symlink():
        raise ConfigError.of("--out", str(out), "exists: it is not written over, name a new directory")
    drafter = load_drafter(directory)
    if policy is not None and drafter.config.kind == "eagle3":
        allowed = "a drafter of kind eagle3 has a head of its own: give none"
        raise ConfigError.of("policy", str(policy), allowed)
    if policy is not None and form != "hf":
        allowed = "engines share the policy's own embedding and LM head: only format hf takes copies"
        raise ConfigError.of("policy", str(policy), allowed)
    if form == "hf":
        files = ExportFiles({WEIGHTS: cast_tensors(drafter.weights, dtype)}, {CONFIG: drafter.to_json(dtype)})
        if policy is not None:
            tables = _policy_tables(policy, drafter.config.policy)
            files.tensors["policy_tables.safetensors"] = cast_tensors(tables, dtype)
    else:
        files = engine_files(drafter, form, dtype)
    return replace(files, card=model_card(drafter, form, dtype, has_tables=policy is not None))


def _policy_tables(policy: str | Path, shape: ModelConfig) -> dict[str, Tensor]:
    """The policy's `embed_tokens.weight` and `lm_head.weight` [V, H]. Raises CheckpointError for another shape."""
    own = ModelConfig.from_hf(policy)
    if DrafterConfig.eagle(own).shapes() != DrafterConfig.eagle(shape).shapes() or own.vocab_size != shape.vocab_size:
        raise CheckpointError(f"{policy} is not the drafter's policy: its shape is another")
    found = {name: tensor for name, tensor in iter_weights(policy, own) if name in (EMBED, HEAD)}
    return {"embed_tokens.weight": found[EMBED], "lm_head.weight": found.get(HEAD, found[EMBED])}
