"""A Hugging Face directory as a Megatron distributed checkpoint, chunk by chunk, without megatron.

    OUT/config.json, tokenizer files        as they were: `model.path` of a run, and the way back
        latest_checkpointed_iteration.txt   "release": Megatron-LM's word for weights without a training state
        release/__N_0.distcp                what rank N of a TP x PP world of Megatron would write: stage * tp + tp rank
                .metadata, metadata.json    torch's index of all chunks; the format's name
                common.pt                   Megatron-LM's arguments that describe the model, checkpoint version 3
                manifest.json               our record: layout, model, type, checksums

Everything is checked before anything is written; a chunk at a time is in memory.
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_tlt.actor.checkpoint_files import MANIFEST, FileRecord, Manifest, model_record, record_of
from megatron_tlt.actor.megatron_dir import BACKEND, TRACKER
from megatron_tlt.checkpoint.convert.chunks import EXTRA_STATES, Chunk, Piece, build, check_layout, chunks
from megatron_tlt.checkpoint.convert.hf_dir import HfDir
from megatron_tlt.checkpoint.convert.output import appearing, check_room
from megatron_tlt.checkpoint.convert.ranks import Ranks, together
from megatron_tlt.checkpoint.export import copy_companions
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig

RELEASE = "release"
_CHUNK_OVERHEAD = 2048  # bytes of torch.save around each tensor, at most


@dataclass(frozen=True)
class Plan:
    """A conversion that can be done: source, layout, type, and every chunk that will be written."""

    source: HfDir
    tp: int
    pp: int
    dtype: torch.dtype
    chunks: list[Chunk]

    @property
    def num_bytes(self) -> int:
        """Disk that the output needs."""
        return sum(c.numel * self.dtype.itemsize + _CHUNK_OVERHEAD for c in self.chunks)


def plan(hf: str | Path, tp: int, pp: int, dtype: str | None) -> Plan:
    """Checks everything that can be checked without writing. Raises ConfigError, CheckpointError.

    `dtype` is fp32 or bf16; None keeps what is stored, which must then be one of these, and one only.
    """
    problems = [(name, n) for name, n in (("--tp", tp), ("--pp", pp)) if n < 1]
    if problems:
        raise ConfigError.of(*problems[0], "must be 1 or more")
    source = HfDir(hf)
    check_layout(source.config, tp, pp)
    chosen = choose_dtype(set(source.dtypes.values()), dtype)
    return Plan(source, tp, pp, chosen, list(chunks(source.config, tp, pp)))


def choose_dtype(stored: set[torch.dtype], asked: str | None) -> torch.dtype:
    """The type of the output. Raises ConfigError if the stored types leave a choice and none is made."""
    if asked is not None:
        return DTYPES[asked]
    if len(stored) == 1 and stored <= set(DTYPES.values()):
        return next(iter(stored))
    found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
    raise ConfigError.of("--dtype", None, f"must be given, fp32 or bf16: the weights are stored as {found}")


def write(todo: Plan, out: Path, ranks: Ranks) -> None:
    """Writes `out`, which must not exist yet. Collective over `ranks`; each writes the files of some TP x PP ranks."""
    with together(ranks):
        if ranks.is_main:
            check_room(out, todo.num_bytes)
    with appearing(out, ranks) as scratch:
        inner = scratch / RELEASE
        with together(ranks):
            if ranks.is_main:
                inner.mkdir()
        local = [_save_plan(todo, number) for number in range(todo.tp * todo.pp)]
        files, metadata = create_default_global_save_plan(local)
        writer = FileSystemWriter(inner, per_thread_copy_ahead=0)
        files = writer.prepare_global_plan(files)
        results: list[Any] = []
        records: dict[str, FileRecord] = {}
        with together(ranks):
            for number in range(ranks.rank, len(files), ranks.size):
                results.append(writer.write_data(files[number], _Lazy(todo, number)).value())  # type: ignore[arg-type]
                name = f"__{number}_0.distcp"
                records[name] = record_of(inner / name)
        gathered = ranks.all_gather_object((results, records))
        if ranks.is_main:
            writer.finish(metadata, [result for some, _ in gathered for result in some])
            every = {name: record for _, some in gathered for name, record in some.items()}
            _write_small_files(todo, scratch, inner, every)


def _save_plan(todo: Plan, number: int) -> SavePlan:
    """What file `number` holds: the chunks of one rank of the TP x PP world."""
    properties = TensorProperties(dtype=todo.dtype)
    items = [
        WriteItem(
            index=MetadataIndex(chunk.key, torch.Size(chunk.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)),
                properties=properties,
                size=torch.Size(chunk.size),
            ),
        )
        for chunk in _of(todo, number)
    ]
    layers, stage = todo.source.config.num_layers, number // todo.tp
    if number % todo.tp == 0:
        for layer in range(stage * layers // todo.pp, (stage + 1) * layers // todo.pp):
            for state in EXTRA_STATES:
                key = f"decoder.layers.{state}/shard_{layer}_{layers}"
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
    return SavePlan(items)


def _of(todo: Plan, number: int) -> list[Chunk]:
    return [c for c in todo.chunks if c.stage * todo.tp + c.tp_rank == number]


class _Lazy:
    """The part of a save planner that `FileSystemWriter.write_data` asks: numbers, made when they are written."""

    def __init__(self, todo: Plan, number: int):
        self._todo = todo
        self._chunks = {(c.key, c.offsets): c for c in _of(todo, number)}
        self._last: Tensor | None = None

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        """The chunk; for an extra state what megatron's own layers save when they have none."""
        if item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([None], stream)
            return stream
        assert item.index.offset is not None
        chunk = self._chunks[item.index.fqn, tuple(item.index.offset)]
        if self._last is not None:
            # It is on disk: with no copying ahead the writer asks for the next one then. Tensors were seen to live on
            # after they were written, until the garbage collector came, which counts objects and not bytes.
            self._last.untyped_storage().resize_(0)

        def read(piece: Piece) -> Tensor:
            return self._todo.source.part(piece.name, piece.dim, piece.start, piece.stop)

        self._last = build(self._todo.source.config, chunk, self._todo.tp, read, self._todo.dtype)
        return self._last


