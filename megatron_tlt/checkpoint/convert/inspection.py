"""What a checkpoint is, of either kind, and how two of them differ, tensor by tensor under Hugging Face names."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_tlt.actor.checkpoint_files import (
    MANIFEST,
    FileRecord,
    Manifest,
    model_record,
    read_manifest,
    record_of,
)
from megatron_tlt.actor.hf_names import Slot, slots
from megatron_tlt.actor.megatron_dir import MegatronDir, why_no_megatron
from megatron_tlt.checkpoint.convert.hf_dir import HfDir
from megatron_tlt.checkpoint.convert.output import gib
from megatron_tlt.checkpoint.convert.to_megatron import dtype_name
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ARCHITECTURES, ModelConfig
from megatron_tlt.models.hf_files import INDEX, SINGLE

_BLOCK = 1 << 22  # numbers compared at once


class Weights(Protocol):
    """Tensors of one checkpoint, one parameter at a time."""

    @property
    def directory(self) -> Path:
        """Where it is."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    def read_slot(self, slot: Slot) -> list[Tensor]:
        """A slot's full Hugging Face tensors, in its order."""


@dataclass(frozen=True)
class MegatronWeights:
    """A Megatron checkpoint under Hugging Face names."""

    source: MegatronDir
    config: ModelConfig

    @property
    def directory(self) -> Path:
        """Where its shards are."""
        return self.source.directory

    def read_slot(self, slot: Slot) -> list[Tensor]:
        """A slot's full Hugging Face tensors, in its order."""
        return self.source.read(self.config, slot)


@dataclass(frozen=True)
class Opened:
    """A checkpoint and what is known of it without reading tensors."""

    kind: str
    weights: Weights
    dtypes: list[str]
    manifest: Manifest | None
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step of a run that it was saved after."""
        return None if self.manifest is None or _converted(self.manifest) else self.manifest.step


def open_checkpoint(path: str | Path, config: str | Path | None = None) -> Opened:
    """Recognises a checkpoint. `config` describes a Megatron checkpoint that has neither manifest nor config.json.

    Raises CheckpointError, ConfigError.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"checkpoint {root} does not exist, or is no directory")
    if (root / SINGLE).is_file() or (root / INDEX).is_file():
        return _open_hf(root)
    if reason := why_no_megatron(root):
        raise CheckpointError(f"{reason}; nor is it a Hugging Face directory, with {SINGLE} or {INDEX}")
    source = MegatronDir(root)
    manifest = None
    if (source.directory / MANIFEST).is_file():
        manifest = read_manifest(source.directory)
    model = _config_of(root, source, manifest, config)
    source.check(model)
    kind = "Megatron checkpoint"
    facts = {
        "format": f"{source.backend['sharded_backend']} version {source.backend['sharded_backend_version']}"
    }
    if manifest is not None:
        facts["layout"] = " x ".join(
            f"{name} {manifest.layout.get(name)}" for name in ("tp", "pp", "cp", "dp")
        )
        if _converted(manifest):
            kind, facts["converted from"] = "converted Megatron checkpoint", manifest.extra["converted_from"]
        else:
            kind = "checkpoint of a run"
            facts["step"] = f"{manifest.step} (policy version {manifest.policy_version})"
            facts["optimizer"] = (
                f"{manifest.training.get('optimizer')} after {manifest.optimizer_steps} steps, "
                f"distributed: {manifest.training.get('distributed_optimizer')}"
            )
    facts["beside the weights"] = gib(source.other_bytes())
    dtypes = sorted(dtype_name(dtype) for dtype in source.dtypes())
    return Opened(kind, MegatronWeights(source, model), dtypes, manifest, facts)


def _converted(manifest: Manifest) -> bool:
    return "converted_from" in manifest.extra


def _open_hf(root: Path) -> Opened:
    source = HfDir(root)
    facts = {"architecture": ", ".join(source.hf_config.get("architectures") or [])}
    if version := source.hf_config.get("transformers_version"):
        facts["written by"] = f"transformers {version}"
    if source.ignored:
        facts["carry nothing"] = ", ".join(source.ignored)
    counted = Counter(dtype_name(dtype) for dtype in source.dtypes.values())
    return Opened("Hugging Face directory", source, sorted(counted), None, facts)


def _config_of(
    root: Path, source: MegatronDir, manifest: Manifest | None, config: str | Path | None
) -> ModelConfig:
    if config is not None:
        return ModelConfig.from_hf(config)
    if manifest is not None:
        return config_of_manifest(manifest)
    for directory in (root, source.directory, source.directory.parent):
        if (directory / "config.json").is_file():
            return ModelConfig.from_hf(directory)
    raise CheckpointError(
        f"no config.json beside {source.directory}: name the model's Hugging Face directory with --config"
    )


