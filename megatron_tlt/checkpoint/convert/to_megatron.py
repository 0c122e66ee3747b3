"""A Hugging Face directory as a Megatron distributed checkpoint, one parameter in memory at a time, without megatron.

    OUT/config.json, tokenizer files        of the source: `model.path` of a run, and the way back
        latest_checkpointed_iteration.txt   "release": Megatron-LM's word for weights without a training state
        release/__N_0.distcp                the shards of TP rank N % tp of pipeline stage N // tp
                .metadata, metadata.json    torch's index of all chunks; the format's name
                common.pt                   Megatron-LM's arguments that describe the model, checkpoint version 3
                manifest.json               Megatron-TLT's record: layout, model, type, checksums

Parameters are named and cut by the actor's own mapping (`actor.hf_names`). All layers share one tensor [layers, ...].
Everything is checked before anything is written.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
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
from megatron_tlt.actor.hf_names import Slot, expert_fields, shard, slots
from megatron_tlt.actor.torch_dist_reader import BACKEND, TRACKER
from megatron_tlt.checkpoint.atomic import new_directory
from megatron_tlt.checkpoint.convert.hf_dir import (
    HfDir,
    choose_dtype,
    config_with_dtype,
    copy_companions,
    dtype_name,
)
from megatron_tlt.config.checks.layout import pp_problems, tp_problems
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.observe.files import sync

RELEASE = "release"

# Layers of megatron save an (empty) extra state, which Transformer Engine fills with FP8 scales; a reader expects it.
_EXTRA_STATES = ("self_attention.linear_proj", "self_attention.linear_qkv")


@dataclass(frozen=True)
class Chunk:
    """A block of a stored tensor `key` of shape `size`, and where in it the block begins."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    block: Tensor


def chunks_of(config: ModelConfig, slot: Slot, full: list[Tensor], rank: int, tp: int) -> list[Chunk]:
    """What TP rank `rank` stores of a parameter, from its full Hugging Face tensors, as megatron-core cuts it.

    One chunk, but two of gate_up: the rank's gate rows, and its up rows after all gate rows. A replicated parameter is
    stored by rank 0 only. Experts are whole; the ranks divide them, if that comes out even.
    """
    is_whole = slot.kind == "replicated" or (slot.kind == "experts" and config.num_experts % tp > 0)
    if is_whole and rank > 0:
        return []
    part = shard(config, slot, full, 0, 1) if is_whole else shard(config, slot, full, rank, tp)
    blocks = part.chunk(2) if slot.kind == "gate_up" else (part,)
    dim = 1 if slot.kind == "columns" else 0
    parts = 1 if is_whole else tp * len(blocks)
    found = []
    for i, block in enumerate(blocks):
        size, offsets = list(block.shape), [0] * block.ndim
        offsets[dim] = (i * tp + rank) * size[dim]
        size[dim] *= parts
        if config.has_mixed_layers:  # they have no common tensor
            found.append(Chunk(slot.global_paths[-1], tuple(size), tuple(offsets), block))
            continue
        if slot.layer is not None:
            size, offsets, block = [config.num_layers, *size], [slot.layer, *offsets], block[None]  # noqa: PLW2901
        found.append(Chunk(slot.stacked_keys[-1], tuple(size), tuple(offsets), block))
    return found


@dataclass(frozen=True)
class Plan:
    """A conversion that was checked: source, layout, type."""

    source: HfDir
    tp: int
    pp: int
    dtype: torch.dtype

    @property
    def num_files(self) -> int:
        """One a rank of the layout."""
        return self.tp * self.pp

    def stored_slots(self, stage: int) -> list[Slot]:
        """The parameters that a stage's files hold."""
        return [s for s in slots(self.source.config, self.pp) if s.exported and s.stage == stage]

    def chunks(self, number: int) -> Iterator[tuple[Slot, Chunk]]:
        """What file `number` will hold, without data."""
        config, (stage, rank) = self.source.config, divmod(number, self.tp)
        shapes = config.parameter_shapes()
        for slot in self.stored_slots(stage):
            full = [torch.empty(shapes[name], device="meta") for name in slot.hf_names]
            for chunk in chunks_of(config, slot, full, rank, self.tp):
                yield slot, chunk

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.source.config.num_parameters * self.dtype.itemsize


def plan(hf: str | Path, tp: int, pp: int, dtype: str | None) -> Plan:
    """Checks everything that can be checked without writing. Raises ConfigError, CheckpointError.

    `dtype` is fp32 or bf16; None keeps what is stored, which must then be one of these, and one only.
    """
    if min(tp, pp) < 1:
        raise ConfigError.of("--tp, --pp", f"{tp}, {pp}", "must be 1 or more")
    source = HfDir(hf)
    shape = source.config.architecture
    if problems := [*tp_problems(shape, "--tp", tp), *pp_problems(shape, "--pp", pp)]:
        raise ConfigError(problems)
    return Plan(source, tp, pp, choose_dtype(source.dtypes.values(), dtype))


