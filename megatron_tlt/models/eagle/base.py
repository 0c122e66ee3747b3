"""The EAGLE drafter in rollouts: what its PyTorch (`torch_drafter.py`) and C (`native/eagle.py`) forms have in common.

The drafter reads pairs: at position s, the token there and the policy's final hidden state (after the final norm) of
position s - 1. Its output hidden state at s approximates the policy's at s, so the policy's LM head gives the
distribution of the token at s + 1, and the next pair is (that token, that hidden state). Keys and values of pair s are
cached in slot s of the policy's block tables (samples of a prompt share its blocks); slot 0 is never read. There is one
layer, so a cached pair costs the projections to its key and value and nothing else.

Under tensor parallelism every rank holds and runs the whole drafter.

Legend: T pairs, B running rows, S slots of the engine, N drafted tokens of all rows, H hidden size, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig

DEPTHS = 8  # draft positions of the match-rate table; the last row stands for all deeper ones
BUCKETS = 32  # of the gap between the scores of the best and the second candidate
BUCKET_WIDTH = 0.25  # score; bucket of a gap: min(BUCKETS - 1, floor(gap / BUCKET_WIDTH))
MAX_CANDIDATES = 4  # K is at most this


@dataclass(slots=True)
class Pairs:
    """T pairs to cache; int32 numpy arrays [T]."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray  # where key and value go
    state_slots: np.ndarray  # of the hidden state of the position before, in the paged hidden states


@dataclass(frozen=True, slots=True)
class DraftingRows:
    """The engine's running rows: contiguous arrays that stay where they are and are read at every draft."""

    slot: np.ndarray  # int32 [B], of the row's request
    positions: np.ndarray  # int32 [B], of the row's last token
    output_len: np.ndarray  # int32 [B], tokens drawn so far
    block_tables: np.ndarray  # int32 [S, blocks]
    keys: np.ndarray  # uint64 [B], of the requests (`models.keys.request_key`)
    temperature: np.ndarray  # float32 [B], 0: greedy
    synced: np.ndarray  # int32 [S], last position whose pair is cached; written by drafts
    first: np.ndarray  # int32 [S], first position that the drafter attends to; written by drafts


@dataclass(frozen=True, slots=True)
class Chains:
    """Drafted chains of B rows, flat in row order. Candidates are the K largest of logits / T + keyed noise."""

    counts: np.ndarray  # int32 [B], tokens of each row
    tokens: np.ndarray  # int32 [N], the best candidates
    cumulative_acceptance: np.ndarray  # float32 [N], product of the match rates up to the token
    depths: np.ndarray  # int32 [N], from 1
    feature: np.ndarray  # int32 [N], min(depth - 1, DEPTHS - 1) * BUCKETS + bucket of the gap to the second
    sibling_tokens: np.ndarray  # int32 [N, K - 1], the other candidates, best first
    sibling_gaps: np.ndarray  # float32 [N, K - 1], best score minus theirs


class RowDrafter(Protocol):
    """Drafts for one set of running rows over one cache. Not thread-safe."""

    def point_at(self, kv: KVCache, pages: Tensor) -> None:
        """Uses this memory from now on (empty after a release: no draft may follow then)."""

    def draft(
        self, outputs: np.ndarray, wanted: np.ndarray, topk: int, rates: np.ndarray, min_acceptance: float
    ) -> Chains:
        """Caches the missing pairs of each row, at most the window's, and drafts up to `wanted` int [B] tokens for it.

        `outputs` int32 [S, any] holds the tokens drawn so far; `rates` float32 [DEPTHS, BUCKETS] estimates P(match); a
        chain ends before a token whose cumulative acceptance is below `min_acceptance`. A row whose last pair is cached
        has nothing to start from and gets no draft. Writes the cache, at drafted positions too, and `synced` and
        `first`. Raises BackendError for arguments that do not fit and before all weights are loaded.
        """


class EagleDecoder(Protocol):
    """A drafter in the engine. Embedding and LM head are the policy decoder's own, read at every call."""

    kind: str  # "native" or "torch"
    dtype: torch.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A cache of one layer."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of one block, in bytes."""

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies block src[i] to dst[i]."""

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes all tensors of `eagle_parameter_shapes`. Raises CheckpointError for wrong names or shapes."""

    def feed(self, pairs: Pairs, pages: Tensor, kv: KVCache) -> None:
        """Caches `pairs`; `pages` [slots, H] are the policy's hidden states. Mutates `kv`."""

    def row_drafter(self, kv: KVCache, rows: DraftingRows, pages: Tensor, window: int) -> RowDrafter:
        """Drafts for `rows`, which catch up with at most their last `window` pairs."""


def eagle_parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the drafter of a policy: what it trains, saves and loads. Never embedding or LM head.

    `fc` joins [embedding of the token at s ; hidden state of s - 1], in this order; the layer is one of the
    policy's dense sibling, without the norm before its attention; no norm follows it (TLT's form of EAGLE).
    """
    one = replace(config.dense_sibling, num_layers=1)
    prefix = "model.layers.0."
    layer = {
        f"layer.{name.removeprefix(prefix)}": shape
        for name, shape in one.parameter_shapes().items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    return {"fc.weight": (config.hidden_size, 2 * config.hidden_size), **layer}


def shape_problems(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every missing, unexpected and misshapen tensor, in words."""
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is not part of the drafter" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {given[name]}, the policy needs {shape}"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    return problems


def refuse_drafter(problems: list[str]) -> None:
    """Raises CheckpointError that names the problems, if there are any."""
    if problems:
        raise CheckpointError(f"the drafter does not fit the policy: {shortened(problems, separator='; ')}")