def config_of_manifest(manifest: Manifest) -> ModelConfig:
    """Enough of the model to name its tensors (not to run it: no rope, no epsilon). Raises CheckpointError."""
    record: dict[str, Any] = dict(manifest.model)
    family = record.get("family")
    if family not in ARCHITECTURES.values():
        raise ConfigError.of("family", family, f"must be one of {', '.join(ARCHITECTURES.values())}")
    try:
        return ModelConfig(**record, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    except TypeError as error:
        raise CheckpointError(f"the manifest's model is not understood: {error}") from error


# ---- one checkpoint


def describe(opened: Opened) -> str:
    """Kind, model, type, layout, versions and sizes, as text. Reads no tensor."""
    config, directory = opened.weights.config, opened.weights.directory
    sizes = [path.stat().st_size for path in directory.iterdir() if path.is_file()]
    lines = [
        ("model", f"{config.family}, {config.num_layers} layers, hidden {config.hidden_size}"),
        ("", f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.head_dim}"),
        ("", f"vocabulary {config.vocab_size}{', tied embeddings' if config.tie_word_embeddings else ''}"),
        ("parameters", f"{config.num_parameters:,} in {len(config.parameter_shapes())} tensors"),
        ("type", ", ".join(opened.dtypes)),
        *opened.facts.items(),
        ("on disk", f"{gib(sum(sizes))} in {len(sizes)} files"),
    ]
    return "\n".join([f"{opened.kind}: {directory}", *(f"{name:<20}{text}" for name, text in lines)])


@dataclass(frozen=True)
class Checksums:
    """A digest of the weights, every file's sum, and what does not agree with the manifest."""

    weights: str
    files: dict[str, FileRecord]
    damage: list[str]

    def report(self) -> str:
        """As text."""
        lines = [f"{'weights':<20}sha256 {self.weights}"]
        for name, record in self.files.items():
            lines.append(f"{'file':<20}{name}  {gib(record.size)}  sha256 {record.sha256[:16]}")
        return "\n".join(lines)


def checksums(opened: Opened) -> Checksums:
    """Reads everything once for the files' sums and once for the weights' digest. Raises CheckpointError."""
    directory = opened.weights.directory
    found = {path.name: record_of(path) for path in sorted(directory.iterdir()) if path.is_file()}
    recorded = {} if opened.manifest is None else opened.manifest.files
    damage = [f"{name} is missing" for name in recorded if name not in found]
    damage += [
        f"{name} is not as the manifest recorded it"
        for name, record in recorded.items()
        if name in found and found[name] != record
    ]
    return Checksums(weights_digest(opened.weights), found, damage)


def weights_digest(weights: Weights) -> str:
    """SHA-256 over (name, type, shape, bytes) in the model's order: the same for the same weights in any layout."""
    total = hashlib.sha256()
    for name, tensor in named(weights):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(as_bytes(tensor).numpy().data)
    return total.hexdigest()


def named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every (Hugging Face name, tensor), one parameter in memory at a time."""
    for slot in slots(weights.config, 1):
        yield from zip(slot.hf_names, weights.read_slot(slot), strict=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bits: equal for equal NaNs, different for 0 and -0."""
    return tensor.contiguous().view(torch.uint8)


# ---- two checkpoints


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

    @property
    def same_bits(self) -> bool:
        """Whether every tensor has the same type and bits."""
        return self.identical == self.total


def check_same_model(a: Weights, b: Weights) -> None:
    """Raises CheckpointError if two checkpoints are of different models. Reads no tensor."""
    ours, theirs = model_record(a.config), model_record(b.config)
    wrong = [f"{name} is {ours[name]!r} and {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]
    if wrong:
        raise CheckpointError(f"{a.directory} and {b.directory} are of different models: {'; '.join(wrong)}")


def compare(a: Weights, b: Weights) -> Difference:
    """Bit for bit. Raises CheckpointError if they are of different models."""
    check_same_model(a, b)
    found = Difference()
    for slot in slots(a.config, 1):
        for name, x, y in zip(slot.hf_names, a.read_slot(slot), b.read_slot(slot), strict=True):
            if x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y)):
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
    worst = 0.0
    for a, b in zip(x.flatten().split(_BLOCK), y.flatten().split(_BLOCK), strict=True):
        gap = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
        worst = max(worst, float(gap.max()))
    return worst


def saved_again(a: Opened, b: Opened, difference: Difference) -> bool:
    """Whether two different steps hold the same weights: training that did not happen, or a save of the wrong copy."""
    steps = a.step, b.step
    return None not in steps and steps[0] != steps[1] and difference.same_bits


def comparison_report(a: Opened, b: Opened, difference: Difference, shown: int = 10) -> str:
    """The difference as text, largest first."""
    counts = (
        f"{difference.identical} identical bit for bit, {difference.retyped} the same numbers in another type, "
        f"{len(difference.differing)} different"
    )
    lines = [
        f"compared with {b.weights.directory} ({b.kind}): {difference.total} tensors",
        f"    {counts}",
    ]
    largest = sorted(difference.differing, key=lambda pair: -pair[1])
    lines += [f"    {name}: largest difference {value:.3g}" for name, value in largest[:shown]]
    if len(largest) > shown:
        lines.append(f"    and {len(largest) - shown} more")
    if saved_again(a, b, difference):
        lines.append(
            f"WARNING: steps {a.step} and {b.step} hold the same weights: the same weights were saved again"
        )
    return "\n".join(lines)
