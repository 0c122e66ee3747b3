"""The interface of the rollout decoders, and their shared parts: KV cache, weight checks, tensor-parallel shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_tlt.config.checks.layout import tp_problems
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import CheckpointError, ConfigError, shortened
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.decoders.torch.fixed_memory import FixedMemory
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.experts import route_type, route_width
from megatron_tlt.models.hf.files import is_ignorable

NamedTensors = Iterable[tuple[str, Tensor]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by their names in configurations
MOST_AUX_LAYERS = 16  # that a decoder returns: TLT_MAX_AUX of the C decoder
ENGINE_DTYPES = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}  # by engines' names


@dataclass(slots=True)
class KVCache:
    """A paged cache of `num_blocks` blocks of `block_size` positions; the layout of `data` is its decoder's."""

    num_blocks: int
    block_size: int
    data: Tensor
    memory: FixedMemory | None = None  # where `data` keeps its address, on CUDA

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.data.nbytes

    @property
    def is_released(self) -> bool:
        """Whether there is no memory until `resume`."""
        return not (self.data.numel() if self.memory is None else self.memory.is_taken)

    def fix_address(self) -> None:
        """Moves to memory that keeps its address through `release` and `resume`; the contents are lost. Mutates."""
        shape, dtype, device, size = self.data.shape, self.data.dtype, self.data.device, self.data.nbytes
        self.data = self.data.new_empty(0)
        torch.cuda.empty_cache()
        self.memory = FixedMemory(size, device)
        self.data = self.memory.tensor().view(dtype).view(shape).zero_()

    def release(self) -> None:
        """Frees the memory until `resume`; the contents are lost. Mutates."""
        if self.memory is not None:
            self.memory.release()
        else:
            self.data = self.data.new_empty(0)

    def resume(self, make: Callable[[int, int], KVCache]) -> None:
        """Allocates the memory again, zeroed, after a `release`: by `make(num_blocks, block_size)`, at another address,
        unless the address is fixed. Mutates.
        """
        if self.memory is not None:
            self.memory.take()
            self.data.zero_()
        else:
            self.data = make(self.num_blocks, self.block_size).data


