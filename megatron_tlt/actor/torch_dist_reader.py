"""Reads Megatron's distributed checkpoints (torch_dist) without megatron and without a process group.

    DIR/latest_checkpointed_iteration.txt    "release" or a number, as Megatron-LM writes it
        release/ or iter_0000123/            .metadata, metadata.json, common.pt, __0_0.distcp, __1_0.distcp, ...
    DIR/latest, step-000123/                 the same files in a run of Megatron-TLT

A parameter is stored either in one tensor for all layers, [layers, ...] under `decoder.layers.mlp...` (megatron-core's
default), or in one tensor a layer under `decoder.layers.7.mlp...`; both are read. A stored tensor is a grid of chunks,
which any reader assembles whatever layout wrote them.

This module is in actor/, not in checkpoint/, because a policy that starts from such a checkpoint
(`model.megatron_path`) checks it here before megatron-core loads it.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_tlt.actor.checkpoint_files import (
    LATEST,
    MANIFEST,
    Manifest,
    model_differences,
    model_record,
    read_manifest,
)
from megatron_tlt.actor.hf_names import Slot, slots, unshard
from megatron_tlt.actor.megatron_arguments import COMMON, argument_problems, read_arguments
from megatron_tlt.errors import CheckpointError, no_such_file, shortened
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import prefix_hint

TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "metadata.json"
METADATA = ".metadata"
_LAYER = re.compile(r"decoder\.layers\.\d+\.")

# Entries of a checkpoint beside the weights: optimizer state, random states, layers' extra state (FP8 scales).
_NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|.*\._extra_state")


@dataclass(frozen=True)
class Stored:
    """Where one parameter's rows are: the tensor's key, and the layer's place in it if all layers share it."""

    key: str
    layer: int | None


def locate(path: str | Path) -> Path:
    """The directory with the shards: `path` itself, or the one that its pointer file names. Raises CheckpointError."""
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"Megatron checkpoint {root}: {no_such_file(root)}")
    if problem := not_megatron(root):
        raise CheckpointError(problem)
    directory = _pointed_at(root)
    if (directory / METADATA).is_file():
        return directory
    if next(directory.glob("mp_rank_*"), None) is not None:
        raise CheckpointError(
            f"{directory} is in Megatron's old format (mp_rank_*): save it again with --ckpt-format torch_dist, "
            "the only one that is read here"
        )
    raise CheckpointError(f"{directory / METADATA} is missing")


def _pointed_at(root: Path) -> Path:
    for pointer in (TRACKER, LATEST):
        if (root / pointer).is_file() and not (root / METADATA).is_file():
            word = (root / pointer).read_text(encoding="utf-8").strip()
            return root / (f"iter_{int(word):07d}" if word.isdigit() else word)
    return root


def not_megatron(root: Path) -> str | None:
    """The message for a directory without any Megatron checkpoint, with a hint; None if there is one."""
    marks = (METADATA, TRACKER, LATEST)
    if any((root / mark).is_file() for mark in marks) or next(root.glob("mp_rank_*"), None):
        return None
    reason = f"{root} is no Megatron checkpoint: it has neither {METADATA} nor {TRACKER}"
    inner = root / "checkpoints"
    return f"{reason} (did you mean {inner}?)" if inner.is_dir() else reason


