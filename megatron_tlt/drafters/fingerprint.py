"""Which policy a drafter was made for, as a short hash of its embedding.

A drafter reads the policy's embedding and its hidden states. Policies of one architecture have the same shapes, so a
drafter of one can be loaded for another, where it drafts nonsense. RL changes the embedding: the fingerprint is of the
weights that a drafter was trained with, or exported with, and is compared with `model.path`, from which a run starts.
A checkpoint of adapters has that of their base.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.errors import CheckpointError, ConfigProblem
from megatron_tlt.models.hf.config import EMBED
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import open_tensors

if TYPE_CHECKING:
    from megatron_tlt.config.model import ModelSection

_ROWS = 64  # of the embedding that are hashed, evenly spaced: a few hundred KiB of a large model


def policy_fingerprint(model: str | Path) -> str:
    """A hash of rows of a Hugging Face directory's embedding; empty where it has no weights (a run may start from
    `model.megatron_path`). Rows are hashed as bfloat16, so that a model's fp32 and bf16 files have one fingerprint.
    """
    try:
        with open_tensors(weight_files(Path(model))[EMBED]) as tensors:
            embedding = tensors.get_slice(EMBED)
            size = embedding.get_shape()[0]
            places = [i * size // min(_ROWS, size) for i in range(min(_ROWS, size))]
            rows = torch.cat([embedding[place : place + 1] for place in places])
    except (CheckpointError, KeyError):
        return ""
    return hashlib.sha256(rows.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def base_fingerprint(model: ModelSection) -> str:
    """`policy_fingerprint` of the base under adapters, which their checkpoints do not hold; empty with
    `model.megatron_path`.
    """
    return policy_fingerprint(model.path) if model.megatron_path is None else ""


def other_policy_problem(
    field: str, drafter: str | Path, made_for: str, model: str | Path
) -> ConfigProblem | None:
    """The problem to report at `field` if `drafter` was made for another policy than `model`; None if it was not.

    `made_for` is the fingerprint in the drafter's config.json; a drafter without one is accepted.
    """
    if not made_for or policy_fingerprint(model) in ("", made_for):
        return None
    what = f"was made for a policy with another embedding than {model}"
    own = Path(model) / "drafter"  # where `export` writes it
    if own.is_dir() and own != Path(drafter):
        what += f" ({own} is that policy's)"
    return ConfigProblem(
        field, str(drafter), f"{what}; rollout.speculation.allow_other_policy=true accepts it"
    )
