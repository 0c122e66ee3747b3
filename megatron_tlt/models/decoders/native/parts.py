"""Parts of the native policy and the native drafter: memory, packed layers, buffers and inputs of a forward.

Legend: T rows, S sequences, R wanted rows, H hidden size, D head size, I intermediate size, E experts, k chosen a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_tlt.config.checks.rollout import NATIVE_HEAD_DIM
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import KVCache, Shard
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.native.abi import AllReduce, TltLayer, TltModel, TltStep, library
from megatron_tlt.models.decoders.torch.layers import rope_table
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.experts import route_type, route_width

TILE = 16  # cached positions in a tile: block sizes are multiples of it
MAX_ROWS = 256  # rows computed together; longer batches are walked in chunks of this many
_LINE = 64  # bytes of a cache line
_PANELS_AT_ONCE = 64  # packed together: bounds the converted copy of a large weight


def zeros(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[size] zeros that begin on a cache line; the system gives the memory as it is touched.

    numpy (2.4) allocates large pages, PyTorch does not. A step reads every weight, and 10 MB in pages of 4 KiB have
    more addresses than the processor caches.
    """
    whole = torch.from_numpy(np.zeros(size * dtype.itemsize + _LINE, np.uint8))
    skipped = -whole.data_ptr() % _LINE
    return whole[skipped : skipped + size * dtype.itemsize].view(dtype)


