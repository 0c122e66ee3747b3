"""A Hugging Face directory as a Megatron distributed checkpoint, one parameter in memory at a time, without megatron.

    OUT/config.json, tokenizer files        of the source: `model.path` of a run, and the way back
        latest_checkpointed_iteration.txt   "release": Megatron-LM's word for weights without a training state
        release/__N_0.distcp                the parameters that rank N of the conversion has written
                .metadata, metadata.json    torch's index of all chunks; the format's name
                common.pt                   Megatron-LM's arguments that describe the model, checkpoint version 3
                manifest.json               Megatron-TLT's record: layout, model, type, checksums

Parameters are named by the actor's own mapping (`actor.hf_names`). All layers share one tensor [layers, ...]; each
parameter is one chunk of it, from which a reader of any layout takes its part. Everything is checked before anything
is written.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megatron_tlt.actor.checkpoint_files import MANIFEST, FileRecord, Manifest, model_record, record_of
from megatron_tlt.actor.hf_names import Slot, shard, slots
from megatron_tlt.actor.megatron_arguments import COMMON, megatron_arguments
from megatron_tlt.actor.torch_dist_reader import BACKEND, TRACKER, Stored
from megatron_tlt.checkpoint.atomic import new_directory
from megatron_tlt.checkpoint.companions import copy_companions
from megatron_tlt.checkpoint.convert.hf_dir import (
    HfDir,
    choose_dtype,
    dtype_name,
)
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import config_with_dtype
from megatron_tlt.observe.files import naming, sync

COMMAND = "convert_hf_to_megatron"
RELEASE = "release"


@dataclass(frozen=True)
class MegatronConversion:
    """A checked conversion to Megatron: source and type."""

    source: HfDir
    dtype: torch.dtype

    @classmethod
    def plan(cls, hf: str | Path, dtype: str | None) -> MegatronConversion:
        """Checks everything that can be checked without writing. Raises ConfigError, CheckpointError.

        `dtype` is fp32 or bf16; None keeps what is stored, which must then be one of these, and one only.
        """
        source = HfDir(hf)
        return cls(source, choose_dtype(source.dtypes.values(), dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.source.config.num_parameters * self.dtype.itemsize

    def stored(self, slot: Slot) -> Stored:
        """The tensor that holds a parameter."""
        config = self.source.config
        if config.has_mixed_layers:  # they have no common tensor
            return Stored(slot.global_paths[-1], None)
        return Stored(slot.stacked_keys[-1], slot.layer)

    def write(self, out: Path, ranks: Ranks, overwrite: bool = False) -> None:
        """Writes `out`; with `overwrite` it replaces an older conversion. Collective: every rank writes one file."""
        with new_directory(out, COMMAND, self.num_bytes, ranks, overwrite, [self.source.directory]) as scratch:
            inner = scratch / RELEASE
            with together(ranks):
                inner.mkdir(exist_ok=True)
                results = _write_shard(self, inner / shard_name(ranks.rank), ranks)
                record = record_of(inner / shard_name(ranks.rank))
            gathered = ranks.all_gather_object((results, record))
            if ranks.is_main:
                FileSystemWriter(inner).finish(_metadata(self), [some for some, _ in gathered])
                shards = {shard_name(rank): record for rank, (_, record) in enumerate(gathered)}
                _write_small_files(self, scratch, shards)


def _write_shard(todo: MegatronConversion, file: Path, ranks: Ranks) -> list[WriteResult]:
    """Writes this rank's share of the parameters, each as one chunk."""
    results = []
    with naming(file), file.open("wb") as stream:
        for slot in slots(todo.source.config, 1)[ranks.rank :: ranks.size]:
            stored = todo.stored(slot)
            whole = shard(todo.source.config, slot, todo.source.read_slot(slot), 0, 1)
            whole = whole.to(todo.dtype, copy=True).contiguous()
            index = dcp.MetadataIndex(stored.key, torch.Size(_offsets(stored, whole)))
            results.append(_save(whole if stored.layer is None else whole[None], index, stream, file.name))
            # torch.save leaves the tensor in a reference cycle, which holds its memory for long.
            whole.untyped_storage().resize_(0)
        if ranks.is_main:
            for key in _extra_state_keys(todo.source.config):
                results.append(_save([None], dcp.MetadataIndex(key), stream, file.name))
    sync(file)
    return results


