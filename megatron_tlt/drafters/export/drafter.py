"""From a drafter directory to an export for a serving engine, with a model card.

| format | drafter of kind eagle | of kind eagle3 | of kind dspark |
|---|---|---|---|
| hf | our own directory with a card | the same | the same |
| sglang | Llama and Qwen2 policies | any policy | layers of Qwen3's form |
| vllm | Llama and Qwen2 policies | not Qwen2-MoE, Mixtral | the same, with layers of Qwen3's form |
| trtllm | refused | any policy | refused |
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_tlt.drafters.base import ExportFiles, Format, cast_tensors
from megatron_tlt.drafters.checkpoint import CONFIG, WEIGHTS, about_of, load_drafter, write_directory
from megatron_tlt.drafters.export.model_card import model_card
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import ConfigError


def write_export(files: ExportFiles, out: Path) -> None:
    """Raises CheckpointError if `out` cannot be written."""
    write_directory(out, files.tensors, {**files.json, "README.md": files.card})


def export_files(directory: str | Path, out: str | Path, form: Format, dtype: torch.dtype) -> ExportFiles:
    """The files of an export to the new directory `out`.

    Finds all errors: ConfigError for a drafter that the engine cannot run or an existing `out`,
    CheckpointError for a drafter that is torn.
    """
    if Path(out).exists() or Path(out).is_symlink():
        raise ConfigError.of("--out", str(out), "exists: it is not written over, name a new directory")
    drafter = load_drafter(directory)
    if form == "hf":
        files = ExportFiles({WEIGHTS: cast_tensors(drafter.weights, dtype)}, {CONFIG: about_of(drafter, dtype)})
    else:
        files = KINDS[drafter.config.kind].engine_files(drafter.config, drafter.weights, form, dtype)
    return replace(files, card=model_card(drafter, form, dtype))
