"""A run's adapters (`actor.lora`) from its checkpoint, alone or merged into the base that the run started from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.actor.checkpoint_files import Manifest, model_differences, model_record
from megatron_tlt.actor.hf_names import Slot, adapter_slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.data.hub import hub_name
from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import weight_reader
from megatron_tlt.models.hf.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, stored_factors
from megatron_tlt.models.hf.writer import write_tensors


class AdaptedReader:
    """Reads what `TorchDistReader` does: the base's parameters W as W + s B A, in the type of the adapters."""

    def __init__(self, checkpoint: TorchDistReader, model: ModelSection, lora: LoraSection):
        """The run's checkpoint and configuration; the base is `model.path`, or `model.megatron_path`."""
        self.checkpoint, self.model, self.lora = checkpoint, model, lora
        self.directory = checkpoint.directory
        self._factors: dict[str, tuple[Slot, tuple[int, ...]]] = {}
        self._base: Callable[[Slot], list[Tensor]] | None = None

    def manifest(self) -> Manifest | None:
        """The checkpoint's."""
        return self.checkpoint.manifest()

    def dtypes(self) -> set[torch.dtype]:
        """The adapters'."""
        return self.checkpoint.dtypes()

    def check(self, config: ModelConfig) -> None:
        """Compares the checkpoint with model and adapters of the configuration. Raises CheckpointError."""
        manifest = self.manifest()
        found = {} if manifest is None else {**manifest.model, **manifest.training}
        own = {"lora": self.lora.record, "base": base_fingerprint(self.model, config)}
        wrong = model_differences(found, model_record(config) | own)
        if wrong:
            raise CheckpointError(f"{self.directory} does not fit this run: {shortened(wrong, separator='; ')}")
        if self.model.megatron_path is not None:
            base = TorchDistReader(self.model.megatron_path)
            base.check(config)
            self._base = partial(base.read, config)
        else:
            read = weight_reader(self.model.path, config)
            self._base = lambda slot: [read(name) for name in slot.hf_names]
        slots = adapter_slots(config, self.lora, 1)
        self._factors = {slot.hf_names[0]: (slot, shape) for slot, shape in slots.items()}

    def read(self, config: ModelConfig, slot: Slot) -> list[Tensor]:
        """The slot's full Hugging Face tensors, merged, in its order; `check` comes before. Raises CheckpointError."""
        assert self._base is not None
        return [self._merged(name, tensor) for name, tensor in zip(slot.hf_names, self._base(slot), strict=True)]

    def _merged(self, name: str, base: Tensor) -> Tensor:
        stem, rows = name.removesuffix(".weight"), base.shape[-2] if base.ndim > 1 else 0
        parts = [(stem, slice(0, rows))]
        if stem.endswith(".gate_up_proj"):
            parts = [(stem.replace("gate_up_proj", "gate_proj"), slice(0, rows // 2))]
            parts += [(stem.replace("gate_up_proj", "up_proj"), slice(rows // 2, rows))]
        (dtype,) = self.dtypes()
        merged = base.to(dtype, copy=True)
        for matrix, at in parts:
            if f"{matrix}.lora_A.weight" in self._factors:
                A, B = (self.factor(f"{matrix}.lora_{which}.weight") for which in "AB")
                merged[..., at, :].add_(B @ A, alpha=self.lora.scale)
        return merged

    def factor(self, name: str) -> Tensor:
        """A factor by name, whole (of experts a stack)."""
        return self.checkpoint.read_factor(*self._factors[name])

    @property
    def num_factor_bytes(self) -> int:
        """Bytes of all factors in fp32."""
        return sum(4 * torch.Size(shape).numel() for _, shape in self._factors.values())

    def write_peft(self, out: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        """Writes the factors as a PEFT directory into `out`, which exists; `check` comes before. Raises OSError.

        It names no base where that is `model.megatron_path`, which PEFT cannot load.
        """
        tensors: dict[str, Tensor] = {}
        for name in self._factors:
            whole, stored = self.factor(name).to(dtype), stored_factors(config, name)
            parts = whole if len(stored) > 1 else (whole.reshape(whole.shape[-2:]),)
            tensors |= {key: part.contiguous() for key, part in zip(stored, parts, strict=True)}
        write_tensors(out / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
        base, revision = None, None
        if self.model.megatron_path is None:
            # For other machines, and for other working directories, where PEFT reads what is not there as a name.
            base, revision = hub_name(self.model.path) or (os.path.abspath(self.model.path), None)
        described = adapter_config(self.lora, config, self._factors, base, revision)
        (out / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
