"""JSON objects of files: descriptions of models, tokenizers, drafters and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_tlt.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def read_object_if_there(file: Path) -> dict[str, Any]:
    """The object in a file; empty without the file. Raises CheckpointError."""
    return read_object(file) if file.is_file() else {}
