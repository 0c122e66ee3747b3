"""Which policy a drafter was made for, as a short hash of its embedding.

A drafter reads the policy's embedding and its hidden states. Policies of one architecture have the same shapes, so a
drafter of one can be loaded for another, where it drafts nonsense. RL changes the embedding: the fingerprint is of the
weights that a drafter was trained with, or exported with, and is compared with `model.path`, from which a run starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.errors import CheckpointError, ConfigProblem
from megatron_tlt.models.hf.config import EMBED
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import open_tensors

_ROWS = 64  # of a tensor that are hashed: a few hundred KiB of a large model


def policy_fingerprint(model: str | Path) -> str:
    """A hash of rows of a Hugging Face directory's embedding; empty where it has no weights (a run may start from
    `model.megatron_path`).
    """
    try:
        with open_tensors(weight_files(Path(model))[EMBED]) as tensors:
            return digest_of([stored_rows(tensors, EMBED)])
    except (CheckpointError, KeyError):
        return ""


def spaced(size: int) -> list[int]:
    """At most `_ROWS` places among `size`, evenly spaced."""
    count = min(_ROWS, size)
    return [i * size // count for i in range(count)]


def stored_rows(tensors: Any, name: str) -> Tensor:
    """Rows of a tensor in an open safetensors file, of which no others are read."""
    stored = tensors.get_slice(name)
    return torch.cat([stored[place : place + 1] for place in spaced(stored.get_shape()[0])])


def digest_of(parts: Iterable[Tensor]) -> str:
    """16 hexadecimal digits. Hashed as bfloat16, so that a model's fp32 and bf16 files have one fingerprint."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def other_policy_problem(field: str, drafter: str | Path, made_for: str, model: str | Path) -> ConfigProblem | None:
    """The problem to report at `field` if `drafter` was made for another policy than `model`; None if it was not.

    `made_for` is the fingerprint in the drafter's config.json; a drafter without one is accepted.
    """
    if not made_for or policy_fingerprint(model) in ("", made_for):
        return None
    what = f"was made for a policy with another embedding than {model}"
    own = Path(model) / "drafter"  # where `export` writes it
    if own.is_dir() and own != Path(drafter):
        what += f" ({own} is that policy's)"
    return ConfigProblem(field, str(drafter), f"{what}; rollout.speculation.allow_other_policy=true accepts it")