def _write_small_files(todo: Plan, scratch: Path, inner: Path, records: dict[str, FileRecord]) -> None:
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (inner / BACKEND).write_text(json.dumps(backend), encoding="utf-8")
    arguments = megatron_arguments(todo.source.config, todo.tp, todo.pp, todo.dtype)
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"format": "torch_dist"},
    }
    torch.save(common, inner / "common.pt")
    rest = {file.name: record_of(file) for file in inner.iterdir() if file.name not in records}
    manifest = Manifest(
        step=0,
        policy_version=0,
        optimizer_steps=0,
        layout={"tp": todo.tp, "pp": todo.pp, "cp": 1, "dp": 1},
        model=model_record(todo.source.config),
        training={"dtype": dtype_name(todo.dtype), "optimizer": "none", "distributed_optimizer": "off"},
        extra={"converted_from": str(todo.source.directory.resolve())},
        files=records | rest,
    )
    (inner / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    copy_companions(todo.source.directory, scratch)
    (scratch / "config.json").write_text(
        json.dumps(with_dtype(todo.source.hf_config, todo.dtype), indent=2) + "\n", encoding="utf-8"
    )
    (scratch / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")


def with_dtype(hf_config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that names the type its weights now have, in the spellings it used."""
    word = str(dtype).removeprefix("torch.")
    spellings = [key for key in ("dtype", "torch_dtype") if key in hf_config] or ["torch_dtype"]
    return {**hf_config, **dict.fromkeys(spellings, word)}


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16; torch's own name for others."""
    names: Iterable[tuple[str, torch.dtype]] = DTYPES.items()
    return next((name for name, d in names if d is dtype), str(dtype).removeprefix("torch."))


def megatron_arguments(config: ModelConfig, tp: int, pp: int, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron-LM's arguments for this model, as `--use-checkpoint-args` reads them."""
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
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": config.rope_scaling is not None,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "padded_vocab_size": -(-config.vocab_size // tp) * tp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": dtype,
        "ckpt_format": "torch_dist",
    }