def _offsets(stored: Stored, whole: Tensor) -> list[int]:
    """Where a parameter begins in the tensor that holds it."""
    lead = [] if stored.layer is None else [stored.layer]
    return lead + [0] * whole.ndim


def shard_name(rank: int) -> str:
    """The file of one rank."""
    return f"__{rank}_0.distcp"


def _save(value: Any, index: dcp.MetadataIndex, stream: IO[bytes], name: str) -> WriteResult:
    start = stream.tell()
    _torch_save(value, stream)
    length = stream.tell() - start
    return WriteResult(index, length, _StorageInfo(name, start, length))


def _torch_save(value: Any, stream: IO[bytes]) -> None:
    """Raises OSError; torch's archive, which cannot be closed after one, hides it behind a RuntimeError."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _extra_state_keys(config: ModelConfig) -> list[str]:
    """Keys of the modules' extra states (FP8 scales of Transformer Engine), which a reader of the files expects."""
    total, found = config.num_layers, ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(total):
        modules = ["self_attention.linear_proj", "self_attention.linear_qkv"]
        modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"] if config.qk_norm else []
        has_experts = layer in config.moe_layers
        modules += ["pre_mlp_layernorm"] if has_experts else []
        if not has_experts or config.shared_expert_intermediate_size:
            mlp = "mlp.shared_experts" if has_experts else "mlp"
            modules += [f"{mlp}.linear_fc1", f"{mlp}.linear_fc2"]
        layers, shard = (f"layers.{layer}", "0_1") if config.has_mixed_layers else ("layers", f"{layer}_{total}")
        found += [f"decoder.{layers}.{module}._extra_state/shard_{shard}" for module in modules]
    return found


def _metadata(todo: MegatronConversion) -> dcp.Metadata:
    """torch's description of every stored tensor and its chunks."""
    config = todo.source.config
    shapes = config.parameter_shapes()
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    for slot in slots(config, 1):
        stored = todo.stored(slot)
        whole = shard(config, slot, [torch.empty(shapes[name], device="meta") for name in slot.hf_names], 0, 1)
        lead = () if stored.layer is None else (1,)
        size = torch.Size((*(config.num_layers for _ in lead), *whole.shape))
        new = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=todo.dtype), size, [])
        place = dcp.ChunkStorageMetadata(torch.Size(_offsets(stored, whole)), torch.Size((*lead, *whole.shape)))
        tensors.setdefault(stored.key, new).chunks.append(place)
    return dcp.Metadata({**tensors, **{key: dcp.BytesStorageMetadata() for key in _extra_state_keys(config)}})


def _write_small_files(todo: MegatronConversion, scratch: Path, shards: dict[str, FileRecord]) -> None:
    source, inner = todo.source, scratch / RELEASE
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common_backend = {"common_backend": "torch", "common_backend_version": 1}
    (inner / BACKEND).write_text(json.dumps(backend | common_backend), encoding="utf-8")
    common = {
        "args": Namespace(**megatron_arguments(source.config), params_dtype=todo.dtype),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"format": "torch_dist"},
    }
    with naming(inner / COMMON), (inner / COMMON).open("wb") as stream:
        _torch_save(common, stream)
    training = {"dtype": dtype_name(todo.dtype), "optimizer": "none", "distributed_optimizer": "off"}
    manifest = Manifest(
        step=0,
        policy_version=0,
        optimizer_steps=0,
        layout={"tp": 1, "pp": 1, "cp": 1, "dp": 1},
        model=model_record(source.config),
        training=training | {"lora": "off", "base": ""},
        extra={"converted_from": str(source.directory.resolve())},
        files=shards | {file.name: record_of(file) for file in inner.iterdir() if file.name not in shards},
    )
    (inner / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    copy_companions(source.directory, scratch)
    (scratch / "config.json").write_text(config_with_dtype(source.hf_config, todo.dtype), encoding="utf-8")
    (scratch / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")
