"""A drafter on disk: `drafter.safetensors` with exactly `eagle_parameter_shapes`, and `config.json`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.model import check_eagle_shapes, check_eagle_tensors

WEIGHTS, CONFIG = "drafter.safetensors", "config.json"
KIND = "eagle"


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    """Full tensors under the names of `eagle_parameter_shapes`, on the CPU, and where they come from."""

    weights: dict[str, Tensor]
    policy_version: int  # of the policy whose hidden states it was last trained on
    trained_steps: int


def save_drafter(
    directory: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    policy_version: int = 0,
    trained_steps: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the drafter of a policy with shape `config`.

    An older one in `directory` is replaced once the new one is on disk; config.json is taken away first and comes
    last, so that a crash leaves a directory that is refused, never a mixture. Raises CheckpointError for wrong tensors.
    """
    check_eagle_tensors(weights, config)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        stored = {n: t.detach().to("cpu", dtype).contiguous().clone() for n, t in weights.items()}
        save_file(stored, str(scratch / WEIGHTS), metadata={"format": "pt"})
        shape = config.to_hf(str(dtype).removeprefix("torch."))
        about = {"drafter": KIND, "policy_version": policy_version, "trained_steps": trained_steps}
        (scratch / CONFIG).write_text(json.dumps({**about, **shape}, indent=2) + "\n", encoding="utf-8")
        mode = (scratch / CONFIG).stat().st_mode  # the umask's; safetensors makes its files private
        for file in scratch.iterdir():
            file.chmod(mode)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        (target / CONFIG).unlink(missing_ok=True)
        for name in (WEIGHTS, CONFIG):
            os.replace(scratch / name, target / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_drafter(directory: str | Path, config: ModelConfig) -> SavedDrafter:
    """Reads a drafter for a policy of shape `config`.

    Raises CheckpointError for a directory that is none, and one that names every tensor that does not fit.
    """
    root = Path(directory)
    about = check_drafter(root, config)
    try:
        weights = load_file(str(root / WEIGHTS))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{root / WEIGHTS} cannot be read: {e}") from e
    return SavedDrafter(weights, int(about.get("policy_version", 0)), int(about.get("trained_steps", 0)))


def check_drafter(directory: str | Path, config: ModelConfig) -> dict[str, Any]:
    """Whether `load_drafter` could load it, from config.json (returned) and the weights' header alone.

    Raises CheckpointError as `load_drafter` does.
    """
    root = Path(directory)
    about = _read_about(root / CONFIG)
    if (kind := about.get("drafter")) != KIND:
        found = "no drafter" if kind is None else f"a drafter of kind {kind!r}"
        raise CheckpointError(
            f"{root / CONFIG} describes {found}; rollouts draft with kind {KIND!r} only (eagle3 is for export)"
        )
    try:
        with safe_open(str(root / WEIGHTS), "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{root / WEIGHTS} cannot be read: {e}") from e
    try:
        check_eagle_shapes(shapes, config)
    except CheckpointError as e:
        raise CheckpointError(f"{root}: {e}") from e
    return about


def _read_about(file: Path) -> dict[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{file} cannot be read: {e} (megatron-tlt drafter makes such a directory)"
        ) from e
    return about if isinstance(about, dict) else {}
