"""The contents of a checkpoint of either kind; differences of two, tensor by tensor under Hugging Face names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.actor.checkpoint_files import Manifest, model_differences, model_record
from megatron_tlt.actor.hf_names import Slot, slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader, not_megatron
from megatron_tlt.checkpoint.atomic import gib
from megatron_tlt.checkpoint.convert.hf_dir import HfDir, dtype_name
from megatron_tlt.checkpoint.convert.to_hf import config_beside, config_file
from megatron_tlt.errors import CheckpointError, ConfigError, no_such_file, shortened
from megatron_tlt.models.hf.config import ARCHITECTURES, ModelConfig, RopeScaling
from megatron_tlt.models.hf.files import INDEX, SINGLE, config_warnings, model_warnings

_BLOCK = 1 << 22  # numbers compared at once: bounds the fp64 copies


@dataclass(frozen=True)
class Opened:
    """A checkpoint, and its facts that need no tensor to be read."""

    kind: str
    directory: Path
    config: ModelConfig
    dtypes: list[str]
    read_slot: Callable[[Slot], list[Tensor]] = field(repr=False)
    facts: dict[str, str]
    warnings: list[str]  # of what was left out, or not compared
    manifest: Manifest | None = None

    @property
    def has_weights(self) -> bool:
        """Whether it holds the model's weights; else adapters alone, and `read_slot` reads nothing."""
        return not _has_adapters(self.manifest)

    @property
    def record(self) -> dict[str, Any]:
        """Shape and constants of the model."""
        return model_record(self.config) if self.manifest is None else self.manifest.model


def open_checkpoint(path: str | Path, config: str | Path | None = None) -> Opened:
    """Recognises a checkpoint. `config` describes a Megatron checkpoint that has neither manifest nor config.json.

    Raises CheckpointError, ConfigError.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"checkpoint {root}: {no_such_file(root)}")
    if (root / SINGLE).is_file() or (root / INDEX).is_file():
        return _open_hf(root)
    if problem := not_megatron(root):
        raise CheckpointError(f"{problem}; nor is it a Hugging Face directory, with {SINGLE} or {INDEX}")
    source = TorchDistReader(root)
    manifest = source.manifest()
    model, warnings = _described(root, source, manifest, config)
    if not _has_adapters(manifest):
        source.check(model)
    version = source.backend["sharded_backend_version"]
    facts = {"format": f"{source.backend['sharded_backend']} version {version}", **_manifest_facts(manifest)}
    if text := source.padding(model):
        facts["padding"] = text
    facts["beside the weights"] = gib(source.other_bytes())
    kind = "Megatron checkpoint"
    if manifest is not None:
        kind = "converted Megatron checkpoint" if manifest.is_converted else "checkpoint of a run"
    dtypes = sorted(dtype_name(dtype) for dtype in source.dtypes())
    warnings += source.warnings()
    return Opened(kind, source.directory, model, dtypes, partial(source.read, model), facts, warnings, manifest)


def _described(
    root: Path, source: TorchDistReader, manifest: Manifest | None, config: str | Path | None
) -> tuple[ModelConfig, list[str]]:
    """The model of a Megatron checkpoint, and the warnings of the config.json that describes it, if one does."""
    if config is None and manifest is not None:
        return config_of(manifest), []
    file = config_beside(root, source.directory) if config is None else config_file(config)
    return ModelConfig.from_hf(file), config_warnings(file)


def _has_adapters(manifest: Manifest | None) -> bool:
    return manifest is not None and manifest.training["lora"] != "off"


def _manifest_facts(manifest: Manifest | None) -> dict[str, str]:
    if manifest is None:
        return {}
    facts = {"layout": " x ".join(f"{n} {manifest.layout.get(n)}" for n in ("tp", "pp", "cp", "dp"))}
    if (ep := manifest.layout.get("ep", 1)) > 1:
        facts["layout"] += f", experts over {ep}"
    if manifest.is_converted:
        return {**facts, "converted from": manifest.extra["converted_from"]}
    facts["step"] = f"{manifest.step} (policy version {manifest.policy_version})"
    optimizer, distributed = (manifest.training.get(n) for n in ("optimizer", "distributed_optimizer"))
    facts["optimizer"] = f"{optimizer} after {manifest.optimizer_steps} steps, distributed: {distributed}"
    if _has_adapters(manifest):
        facts["adapters"] = f"{manifest.training['lora']}, and no weights: megatron-tlt export merges them"
        facts["fingerprint of base"] = manifest.training["base"] or "none"
    return facts


def _open_hf(root: Path) -> Opened:
    source = HfDir(root)
    facts = {"architecture": ", ".join(source.hf_config.get("architectures") or [])}
    if version := source.hf_config.get("transformers_version"):
        facts["written by"] = f"transformers {version}"
    if source.ignored:
        facts["carry nothing"] = ", ".join(source.ignored)
    dtypes = sorted({dtype_name(dtype) for dtype in source.dtypes.values()})
    warnings = model_warnings(root)
    return Opened("Hugging Face directory", root, source.config, dtypes, source.read_slot, facts, warnings)


def config_of(manifest: Manifest) -> ModelConfig:
    """Enough of the model to name its tensors. Raises ConfigError."""
    record: dict[str, Any] = dict(manifest.model)
    family = record.get("family")
    if family not in ARCHITECTURES.values():
        raise ConfigError.of("family", family, f"must be one of {', '.join(ARCHITECTURES.values())}")
    if record.get("rope_scaling") is not None:
        record["rope_scaling"] = RopeScaling(**record["rope_scaling"])
    record["moe_layers"] = tuple(record.get("moe_layers", ()))
    bias, norm = ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe")
    return ModelConfig(**record, qkv_bias=family in bias, qk_norm=family in norm)


def weights_digest(opened: Opened) -> str:
    """SHA-256 over (name, type, shape, bytes) of every tensor in the model's order: equal for equal weights in any
    layout. Raises CheckpointError.
    """
    total = hashlib.sha256()
    for slot in slots(opened.config, 1):
        for name, tensor in zip(slot.hf_names, opened.read_slot(slot), strict=True):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(_bits(tensor).numpy().data)
    return total.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: equal for equal NaNs, different for 0 and -0."""
    return tensor.contiguous().view(torch.uint8)