class TorchDistReader:
    """Keys, shapes, types and parameters of one torch_dist checkpoint."""

    def __init__(self, path: str | Path):
        """Raises CheckpointError if its metadata cannot be read or a file is missing or truncated."""
        self.directory = locate(path)
        self.backend = _read_backend(self.directory)
        self.metadata = read_metadata(self.directory / METADATA)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._check_files()
        self._reader = FileSystemReader(self.directory)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self.metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        problems = []
        for name, end in sorted(ends.items()):
            file = self.directory / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size < end:
                problems.append(f"{name} is torn: {file.stat().st_size} of {end} bytes")
        if problems:
            raise CheckpointError(f"Megatron checkpoint {self.directory}: {shortened(problems, separator='; ')}")

    def manifest(self) -> Manifest | None:
        """The manifest of a checkpoint that Megatron-TLT wrote. Raises CheckpointError if it is damaged."""
        return read_manifest(self.directory) if (self.directory / MANIFEST).is_file() else None

    @cached_property
    def arguments(self) -> dict[str, Any] | None:
        """Megatron-LM's arguments of a checkpoint without our manifest; None where they cannot be read."""
        return read_arguments(self.directory) if self.manifest() is None else None

    def warnings(self) -> list[str]:
        """What `check` cannot compare."""
        if self.manifest() is not None or self.arguments is not None:
            return []
        lacks = f"{self.directory / COMMON} has no arguments of Megatron-LM that can be read"
        return [f"{lacks}: rotary embedding, epsilon and kind of norms were not compared with config.json"]

    def padding(self, config: ModelConfig) -> str | None:
        """How many rows of the stored vocabulary are left out, in words, where some are. After `check`."""
        stored = self.find(slots(config, 1)[0])
        rows = config.vocab_size if stored is None else self.tensors[stored.key].size[0]
        left = rows - config.vocab_size
        return f"{left} of {rows} vocabulary rows left out (padding)" if left else None

    def weight_keys(self) -> list[str]:
        """Keys of tensors that are weights: no optimizer, random or extra state."""
        return [key for key in self.tensors if _NO_WEIGHT.match(key) is None]

    @property
    def has_tensor_a_layer(self) -> bool:
        """Whether every layer has tensors of its own."""
        return any(_LAYER.match(key) for key in self.weight_keys())

    def other_bytes(self) -> int:
        """Bytes of stored tensors that are not weights (optimizer state)."""
        held = [stored for key, stored in self.tensors.items() if _NO_WEIGHT.match(key) is not None]
        return sum(prod(stored.size) * stored.properties.dtype.itemsize for stored in held)

    def dtypes(self) -> set[torch.dtype]:
        """Types of the weights."""
        return {self.tensors[key].properties.dtype for key in self.weight_keys()}

    def find(self, slot: Slot) -> Stored | None:
        """The tensor that holds a parameter, if there is one."""
        places = [(path, None) for path in slot.paths] + [(key, slot.layer) for key in slot.stacked_keys]
        return next((Stored(key, layer) for key, layer in places if key in self.tensors), None)

    def check(self, config: ModelConfig) -> None:
        """Compares names and shapes with a model's, both ways, and Megatron-LM's arguments. Reads no tensor.

        Raises CheckpointError that names every missing, unexpected and misshapen tensor and every argument of another
        model, or, if there is a manifest and it is of another model, the differences between the models.
        """
        manifest = self.manifest()
        if manifest and manifest.training["lora"] != "off":
            hint = "megatron-tlt export, with the run's configuration, merges them"
            raise CheckpointError(f"{self.directory} holds adapters and no weights: {hint}")
        if manifest and (wrong := model_differences(manifest.model, model_record(config))):
            raise CheckpointError(f"{self.directory} is of another model: {shortened(wrong, separator='; ')}")
        used: set[str] = set()
        absent: list[str] = []
        misfits: list[str] = []
        for slot in slots(config, 1):
            stored = self.find(slot)
            if stored is None:
                absent.append(slot.paths[-1])
            else:
                used.add(stored.key)
                misfits += self._misfits(config, slot, stored)
        problems = [f"missing: {shortened(absent)}{prefix_hint(absent, self.weight_keys())}"] if absent else []
        if extra := [key for key in self.weight_keys() if key not in used]:
            problems.append(f"unexpected: {shortened(extra)}")
        if strange := [str(dtype) for dtype in self.dtypes() if not dtype.is_floating_point]:
            problems.append(f"weights of type {shortened(strange)}")
        problems += dict.fromkeys(misfits)  # a stacked tensor gives the same text for every layer
        if self.arguments is not None and (differ := argument_problems(self.arguments, config)):
            problems.append(f"arguments in {COMMON}: {shortened(differ)}")
        if problems:
            listed = shortened(problems, separator="; ")
            raise CheckpointError(f"Megatron checkpoint {self.directory} does not fit the config.json: {listed}")

    def _misfits(self, config: ModelConfig, slot: Slot, stored: Stored) -> Iterator[str]:
        shape, size = _shape(config, slot), tuple(self.tensors[stored.key].size)
        if stored.layer is not None:
            if size[0] != config.num_layers:
                yield f"{stored.key} has {size[0]} layers, the configuration says {config.num_layers}"
            size = size[1:]
        padded = slot.kind == "vocab" and len(size) == len(shape) and size[0] >= shape[0]
        if size[1:] != shape[1:] or (size[0] != shape[0] and not padded):
            yield f"{stored.key} has shape {size} a parameter, the configuration says {shape}"

    def read(self, config: ModelConfig, slot: Slot) -> list[Tensor]:
        """The slot's full Hugging Face tensors, in its order (may be views of one tensor).

        Holds the parameter and one stored chunk in memory. Padded vocabulary rows are not read. Raises CheckpointError.
        """
        stored = self.find(slot)
        if stored is None:
            raise CheckpointError(f"{self.directory} has no {slot.paths[-1]}")
        return unshard(config, slot, [self._read_region(stored, _shape(config, slot))])

    def tensor_reader(self, config: ModelConfig) -> Callable[[str], Tensor]:
        """A function that reads one tensor by its Hugging Face name, with the others of its parameter. It raises
        CheckpointError.
        """
        places = {name: (slot, place) for slot in slots(config, 1) for place, name in enumerate(slot.hf_names)}

        def read(name: str) -> Tensor:
            slot, place = places[name]
            return self.read(config, slot)[place]

        return read

    def read_factor(self, slot: Slot, shape: tuple[int, ...]) -> Tensor:
        """An adapter's factor (`adapter_slots`), whole. Raises CheckpointError."""
        stored = self.find(slot)
        if stored is None:
            raise CheckpointError(f"{self.directory} has no {slot.paths[-1]}")
        return self._read_region(stored, shape)

    def _read_region(self, stored: Stored, shape: tuple[int, ...]) -> Tensor:
        """Assembles [0:shape] of a stored tensor (of one layer of it) from the chunks that overlap it."""
        meta = self.tensors[stored.key]
        lead = () if stored.layer is None else (stored.layer,)
        region = ChunkStorageMetadata(
            offsets=torch.Size((*lead, *(0 for _ in shape))), sizes=torch.Size((*(1 for _ in lead), *shape))
        )
        items = create_read_items_for_chunk_list(stored.key, meta, [region])
        if (count := sum(prod(item.lengths) for item in items)) != prod(shape):
            raise CheckpointError(f"{self.directory}: {stored.key} has {count} of {prod(shape)} numbers of a parameter")
        target = torch.empty(region.sizes, dtype=meta.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.directory}: {stored.key} cannot be read: {error}") from error
        return target.reshape(shape)