def pad(n: int) -> int:
    """Row lengths of buffers: multiples of 64 numbers."""
    return -(-n // 64) * 64


class Packer:
    """Packs weights [rows, K] of `dtype` into panels of cells (`csrc/gemm.c`, `csrc/numbers.h`)."""

    def __init__(self, dtype: torch.dtype):
        lib = library(dtype == torch.bfloat16)
        self.dtype = dtype
        self._panel, self._cell, self._multiple = lib.tlt_panel_width(), lib.tlt_cell_numbers(), lib.tlt_row_multiple()

    def zeros(self, columns: int, k: int) -> Tensor:
        """Memory of a packed weight."""
        return zeros(self.size(columns, k), self.dtype)

    def size(self, columns: int, k: int) -> int:
        """Elements of a packed weight of `columns` outputs."""
        return -(-columns // self._panel) * self._panel * self._padded(k)

    def _padded(self, k: int) -> int:
        return -(-k // self._multiple) * self._multiple

    def pack(self, target: Tensor, source: Tensor, first: int = 0, step: int = 1, offset: int = 0) -> None:
        """Writes source [rows, K] as output columns `first` ... of a packed weight.

        Panel i of this weight is panel i * step + offset of `target` (gate and up are interleaved).
        """
        rows, k = source.shape
        panels = target.view(-1, self._padded(k) // self._cell, self._panel, self._cell)[offset::step]
        done = 0
        while done < rows:
            panel, lane = divmod(first + done, self._panel)
            whole = 0 if lane else min((rows - done) // self._panel, _PANELS_AT_ONCE)
            width = self._panel if whole else min(self._panel - lane, rows - done)
            count = max(1, whole)
            part = functional.pad(source[done : done + count * width].to("cpu", self.dtype), (0, self._padded(k) - k))
            cells = part.view(count, width, -1, self._cell)
            panels[panel : panel + count, :, lane : lane + width] = cells.transpose(1, 2)
            done += count * width

    def unpack(self, packed: Tensor, rows: int, k: int) -> Tensor:
        """A copy [rows, K] of the weight that `pack` wrote from column 0 on."""
        padded = self._padded(k)
        cells = packed.view(-1, padded // self._cell, self._panel, self._cell)
        return cells.transpose(1, 2).reshape(-1, padded)[:rows, :k]


class PackedLayers:
    """The layers' weights of one rank, and one more packed weight: the LM head, or the drafter's `fc`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        packer: Packer,
        extra: tuple[int, int],
        input_norm: bool = True,
        inputs: int | None = None,
    ):
        """`extra`: (columns, K) of the other weight. `inputs`: width of the inputs of queries, keys and values, by
        default the hidden size.
        """
        self._config, self._shard, self._packer = config, shard, packer
        d, h = config.head_dim, config.hidden_size
        qkv = (shard.heads + 2 * shard.kv_heads) * d
        sizes = [
            {"qkv": packer.size(qkv, inputs or h), "o": packer.size(h, shard.heads * d)} | self._mlp_sizes(index)
            for index in range(config.num_layers)
        ]
        every = [n for of_layer in sizes for n in of_layer.values()] + [packer.size(*extra)]
        *parts, self.extra = zeros(sum(every), packer.dtype).split(every)
        left = iter(parts)
        self._weights = [{name: next(left) for name in of_layer} for of_layer in sizes]
        wide = {"qkv_bias": pad(qkv), "post_norm": pad(h)} | ({"input_norm": pad(h)} if input_norm else {})
        heads = {"q_norm": d, "k_norm": d} if config.qk_norm else {}
        self._vectors = [{name: torch.zeros(n) for name, n in (wide | heads).items()} for _ in range(config.num_layers)]
        self.structures = (TltLayer * config.num_layers)()
        for layer, weights, vectors in zip(self.structures, self._weights, self._vectors, strict=True):
            for name, tensor in (weights | vectors).items():
                setattr(layer, name, tensor.data_ptr())
        for route, index in enumerate(config.moe_layers):
            self.structures[index].route = route

    def _mlp_sizes(self, index: int) -> dict[str, int]:
        """Elements of a layer's weights behind its attention; the shared expert's gate is the router's last row."""
        c, s, h, size = self._config, self._shard, self._config.hidden_size, self._packer.size
        if index not in c.moe_layers:
            return {"gate_up": 2 * size(s.inter, h), "down": size(h, s.inter)}
        sizes = {
            "router": size(c.num_experts + (s.shared_inter > 0), h),
            "expert_gate_up": c.num_experts * 2 * size(s.expert_inter, h),
            "expert_down": c.num_experts * size(h, s.expert_inter),
        }
        if s.shared_inter:
            sizes |= {"gate_up": 2 * size(s.shared_inter, h), "down": size(h, s.shared_inter)}
        return sizes

    def load(self, index: int, part: str, kind: str, tensor: Tensor) -> None:
        """Packs the full tensor of a layer's `part` ("q_proj", ...), `kind` "weight" or "bias"."""
        s, weights, vectors = self._shard, self._weights[index], self._vectors[index]
        pack, tensor = self._packer.pack, tensor.detach()
        if part == "experts":
            self._load_experts(weights, kind, tensor)
            return
        source, part = s.slice(part, tensor), part.removeprefix("shared.")
        first = {"k_proj": s.heads, "v_proj": s.heads + s.kv_heads}.get(part, 0) * self._config.head_dim
        if kind == "bias":
            vectors["qkv_bias"][first : first + source.shape[0]].copy_(source)
        elif part in ("q_proj", "k_proj", "v_proj"):
            pack(weights["qkv"], source, first)
        elif part in ("gate_proj", "up_proj"):
            pack(weights["gate_up"], source, 0, 2, part == "up_proj")
        elif part in ("gate", "shared_expert_gate"):
            pack(weights["router"], source, 0 if part == "gate" else self._config.num_experts)
        elif part in ("o_proj", "down_proj"):
            pack(weights[part.removesuffix("_proj")], source)
        else:
            renamed = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
            vectors[renamed.get(part, part)][: source.shape[0]].copy_(source)

    def _load_experts(self, weights: dict[str, Tensor], kind: str, stack: Tensor) -> None:
        """Packs a stack of all experts of a layer, each one for itself: gate and up rows in turns of panels."""
        packed = weights["expert_gate_up" if kind == "gate_up_proj" else "expert_down"].chunk(len(stack))
        for target, source in zip(packed, self._shard.slice_experts(kind, stack), strict=True):
            for half, rows in enumerate(source if source.ndim == 3 else [source]):
                self._packer.pack(target, rows, 0, source.ndim - 1, half)


class Forward:
    """A model's structure in C with its buffers, its rotary table and its all-reduce."""

    def __init__(self, config: ModelConfig, shard: Shard, tp: TensorParallel | None, layers: PackedLayers):
        """Raises ConfigError for heads that C has no room for."""
        if config.head_dim > NATIVE_HEAD_DIM:
            allowed = f"must be at most {NATIVE_HEAD_DIM} in the native decoder"
            raise ConfigError.of("head_dim", config.head_dim, allowed)
        self._tp, dtype = tp, layers.extra.dtype
        self._keep: list[Any] = [layers]  # owners of the memory that the structures point into
        self.reduce_error: BaseException | None = None  # why the last all-reduce failed
        self.all_reduce = AllReduce(self._reduce) if shard.size > 1 else AllReduce()
        c, h, padded = config, pad(config.hidden_size), -(-config.head_dim // TILE) * TILE
        self._part = torch.zeros(MAX_ROWS * h)
        self._rope = rope_table(c, c.max_position_embeddings)
        self.model = TltModel(
            hidden=c.hidden_size,
            layers=c.num_layers,
            heads=shard.heads,
            kv_heads=shard.kv_heads,
            head_dim=c.head_dim,
            inter=shard.inter,
            vocab=c.vocab_size,
            max_rows=MAX_ROWS,
            rope_len=self._rope.shape[0],
            tp=shard.size,
            eps=c.rms_norm_eps,
            rope=self._rope.data_ptr(),
            layer=layers.structures,
            resid=self.buffer(h),
            part=self._part.data_ptr(),
            qkv_out=self.buffer(pad((shard.heads + 2 * shard.kv_heads) * c.head_dim)),
            x=self.buffer(h, dtype),
            q=self.buffer(shard.heads * padded, dtype),
            att=self.buffer(pad(shard.heads * c.head_dim), dtype),
            mid=self.buffer(pad(max(shard.inter, shard.shared_inter)), dtype),
            units=self.buffer(3),
        )
        if c.num_experts:
            self._add_experts(c, shard)

    def _add_experts(self, c: ModelConfig, shard: Shard) -> None:
        """Sizes and buffers of layers with experts."""
        model, k, h = self.model, c.num_experts_per_tok, pad(c.hidden_size)
        model.experts = c.num_experts
        model.topk = k
        model.renormalise = c.norm_topk_prob
        model.expert_inter = shard.expert_inter
        model.shared_inter = shard.shared_inter
        model.route_bytes = route_width(c) * np.dtype(route_type(c.num_experts)).itemsize
        columns = {"scores": pad(c.num_experts + 1), "gates": k + 1, "shared": h, "chosen": k, "place": k}
        columns |= {"pair_x": k * h, "pair_mid": k * pad(shard.expert_inter), "pair_out": k * h}
        for name, count in columns.items():
            setattr(model, name, self.buffer(count))
        for name in ("starts", "active"):
            setattr(model, name, self.buffer(-(-(c.num_experts + 1) // MAX_ROWS)))

    def buffer(self, columns: int, dtype: torch.dtype = torch.float32) -> int:
        """Address of MAX_ROWS zeroed rows, which live as long as this object."""
        # 64 columns to spare: vector stores of the last row may run over
        self._keep.append(torch.zeros(MAX_ROWS * columns + 64, dtype=dtype))
        return int(self._keep[-1].data_ptr())

    def _reduce(self, _address: int, count: int) -> None:
        """Called from C on the calling thread, between two barriers. An exception is kept, and the sum not counted; of
        one before the `try`, as Ctrl-C can be, nothing is kept.
        """
        assert self._tp is not None
        try:
            self._tp.all_reduce(self._part[:count])
            self.model.reduced += 1
        except BaseException as e:  # noqa: BLE001  # C cannot unwind Python; the caller raises it again
            self.reduce_error = e


def kv_bytes_per_block(config: ModelConfig, shard: Shard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, heads padded to the tiles' width."""
    padded = -(-config.head_dim // TILE) * TILE
    return config.num_layers * 2 * shard.kv_heads * block_size * padded * dtype.itemsize


def new_kv_cache(num_blocks: int, block_size: int, bytes_per_block: int) -> KVCache:
    """Zeroed; memory is allocated as blocks are written. 16 must divide `block_size`."""
    assert block_size > 0 and block_size % TILE == 0, f"{block_size} is no multiple of {TILE}"
    return KVCache(num_blocks, block_size, zeros(num_blocks * bytes_per_block, torch.uint8))


def fill_step(step: TltStep, batch: DecoderInput, kv: KVCache) -> None:
    """Points `step` at a batch and a cache; `batch` must stay alive while it is used."""
    tokens, seqs, wanted = batch.token_ids.shape[0], batch.context_lens.shape[0], batch.logit_rows.shape[0]
    step.token_ids = _address(batch.token_ids, tokens)
    step.positions = _address(batch.positions, tokens)
    step.slots = _address(batch.slot_mapping, tokens)
    step.query_start = _address(batch.query_start, seqs + 1)
    step.block_tables = _address(batch.block_tables, seqs)
    step.logit_rows = _address(batch.logit_rows, wanted)
    step.tokens = tokens
    step.seqs = seqs
    step.logits_rows = wanted
    step.max_blocks = batch.block_tables.shape[1]
    step.num_blocks = kv.num_blocks
    step.block_size = kv.block_size
    step.kv = kv.data.data_ptr()


def _address(tensor: Tensor, rows: int) -> int:
    assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device.type == "cpu"
    assert len(tensor) == rows
    return tensor.data_ptr()