def write(todo: Plan, out: Path, ranks: Ranks, overwrite: bool = False) -> None:
    """Writes `out`; with `overwrite` it replaces a model there. Collective: files are shared out over `ranks`."""
    with new_directory(out, todo.num_bytes, ranks, overwrite, [todo.source.directory]) as scratch:
        inner = scratch / RELEASE
        results: list[WriteResult] = []
        records: dict[str, FileRecord] = {}
        with together(ranks):
            inner.mkdir(exist_ok=True)
            for stage in range(todo.pp):
                first = stage * todo.tp
                mine = [n for n in range(first, first + todo.tp) if n % ranks.size == ranks.rank]
                results += _write_files(todo, stage, mine, inner) if mine else []
                records |= {file_name(n): record_of(inner / file_name(n)) for n in mine}
        gathered = ranks.all_gather_object((results, records))
        if ranks.is_main:
            FileSystemWriter(inner).finish(_metadata(todo), [some for some, _ in gathered])
            shards = {name: record for _, some in gathered for name, record in some.items()}
            _write_small_files(todo, scratch, shards)


def _write_files(todo: Plan, stage: int, numbers: list[int], inner: Path) -> list[WriteResult]:
    """Writes some of a stage's files together, so that each parameter is read once."""
    results = []
    with ExitStack() as stack:
        streams = {n: stack.enter_context((inner / file_name(n)).open("wb")) for n in numbers}
        for slot in todo.stored_slots(stage):
            full = todo.source.read_slot(slot)
            for number, stream in streams.items():
                for chunk in chunks_of(todo.source.config, slot, full, number % todo.tp, todo.tp):
                    block = chunk.block.to(todo.dtype, copy=True).contiguous()
                    index = dcp.MetadataIndex(chunk.key, torch.Size(chunk.offsets))
                    results.append(_save(block, index, stream, file_name(number)))
                    # torch.save leaves the tensor in a reference cycle, which holds its memory for long.
                    block.untyped_storage().resize_(0)
        if numbers[0] == stage * todo.tp:
            for key in _extra_state_keys(todo, stage):
                results.append(
                    _save([None], dcp.MetadataIndex(key), streams[numbers[0]], file_name(numbers[0]))
                )
    for number in numbers:
        sync(inner / file_name(number))
    return results


def file_name(number: int) -> str:
    """Of the shards of one rank."""
    return f"__{number}_0.distcp"


def _save(value: Any, index: dcp.MetadataIndex, stream: IO[bytes], name: str) -> WriteResult:
    start = stream.tell()
    torch.save(value, stream)
    length = stream.tell() - start
    return WriteResult(index, length, _StorageInfo(name, start, length))


def _extra_state_keys(todo: Plan, stage: int) -> list[str]:
    config = todo.source.config
    total, found = config.num_layers, []
    for layer in range(stage * total // todo.pp, (stage + 1) * total // todo.pp):
        mlp = "mlp" if layer not in config.moe_layers else "mlp.shared_experts"
        is_dense = layer not in config.moe_layers or config.shared_expert_intermediate_size
        for module in (*_EXTRA_STATES, *((f"{mlp}.linear_fc1", f"{mlp}.linear_fc2") if is_dense else ())):
            mixed, common = f"{layer}.{module}._extra_state", f"{module}._extra_state/shard_{layer}_{total}"
            found.append(f"decoder.layers.{mixed if config.has_mixed_layers else common}")
    return found


def _metadata(todo: Plan) -> dcp.Metadata:
    """torch's description of every stored tensor and its chunks."""
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    for number in range(todo.num_files):
        for _, chunk in todo.chunks(number):
            new = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=todo.dtype), torch.Size(chunk.size), []
            )
            place = dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.block.shape)
            tensors.setdefault(chunk.key, new).chunks.append(place)
    states = {
        key: dcp.BytesStorageMetadata() for stage in range(todo.pp) for key in _extra_state_keys(todo, stage)
    }
    stored: dict[str, dcp.STORAGE_TYPES] = {**tensors, **states}
    return dcp.Metadata(stored)


def _write_small_files(todo: Plan, scratch: Path, shards: dict[str, FileRecord]) -> None:
    source, inner = todo.source, scratch / RELEASE
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common_backend = {"common_backend": "torch", "common_backend_version": 1}
    (inner / BACKEND).write_text(json.dumps(backend | common_backend), encoding="utf-8")
    common = {
        "args": Namespace(**megatron_arguments(source.config, todo.tp, todo.pp, todo.dtype)),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"format": "torch_dist"},
    }
    torch.save(common, inner / "common.pt")
    manifest = Manifest(
        step=0,
        policy_version=0,
        optimizer_steps=0,
        layout={"tp": todo.tp, "pp": todo.pp, "cp": 1, "dp": 1},
        model=model_record(source.config),
        training={"dtype": dtype_name(todo.dtype), "optimizer": "none", "distributed_optimizer": "off"},
        extra={"converted_from": str(source.directory.resolve())},
        files=shards | {file.name: record_of(file) for file in inner.iterdir() if file.name not in shards},
    )
    (inner / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    copy_companions(source.directory, scratch)
    (scratch / "config.json").write_text(config_with_dtype(source.hf_config, todo.dtype), encoding="utf-8")
    (scratch / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")


def megatron_arguments(config: ModelConfig, tp: int, pp: int, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron-LM's arguments for this model, as `--use-checkpoint-args` reads them; its defaults are left out."""
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": int(config.rope_theta),
        "use_rope_scaling": config.rope_scaling is not None,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "padded_vocab_size": -(-config.vocab_size // tp) * tp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": dtype,
        "ckpt_format": "torch_dist",
        **({"num_experts": config.num_experts, **expert_fields(config)} if config.num_experts else {}),
    }