class _Into(DefaultLoadPlanner):
    """Copies chunks into one tensor."""

    def __init__(self, target: Tensor):
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor."""
        return self._target


def _shape(config: ModelConfig, slot: Slot) -> tuple[int, ...]:
    """Shape of a whole parameter."""
    every = config.parameter_shapes()
    rows = sum(every[name][0] for name in slot.hf_names)
    return (rows, *every[slot.hf_names[0]][1:])


def _read_backend(directory: Path) -> dict[str, Any]:
    try:
        backend = json.loads((directory / BACKEND).read_text(encoding="utf-8"))
        kind = backend["sharded_backend"]
    except FileNotFoundError as error:
        formats = "torch_dcp or fsdp_dtensor; only torch_dist is read: save again with --ckpt-format torch_dist"
        raise CheckpointError(f"{directory} has no {BACKEND}, as in the formats {formats}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / BACKEND} cannot be read: {error!r}") from error
    if kind != "torch_dist":
        raise CheckpointError(f"{directory} is of format {kind!r}; only 'torch_dist' is read here")
    return dict(backend)


# Classes of megatron-core 0.14 and 0.15: torch's with one more attribute, which is kept and not read.
_OF_OLDER_MEGATRON = {
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": SavePlan,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": Metadata,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds torch.distributed.checkpoint's own records and nothing else: checkpoints come from untrusted places."""

    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.planner",
    )
    _OTHERS = (
        "torch.Size",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "collections.OrderedDict",
        "builtins.set",
    )

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for anything that is not on the list."""
        if (own := _OF_OLDER_MEGATRON.get(f"{module}.{name}")) is not None:
            return own
        if module in self._MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif f"{module}.{name}" in self._OTHERS:
            return super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")


def read_metadata(file: Path) -> Metadata:
    """torch's description of a checkpoint, unpickled without running code from it. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except (OSError, EOFError, ValueError, LookupError, AttributeError, ImportError, TypeError,
            pickle.UnpicklingError) as error:  # fmt: skip
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} holds no checkpoint metadata")
    return metadata
