"""The weight files of a Hugging Face model directory.

No torch here: `megatron-tlt check` looks for them without it.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_tlt.errors import CheckpointError, shortened

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def safetensors_problems(directory: str | Path) -> list[str]:
    """Weight files of a model directory that are missing, truncated or no safetensors, from headers and sizes alone."""
    try:
        found = shards(directory)
    except CheckpointError as error:
        return [str(error)]
    files = sorted(set(found.values())) if found is not None else [Path(directory) / SINGLE]
    return [problem for file in files if (problem := _problem_of(file))]


def _problem_of(file: Path) -> str | None:
    try:
        with safe_open(str(file), framework="np"):  # compares the header's offsets with the file's size
            return None
    except (SafetensorError, OSError) as error:
        return f"{file} is truncated, or no safetensors file: {error}"


def shards(directory: str | Path) -> dict[str, Path] | None:
    """Tensor name -> file, from the index; None if the directory has a single file instead.

    Opens no file of tensors. Raises CheckpointError naming the index, or the files, that are missing or unreadable.
    """
    root = Path(directory)
    if not (root / INDEX).exists():
        if (root / SINGLE).exists():
            return None
        raise CheckpointError(f"{root} has neither {SINGLE} nor {INDEX}")
    try:
        mapping = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({file for file in mapping.values() if not (root / file).exists()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{root / INDEX} cannot be read: {e!r}") from e
    if absent:
        raise CheckpointError(f"{root / INDEX} names files that are missing: {shortened(absent)}")
    return {name: root / file for name, file in mapping.items()}
