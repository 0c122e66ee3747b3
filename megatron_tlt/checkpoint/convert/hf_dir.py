"""A Hugging Face directory as the source of a conversion, checked before the first tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_tlt.actor.hf_names import Slot
from megatron_tlt.config.json_reader import read_object
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import check_weights, model_problems, stored_shapes
from megatron_tlt.models.hf.loader import open_tensors, tensor_reader

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class HfDir:
    """Names, types and tensors of one model."""

    def __init__(self, path: str | Path):
        """Raises CheckpointError or ConfigError for a directory that cannot be read whole (see `model_problems`)."""
        self.directory = Path(path)
        self.config = ModelConfig.from_hf(self.directory)
        if problems := model_problems(self.directory, None):
            raise CheckpointError("; ".join(problems))
        self.hf_config = read_object(self.directory / "config.json")
        self.files = check_weights(self.directory, self.config)
        self._reader = tensor_reader(self.files, self.config)
        self.dtypes: dict[str, torch.dtype] = {}
        wanted = stored_shapes(self.config)
        for file in sorted(set(self.files.values())):
            with open_tensors(file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in wanted:
                        self.dtypes[name] = _STORED[str(opened.get_slice(name).get_dtype())]
        self.ignored = [name for name in self.files if name not in self.dtypes]

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._reader(name)

    def read_slot(self, slot: Slot) -> list[Tensor]:
        """A parameter's tensors, in the slot's order."""
        return [self.read(name) for name in slot.hf_names]


def choose_dtype(stored: Iterable[torch.dtype], asked: str | None) -> torch.dtype:
    """The output's type: `asked` (fp32, bf16), else the stored one. Raises ConfigError if that is mixed or another."""
    if asked is not None:
        return DTYPES[asked]
    types = set(stored)
    if len(types) == 1 and types <= set(DTYPES.values()):
        return types.pop()
    found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
    raise ConfigError.of("--dtype", None, f"must be given, fp32 or bf16: the weights are stored as {found}")


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16; torch's own name for others."""
    return next((name for name, d in DTYPES.items() if d is dtype), str(dtype).removeprefix("torch."))
