"""Records of a Hugging Face dataset saved to disk (`datasets` is slow to import, hence a file of its own)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from megatron_tlt.errors import DataError


def read_directory(path: Path) -> Any:
    """The one split in a directory that `Dataset.save_to_disk` wrote. Raises DataError."""
    if not path.is_dir():
        raise DataError(f"{path}: no such directory; kind: hf reads what Dataset.save_to_disk wrote")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a directory written by Dataset.save_to_disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in loaded)
        raise DataError(f"{path}: holds several splits; name one of: {splits}")
    return loaded