class Decoder(Protocol):
    """A rollout decoder: weights in, ragged batches through, logits and states out. Not thread-safe.

    The *state* of a row, `state_size` = (len(aux_layers) + 1) * H wide: the residual stream behind each of `aux_layers`
    (ascending, from 0, never the last layer), then the hidden state after the final norm.
    """

    config: ModelConfig
    kind: str  # "native" or "torch"
    dtype: torch.dtype
    device: torch.device
    aux_layers: tuple[int, ...]  # policy layers whose outputs a drafter reads; () without one
    state_size: int
    head_version: int  # how often the LM head was loaded: a copy of its rows is of one version

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocates a zeroed cache (this rank's kv heads)."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block over all layers, in bytes, to size a cache by a memory budget."""

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i (copy-on-write)."""

    def load_weights(self, named: NamedTensors, partial: bool = False) -> None:
        """Loads full (unsharded) Hugging Face tensors, one at a time, over the present weights.

        Raises CheckpointError for an unknown name, a wrong shape or, unless `partial`, a missing tensor.
        """

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        """Embedding and LM head [V, H], to read: the decoder's own memory where they are contiguous, else a copy.
        Collective with tensor parallelism.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of tokens int64 [...]."""

    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """Runs the batch; writes the rows' keys and values into `kv`. Outputs are fresh tensors."""


class WeightLedger:
    """Checks names and shapes while weights stream in, and whether a model is complete."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._wanted = config.parameter_shapes()
        self._ever: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every tensor was loaded at least once."""
        return len(self._ever) == len(self._wanted)

    def check(self, named: NamedTensors, partial: bool) -> Iterable[tuple[str, Tensor]]:
        """Yields the tensors; raises CheckpointError (see `Decoder.load_weights`)."""
        seen: set[str] = set()
        for name, tensor in named:
            if name not in self._wanted:
                if is_ignorable(name, self._config):
                    continue
                raise CheckpointError(f"weight {name} is not part of this {self._config.family} model")
            if tuple(tensor.shape) != self._wanted[name]:
                raise CheckpointError(
                    f"weight {name} has shape {tuple(tensor.shape)}, the configuration says {self._wanted[name]}"
                )
            yield name, tensor
            seen.add(name)
            self._ever.add(name)
        missing = [name for name in self._wanted if name not in seen]
        if missing and not partial:
            raise CheckpointError(f"{len(missing)} weights were not given: {shortened(missing)}")


class Shard:
    """The part of the model that a tensor-parallel rank holds.

    Query and kv heads, the width of the MLP and of every expert, and the LM head's rows are split. The embedding table
    is whole on every rank, which saves a collective, and so are routers: all ranks choose the same experts.
    """

    def __init__(self, config: ModelConfig, rank: int, size: int):
        """Raises ConfigError for a size that does not divide the model."""
        self.rank, self.size = rank, size
        if problems := list(tp_problems(config.architecture, "rollout.tp", size)):
            raise ConfigError(problems)
        self.heads = config.num_heads // size
        self.kv_heads = config.num_kv_heads // size
        self.inter = config.intermediate_size // size
        self.expert_inter = config.moe_intermediate_size // size
        self.shared_inter = config.shared_expert_intermediate_size // size
        self.vocab = -(-config.vocab_size // size)  # padded: the last rank may hold fewer real rows
        d = config.head_dim
        kv_first = rank * self.kv_heads * d
        shared = (rank * self.shared_inter, self.shared_inter)
        self._rows = {
            "q_proj": (rank * self.heads * d, self.heads * d),
            "k_proj": (kv_first, self.kv_heads * d),
            "v_proj": (kv_first, self.kv_heads * d),
            "gate_proj": (rank * self.inter, self.inter),
            "up_proj": (rank * self.inter, self.inter),
            "shared.gate_proj": shared,
            "shared.up_proj": shared,
            "lm_head": (rank * self.vocab, max(0, min(self.vocab, config.vocab_size - rank * self.vocab))),
        }
        self._columns = {
            "o_proj": (rank * self.heads * d, self.heads * d),
            "down_proj": (rank * self.inter, self.inter),
            "shared.down_proj": shared,
        }

    def slice(self, part: str, tensor: Tensor) -> Tensor:
        """This rank's view of the full tensor of `part` ("q_proj", ..., "lm_head")."""
        if self.size == 1:
            return tensor
        if part in self._rows:
            return tensor.narrow(0, *self._rows[part])
        if part in self._columns:
            return tensor.narrow(1, *self._columns[part])
        return tensor

    def slice_experts(self, kind: str, stack: Tensor) -> Tensor:
        """This rank's view of all experts of a layer: `kind` "gate_up_proj" [E, 2F, H] as [E, 2, F / size, H], or
        "down_proj" [E, H, F] as [E, H, F / size].
        """
        mine = (self.rank * self.expert_inter, self.expert_inter)
        return stack.unflatten(1, (2, -1)).narrow(2, *mine) if kind == "gate_up_proj" else stack.narrow(2, *mine)

    def gather_logits(self, tp: TensorParallel | None, local: Tensor, vocab: int) -> Tensor:
        """[R, V/size] on each rank -> [R, V] on every rank."""
        if tp is None or self.size == 1:
            return local[:, :vocab]
        parts = tp.all_gather(local.contiguous())
        return parts.permute(1, 0, 2).reshape(local.shape[0], self.size * self.vocab)[:, :vocab].contiguous()


def empty_routed_experts(rows: int, config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Uninitialised [rows, layers with experts * k], where a decoder writes the experts of each row."""
    dtype = getattr(torch, route_type(config.num_experts))
    return torch.empty(rows, route_width(config), dtype=dtype, device=device)


def split_name(name: str) -> tuple[int | None, str, str]:
    """`model.layers.3.self_attn.q_proj.weight` -> (3, "q_proj", "weight"); outside layers (None, "norm", "weight").

    A stack of experts is (3, "experts", "down_proj"), the shared expert's part (3, "shared.down_proj", "weight").
    """
    fields = name.split(".")
    layer = int(fields[2]) if fields[1] == "layers" else None
    shared = "shared." if "shared_expert" in fields else ""
    return layer, shared + fields[-2], fields[-1]
