"""`NativeDecoder`: the rollout decoder on CPU, in C (`csrc/`), one call a forward.

Weights, KV cache and inputs of products are float32 or bfloat16; residual stream, norms, sums and logits are float32.

Results are independent of the batch, bit for bit: see `csrc/gemm.c` and `csrc/attention.c` for why.
Legend: T rows, R wanted rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import (
    KVCache,
    NamedTensors,
    Shard,
    WeightLedger,
    empty_routed_experts,
    split_name,
)
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.decoders.native.abi import ERRORS, REDUCE_FAILED, TltStep, library
from megatron_tlt.models.decoders.native.parts import (
    Forward,
    PackedLayers,
    Packer,
    fill_step,
    kv_bytes_per_block,
    new_kv_cache,
    pad,
)
from megatron_tlt.models.hf.config import ModelConfig

Numbers = Sequence[int] | np.ndarray | Tensor


class NativeDecoder:
    """A `base.Decoder` in C. `threads` is the size of the team of one forward; between forwards it sleeps. A forked
    child has no team and must not decode with several threads.

    A library has one team: forwards of several decoders in threads of one process take turns, so
    tensor-parallel ranks must be processes (in one process the second rank would wait for the first one's
    all-reduce for ever).
    """

    kind = "native"
    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        threads: int = 1,
        tp: TensorParallel | None = None,
        aux_layers: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ):
        """`aux_layers`: see `base.Decoder`, at most 16. Raises BackendError without a C compiler, ConfigError for
        a head or TP size that it does not support.
        """
        self.dtype, self.config = dtype, config
        self._lib = library(dtype == torch.bfloat16)
        self.threads = max(1, threads)
        self.aux_layers = aux_layers
        self.state_size = (len(aux_layers) + 1) * config.hidden_size
        self._shard = Shard(config, tp.rank if tp else 0, tp.size if tp else 1)
        self._ledger = WeightLedger(config)
        self.head_version = 0
        h = config.hidden_size
        self._packer = Packer(dtype)
        self._layers = PackedLayers(config, self._shard, self._packer, (config.vocab_size, h))
        self._embed = torch.zeros(config.vocab_size, h, dtype=dtype)
        self._final_norm = torch.zeros(pad(h))
        self._forward = Forward(config, self._shard, tp, self._layers)
        self._forward.model.embed = self._embed.data_ptr()
        self._forward.model.head = self._layers.extra.data_ptr()
        self._forward.model.final_norm = self._final_norm.data_ptr()
        self._forward.model.aux_count = len(aux_layers)
        self._forward.model.aux[: len(aux_layers)] = aux_layers
        self._step = TltStep()

    @property
    def complete(self) -> bool:
        """Whether all weights were loaded."""
        return self._ledger.complete

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The embedding table [V, H] and the packed LM head, where they stay: weights are loaded in place."""
        return self._embed, self._layers.extra

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        """Both tables [V, H]; an LM head that is not the embedding is unpacked into a copy."""
        if self.config.tie_word_embeddings:
            return self._embed, self._embed
        return self._embed, self._packer.unpack(self._layers.extra, *self._embed.shape)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed[token_ids]

    # -- weights --------------------------------------------------------------------------------------------

    def load_weights(self, named: NamedTensors, partial: bool = False) -> None:
        for name, tensor in self._ledger.check(named, partial):
            self._load(name, tensor.detach())

    def _load(self, name: str, tensor: Tensor) -> None:
        index, part, kind = split_name(name)
        if index is not None:
            self._layers.load(index, part, kind, tensor)
            return
        if part == "norm":
            self._final_norm[: self.config.hidden_size].copy_(tensor)
        if part == "embed_tokens":
            self._embed.copy_(tensor)
        if part == "lm_head" or (part == "embed_tokens" and self.config.tie_word_embeddings):
            self.head_version += 1
            self._packer.pack(self._layers.extra, tensor)

    # -- cache ----------------------------------------------------------------------------------------------

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers, heads padded to the tiles' width."""
        return kv_bytes_per_block(self.config, self._shard, block_size, self.dtype)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; memory is allocated as blocks are written. 16 must divide `block_size`."""
        return new_kv_cache(num_blocks, block_size, self.kv_bytes_per_block(block_size))

    def copy_blocks(self, kv: KVCache, src: Numbers, dst: Numbers) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i."""
        copy_blocks(kv, src, dst, self.config.num_layers)

    # -- forward --------------------------------------------------------------------------------------------

    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """Raises BackendError for weights that are missing, for numbers outside their range and for an all-reduce that
        failed, KeyboardInterrupt after Ctrl-C in one. The batch's tensors are contiguous int32 on CPU.
        """
        if not self._ledger.complete:
            raise BackendError("forward before all weights were loaded")
        step = self._step
        fill_step(step, batch, kv)
        wanted, tokens, width = step.logits_rows, step.tokens, self.state_size
        logits = torch.empty(wanted, self.config.vocab_size)
        hidden = torch.empty(tokens, width, dtype=self.dtype) if batch.all_hidden else None
        step.logits, step.hidden = logits.data_ptr(), None if hidden is None else hidden.data_ptr()
        routed_experts = empty_routed_experts(tokens, self.config) if batch.all_routed_experts else None
        step.routed_experts = None if routed_experts is None else routed_experts.data_ptr()
        forward = self._forward
        if code := self._lib.tlt_forward(forward.model, step, self.threads, forward.all_reduce):
            error, forward.reduce_error = forward.reduce_error, None
            if code == REDUCE_FAILED and not isinstance(error, Exception):
                # None: Ctrl-C at the callback's entry; ctypes prints such an exception and drops it.
                raise error or KeyboardInterrupt
            raise BackendError(f"native forward refused: {ERRORS.get(code, code)}") from error
        return DecoderOutput(logits, hidden, routed_experts)


def copy_blocks(kv: KVCache, src: Numbers, dst: Numbers, layers: int) -> None:
    """Copies block src[i] to dst[i] in every layer, in order of i."""
    blocks = kv.data.view(2 * layers, kv.num_blocks, -1)
    for source, target in zip(src, dst, strict=True):
        blocks[:, target] = blocks[:, source]


def keyed_sample(
    logits: Tensor, temperature: Tensor, seed_keys: Tensor, threads: int = 1, bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by keyed Gumbel noise (`csrc/sample.c`); the result ignores batch and threads.

    logits [R, V] float32, rows contiguous; temperature [R] float32 (0: greedy); seed_keys [R] uint64 or
    int64 (bits); returns (token [R] int32, logprob [R] float32). logprob is log_softmax(logits / (T or 1))[token].
    `bf16`: by that library, which the policy has loaded; the result is the same.
    """
    rows, vocab = logits.shape
    token, logprob = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
    for tensor in (logits, temperature, seed_keys):
        assert len(tensor) == rows and tensor.stride(-1) == 1 and tensor.device.type == "cpu"
    assert logits.dtype == temperature.dtype == torch.float32 and seed_keys.dtype.itemsize == 8
    inputs = (logits.data_ptr(), rows, vocab, logits.stride(0), temperature.data_ptr(), seed_keys.data_ptr())
    outputs = (token.data_ptr(), logprob.data_ptr())
    if code := library(bf16).tlt_keyed_sample(*inputs, *outputs, max(1, threads)):
        raise BackendError(f"keyed_sample: {ERRORS[code]}")
    return token, logprob
