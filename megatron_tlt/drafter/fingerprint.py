"""Which policy a drafter was made for, as two short hashes: of its embedding and of its tokenizer.

A drafter reads the policy's embedding and its hidden states and drafts the tokenizer's tokens. Policies of one
architecture have the same shapes, so a drafter of one can be loaded for another, where it drafts nonsense. RL changes
the embedding: the fingerprint is of the weights that a drafter was trained with, or exported with, and is compared
with `model.path`, from which a run starts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.errors import CheckpointError, ConfigProblem
from megatron_tlt.models.config import EMBED
from megatron_tlt.models.loader import open_tensors, weight_files

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64  # of the embedding that are hashed, evenly spaced: a few hundred KiB of a large model
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
)  # the first one that is there is hashed

_log = logging.getLogger(__name__)


def policy_fingerprint(model: str | Path, tokenizer: str | Path | None = None) -> dict[str, str]:
    """{"embedding": hash, "tokenizer": hash} of a Hugging Face directory; without what is not there.

    `tokenizer` is a directory, by default the model's own. Rows are hashed as bfloat16, so that a model's fp32 and bf16
    files have one fingerprint.
    """
    out = {}
    rows = _embedding_rows(Path(model))
    if rows is not None:
        out["embedding"] = _hash(rows.view(torch.uint8).numpy().tobytes())
    for name in _TOKENIZER_FILES:
        file = Path(tokenizer or model) / name
        if file.is_file():
            out["tokenizer"] = _hash(file.read_bytes())
            break
    return out


def _embedding_rows(model: Path) -> Tensor | None:
    """[rows, H] bfloat16; None where the directory has no weights (a run may start from `model.megatron_path`)."""
    try:
        with open_tensors(weight_files(model)[EMBED]) as tensors:
            embedding = tensors.get_slice(EMBED)
            size = embedding.get_shape()[0]
            places = [i * size // min(_ROWS, size) for i in range(min(_ROWS, size))]
            rows = [embedding[place : place + 1] for place in places]
    except (CheckpointError, KeyError):
        return None
    return torch.cat(rows).to(torch.bfloat16)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def other_policy_problem(
    field: str,
    drafter: str | Path,
    made_for: Mapping[str, str],
    model: str | Path,
    tokenizer: str | Path | None = None,
) -> ConfigProblem | None:
    """The problem to report at `field` if `drafter` was made for another policy than `model`; None if it was not.

    `made_for` is the fingerprint in the drafter's config.json. A drafter without one is accepted with a warning.
    """
    if not made_for:
        _log.warning("%s has no fingerprint of the policy it was made for: not checked", drafter)
        return None
    here = policy_fingerprint(model, tokenizer)
    other = [name for name, value in made_for.items() if here.get(name, value) != value]
    if not other:
        return None
    what = f"was made for a policy with another {' and another '.join(other)} than {model}"
    own = Path(model) / "drafter"  # where `export` writes it
    if own.is_dir() and own != Path(drafter):
        what += f" ({own} is that policy's)"
    return ConfigProblem(
        field, str(drafter), f"{what}; rollout.speculation.allow_other_policy=true accepts it"
    )