@dataclass
class Difference:
    """Two checkpoints of one model, compared tensor by tensor."""

    identical: int = 0
    retyped: int = 0  # the same numbers in another type
    differing: list[tuple[str, float]] = field(default_factory=list)  # name, largest |a - b|

    @property
    def total(self) -> int:
        """Tensors compared."""
        return self.identical + self.retyped + len(self.differing)


def check_same_model(a: Opened, b: Opened) -> None:
    """Raises CheckpointError if two checkpoints are of different models, or one holds no weights. Reads no tensor."""
    for opened in (a, b):
        if not opened.has_weights:
            hint = "compare what megatron-tlt export writes, which merges them"
            raise CheckpointError(f"{opened.directory} holds adapters and no weights: {hint}")
    if wrong := model_differences(a.record, b.record):
        text = shortened(wrong, separator="; ")
        raise CheckpointError(f"{a.directory} and {b.directory} are of different models: {text}")


def compare_weights(a: Opened, b: Opened) -> Difference:
    """Bit for bit. Raises CheckpointError if they are of different models."""
    check_same_model(a, b)
    found = Difference()
    for slot in slots(a.config, 1):
        for name, x, y in zip(slot.hf_names, a.read_slot(slot), b.read_slot(slot), strict=True):
            if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
                found.identical += 1
                continue
            distance = _distance(x, y)
            if x.dtype != y.dtype and distance == 0:
                found.retyped += 1
            else:
                found.differing.append((name, distance))
    return found


def _distance(x: Tensor, y: Tensor) -> float:
    """max |x - y| in fp64, a block at a time; infinite where only one of them is a number."""
    blocks = zip(x.flatten().split(_BLOCK), y.flatten().split(_BLOCK), strict=True)
    return max(float((a.double() - b.double()).abs().nan_to_num(nan=math.inf).max()) for a, b in blocks)
