"""A Hugging Face directory as the source of a conversion: checked whole before the first tensor is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.actor.hf_names import Slot
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.loader import check_weights, open_tensors

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_ROWS = 4096  # compared at once
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HfDir:
    """Names, types and slices of the tensors of one model.

    Raises CheckpointError or ConfigError at once: unknown architecture, missing shard, tensors that config.json
    contradicts, integer (quantised) tensors, a tied model whose stored LM head is not the embedding.
    """

    def __init__(self, path: str | Path):
        self.directory = Path(path)
        self.config = ModelConfig.from_hf(self.directory)
        self.hf_config = read_hf_config(self.directory)
        self.files = check_weights(self.directory, self.config)
        self._check_unlisted()
        self.dtypes = {name: self._dtype(name) for name in self.config.parameter_shapes()}
        self.ignored = [name for name in self.files if name not in self.dtypes]
        if _HEAD in self.ignored:
            self._check_tied()

    def _check_unlisted(self) -> None:
        """A tensor that lies in a shard but not in the index would be lost without a word."""
        for file in sorted(set(self.files.values())):
            with open_tensors(file) as opened:
                unlisted = [n for n in opened.keys() if self.files.get(n) != file]  # noqa: SIM118  (no mapping)
            if unlisted:
                raise CheckpointError(f"{file} holds tensors that the index does not give it: {unlisted[:8]}")

    def _dtype(self, name: str) -> torch.dtype:
        with open_tensors(self.files[name]) as file:
            stored = str(file.get_slice(name).get_dtype())
        if stored not in _STORED:
            raise CheckpointError(
                f"{self.files[name]}: {name} is stored as {stored}; only {', '.join(_STORED)} can be converted"
            )
        return _STORED[stored]

    def _check_tied(self) -> None:
        """The copy of the embedding that some exporters store beside it must be one, or the config is wrong."""
        with open_tensors(self.files[_HEAD]) as file:
            shape = tuple(file.get_slice(_HEAD).get_shape())
        rows = self.config.vocab_size
        same = shape == (rows, self.config.hidden_size) and all(
            torch.equal(self.part(_HEAD, 0, a, b), self.part(_EMBEDDING, 0, a, b)) for a, b in _blocks(rows)
        )
        if not same:
            raise CheckpointError(
                f"{self.directory}: config.json says tie_word_embeddings, but the stored {_HEAD} is not the embedding"
            )

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a tensor, read from disk and nothing else."""
        with open_tensors(self.files[name]) as file:
            stored = file.get_slice(name)
            return stored[start:stop] if dim == 0 else stored[:, start:stop]  # type: ignore[no-any-return]

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        with open_tensors(self.files[name]) as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def read_slot(self, slot: Slot) -> list[Tensor]:
        """A slot's tensors, in its order."""
        return [self.read(name) for name in slot.hf_names]


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json as it stands, of a directory or a file. Raises CheckpointError."""
    file = Path(path)
    file = file if file.suffix == ".json" else file / "config.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read the model's configuration {file}: {error}") from error


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, _ROWS):
        yield start, min(rows, start + _ROWS)
