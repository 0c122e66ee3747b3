"""`NativeDecoder`: the rollout decoder on CPU, in C (`csrc/`), one call a forward.

Results are independent of the batch, bit for bit: see `csrc/gemm.c` and `csrc/attention.c` for why.
Legend: T rows, R wanted rows, H hidden size, D head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import BackendError, ConfigError, ConfigProblem
from megatron_tlt.models.base import KVCache, NamedTensors, Shard, WeightLedger, split_name
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.layers import rope_table
from megatron_tlt.models.native_abi import BAD_POSITION, ERRORS, AllReduce, Layer, Model, Step, library

TILE = 16  # cached positions in a tile: block sizes are multiples of it
MAX_HEAD_DIM = 256
_MAX_ROWS = 256  # rows computed together; longer batches are walked in chunks of this many
_FIRST_POSITIONS = 4096  # rotary table at start; it grows by need


class NativeDecoder:
    """See `base.Decoder`. `threads` is the size of the team of one forward; between forwards it sleeps.

    A process has one team: forwards of several decoders in threads of one process take turns, so
    tensor-parallel ranks must be processes (in one process the second rank would wait for the first one's
    all-reduce for ever).
    """

    kind = "native"
    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        tp: TensorParallel | None = None,
    ):
        """Raises BackendError without a C compiler, ConfigError for a dtype, head or TP size it cannot do."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                ConfigProblem("dtype", str(dtype), "the native decoder computes float32 or bfloat16")
            )
        if config.head_dim > MAX_HEAD_DIM:
            raise ConfigError(ConfigProblem("head_dim", config.head_dim, f"must be at most {MAX_HEAD_DIM}"))
        self._lib = library()
        self.config, self.dtype, self.threads = config, dtype, max(1, threads)
        self._tp = tp
        self._shard = Shard(config, tp.rank if tp else 0, tp.size if tp else 1)
        self._ledger = WeightLedger(config)
        self._bf16 = dtype == torch.bfloat16
        self._panel = self._lib.tlt_panel_width()
        self._keep: list[Any] = []  # owners of the memory that the structures point into
        self._reduce_error: BaseException | None = None
        self._allocate_weights()
        self._allocate_buffers()
        self._callback = AllReduce(self._all_reduce) if self._shard.size > 1 else AllReduce()
        self._step = Step()

    @property
    def isa(self) -> str:
        """The instruction set that the library was compiled for, for logs."""
        return self._lib.tlt_isa().decode()

    # -- memory ---------------------------------------------------------------------------------------------

    def _packed_bytes(self, columns: int, k: int) -> int:
        panels = -(-columns // self._panel)
        return panels * self._panel * 4 * ((k + 1) // 2 if self._bf16 else k)

    def _allocate_weights(self) -> None:
        c, s = self.config, self._shard
        d, h, wide = c.head_dim, c.hidden_size, _pad(c.hidden_size)
        qkv = (s.heads + 2 * s.kv_heads) * d
        sizes = {
            "qkv": self._packed_bytes(qkv, h),
            "o": self._packed_bytes(h, s.heads * d),
            "gate_up": 2 * self._packed_bytes(s.inter, h),
            "down": self._packed_bytes(h, s.inter),
        }
        head = self._packed_bytes(s.vocab, h)
        arena = _Arena(c.num_layers * sum(_align(n) for n in sizes.values()) + _align(head))
        self._weights = [{name: arena.take(n) for name, n in sizes.items()} for _ in range(c.num_layers)]
        self._head = arena.take(head)
        self._embed = torch.zeros(c.vocab_size, h, dtype=self.dtype)
        self._final_norm = torch.zeros(wide)
        self._vectors = [
            {
                "qkv_bias": torch.zeros(_pad(qkv)),
                "input_norm": torch.zeros(wide),
                "post_norm": torch.zeros(wide),
            }
            | ({"q_norm": torch.zeros(d), "k_norm": torch.zeros(d)} if c.qk_norm else {})
            for _ in range(c.num_layers)
        ]
        self._c_layers = (Layer * c.num_layers)()
        for layer, weights, vectors in zip(self._c_layers, self._weights, self._vectors, strict=True):
            for name, tensor in (weights | vectors).items():
                setattr(layer, name, tensor.data_ptr())

    def _allocate_buffers(self) -> None:
        c, s = self.config, self._shard
        h, padded = _pad(c.hidden_size), -(-c.head_dim // TILE) * TILE
        self._part = torch.zeros(_MAX_ROWS * h)
        self._rope = rope_table(c, min(c.max_position_embeddings, _FIRST_POSITIONS))

        def buffer(columns: int) -> int:
            # 16 columns to spare: vector stores of the last row may run over
            self._keep.append(torch.zeros(_MAX_ROWS * columns + 16))
            return self._keep[-1].data_ptr()

        self._model = Model(
            is_bf16=self._bf16,
            hidden=c.hidden_size,
            layers=c.num_layers,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=c.head_dim,
            inter=s.inter,
            vocab=s.vocab,
            embed_rows=c.vocab_size,
            max_rows=_MAX_ROWS,
            rope_len=self._rope.shape[0],
            tp=s.size,
            eps=c.rms_norm_eps,
            rope=self._rope.data_ptr(),
            embed=self._embed.data_ptr(),
            head=self._head.data_ptr(),
            final_norm=self._final_norm.data_ptr(),
            layer=self._c_layers,
            resid=buffer(h),
            part=self._part.data_ptr(),
            qkv_out=buffer(_pad((s.heads + 2 * s.kv_heads) * c.head_dim)),
            x=buffer(h),
            q=buffer(s.heads * padded),
            att=buffer(_pad(s.heads * c.head_dim)),
            mid=buffer(_pad(s.inter)),
            units=buffer(3),
            picked=buffer(2),
        )

    # -- weights --------------------------------------------------------------------------------------------

    def load_weights(self, named: NamedTensors, partial: bool = False) -> None:
        """See `base.Decoder.load_weights`. Each tensor is packed straight from its source, by all threads."""
        for name, tensor in self._ledger.check(named, partial):
            self._load(name, tensor)

    def _load(self, name: str, tensor: Tensor) -> None:
        c, s = self.config, self._shard
        index, part, kind = split_name(name)
        source = s.slice(part, tensor.detach())
        if index is None:
            if part == "norm":
                self._final_norm[: c.hidden_size].copy_(source)
            if part == "embed_tokens":
                self._embed.copy_(source)
            if part == "lm_head" or (part == "embed_tokens" and c.tie_word_embeddings):
                self._pack(self._head, s.slice("lm_head", tensor.detach()))
            return
        weights, vectors = self._weights[index], self._vectors[index]
        first = {"k_proj": s.heads, "v_proj": s.heads + s.kv_heads}.get(part, 0) * c.head_dim
        if kind == "bias":
            vectors["qkv_bias"][first : first + source.shape[0]].copy_(source)
        elif part in ("q_proj", "k_proj", "v_proj"):
            self._pack(weights["qkv"], source, first)
        elif part in ("gate_proj", "up_proj"):
            self._pack(weights["gate_up"], source, 0, 2, part == "up_proj")
        elif part in ("o_proj", "down_proj"):
            self._pack(weights[part.removesuffix("_proj")], source)
        else:
            renamed = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
            vectors[renamed.get(part, part)][: source.shape[0]].copy_(source)

    def _pack(self, target: Tensor, source: Tensor, first: int = 0, step: int = 1, offset: int = 0) -> None:
        """Writes source [rows, K] as output columns `first` ... of a packed weight."""
        if source.dtype not in (torch.float32, torch.bfloat16):
            source = source.float()
        source = source.cpu()
        if source.stride(-1) != 1:
            source = source.contiguous()
        rows, k = source.shape
        from_bf16, stride = source.dtype == torch.bfloat16, source.stride(0)
        where = (rows, k, stride, first, step, offset)
        self._lib.tlt_pack(target.data_ptr(), source.data_ptr(), from_bf16, self._bf16, *where, self.threads)

    # -- cache ----------------------------------------------------------------------------------------------

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers, heads padded to the tiles' width."""
        padded = -(-self.config.head_dim // TILE) * TILE
        return self.config.num_layers * 2 * self._shard.kv_heads * block_size * padded * self.dtype.itemsize

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed; memory is taken as blocks are written. Raises ConfigError unless 16 divides `block_size`."""
        if block_size < 1 or block_size % TILE:
            raise ConfigError(ConfigProblem("block_size", block_size, f"must be a multiple of {TILE}"))
        size = max(1, num_blocks * self.kv_bytes_per_block(block_size))
        return KVCache(num_blocks, block_size, _Arena(size).take(size))

    def copy_blocks(self, kv: KVCache, src: Sequence[int] | Tensor, dst: Sequence[int] | Tensor) -> None:
        """Copies block src[i] to dst[i] in every layer, in order of i. Raises BackendError on wrong numbers."""
        a, b = torch.as_tensor(src, dtype=torch.int32), torch.as_tensor(dst, dtype=torch.int32)
        if a.shape != b.shape or (
            a.numel() and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) >= kv.num_blocks)
        ):
            raise BackendError(f"copy_blocks: blocks {a.tolist()} -> {b.tolist()} of {kv.num_blocks}")
        planes = 2 * self.config.num_layers
        block = self.kv_bytes_per_block(kv.block_size) // planes
        self._lib.tlt_copy_blocks(
            kv.data.data_ptr(), planes, kv.num_blocks, block, a.data_ptr(), b.data_ptr(), a.numel()
        )

    # -- forward --------------------------------------------------------------------------------------------

    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """See `base.Decoder.forward`.

        Raises BackendError for weights that are missing and for a batch that C could not read safely: its
        tensors must be contiguous int32 on CPU, of the shapes in `DecoderInput`.
        """
        if not self._ledger.complete:
            raise BackendError("forward before all weights were loaded")
        wanted = batch.logit_rows.shape[0]
        logits = torch.empty(wanted, self._shard.vocab)
        hidden = torch.empty(wanted, self.config.hidden_size, dtype=self.dtype)
        step = self._step
        tokens, seqs = batch.token_ids.shape[0], batch.context_lens.shape[0]
        for field, tensor, rows in (
            ("token_ids", batch.token_ids, tokens),
            ("positions", batch.positions, tokens),
            ("slots", batch.slot_mapping, tokens),
            ("query_start", batch.query_start, seqs + 1),
            ("context_lens", batch.context_lens, seqs),
            ("block_tables", batch.block_tables, seqs),
            ("logit_rows", batch.logit_rows, wanted),
        ):
            is_plain = tensor.dtype == torch.int32 and tensor.is_contiguous() and not tensor.is_cuda
            if not is_plain or tensor.shape[0] != rows:
                raise BackendError(
                    f"decoder input {field} must be contiguous int32 on CPU of {rows} rows, not "
                    f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )
            setattr(step, field, tensor.data_ptr())
        step.tokens, step.seqs = tokens, seqs
        step.logits_rows, step.max_blocks = wanted, batch.block_tables.shape[1]
        step.num_blocks, step.block_size = kv.num_blocks, kv.block_size
        step.kv, step.logits, step.hidden = kv.data.data_ptr(), logits.data_ptr(), hidden.data_ptr()
        step.logits_stride = self._shard.vocab
        self._run(batch)
        return DecoderOutput(self._shard.gather_logits(self._tp, logits, self.config.vocab_size), hidden)

    def _run(self, batch: DecoderInput) -> None:
        code = self._lib.tlt_forward(self._model, self._step, self.threads, self._callback)
        if code == BAD_POSITION and self._grow_rope(int(batch.positions.max()) + 1):
            code = self._lib.tlt_forward(self._model, self._step, self.threads, self._callback)
        if code:
            error, self._reduce_error = self._reduce_error, None
            raise BackendError(f"native forward refused: {ERRORS.get(code, code)}") from error

    def _grow_rope(self, needed: int) -> bool:
        limit = self.config.max_position_embeddings
        if needed > limit or needed <= self._rope.shape[0]:
            return False
        self._rope = rope_table(self.config, min(limit, 2 * needed))
        self._model.rope, self._model.rope_len = self._rope.data_ptr(), self._rope.shape[0]
        return True

    def _all_reduce(self, _address: int, count: int) -> int:
        """Called from C on the calling thread, between two barriers; an exception becomes an error code."""
        assert self._tp is not None
        try:
            self._tp.all_reduce(self._part[:count])
        except BaseException as e:  # noqa: BLE001  # C cannot unwind Python; `_run` raises it again
            self._reduce_error = e
            return 1
        return 0


def keyed_sample(
    logits: Tensor,
    temperature: Tensor,
    seed_keys: Tensor,
    out_token: Tensor | None = None,
    out_logprob: Tensor | None = None,
    threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by keyed Gumbel noise (`csrc/sample.c`); the result ignores batch and threads.

    logits [R, V] float32, rows contiguous; temperature [R] float32 (0: greedy); seed_keys [R] uint64 or
    int64 (bits); returns (token [R] int32, logprob [R] float32), written into `out_token`, `out_logprob`
    if given. logprob is log_softmax(logits / (T or 1))[token]. Raises BackendError on other types or row counts.
    """
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int32) if out_token is None else out_token
    logprob = torch.empty(rows, dtype=torch.float32) if out_logprob is None else out_logprob
    for tensor, dtypes in (
        (logits, (torch.float32,)),
        (temperature, (torch.float32,)),
        (seed_keys, (torch.uint64, torch.int64)),
        (token, (torch.int32,)),
        (logprob, (torch.float32,)),
    ):
        if tensor.dtype not in dtypes or tensor.shape[0] != rows or tensor.stride(-1) != 1 or tensor.is_cuda:
            raise BackendError(
                f"keyed_sample: a CPU tensor of {rows} rows and {dtypes[0]} is needed, got "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
    lib = library()
    scratch = torch.empty(lib.tlt_sample_scratch_bytes(rows, vocab), dtype=torch.uint8)
    inputs = (logits.data_ptr(), rows, vocab, logits.stride(0), temperature.data_ptr(), seed_keys.data_ptr())
    outputs = (token.data_ptr(), logprob.data_ptr())
    lib.tlt_keyed_sample(*inputs, *outputs, scratch.data_ptr(), max(1, threads))
    return token, logprob


class _Arena:
    """Zeroed anonymous memory, taken from the system page by page as it is touched; large pages if possible."""

    def __init__(self, size: int):
        memory = mmap.mmap(-1, _align(size))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages: only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._all = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
        self._used = 0

    def take(self, size: int) -> Tensor:
        """[size] uint8, page-aligned."""
        view = self._all[self._used : self._used + size]
        self._used += _align(size)
        return view


def _pad(n: int) -> int:
    return -(-n // 64) * 64


def _align(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE
