"""What every rollout form of the EAGLE drafter offers (PyTorch in `eagle.py`, C in `native_eagle.py`).

The drafter reads pairs: at position s, the token there and the policy's final hidden state (after the final norm) of
position s - 1. Its output hidden state at s stands for the policy's at s, so the policy's LM head gives the
distribution of the token at s + 1, and the next pair is (that token, that hidden state). Pair s is cached in
slot s of the same block tables as the policy's (a prompt's blocks are shared by its samples, and pair s knows nothing
after s); slot 0 is never read.

Legend: T rows (pairs), S sequences, H hidden size, V vocabulary, L drafted tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput

DEPTHS = 8  # draft positions of the match-rate table; the last stands for all deeper ones
BUCKETS = 32  # of the gap between best and second candidate
BUCKET_WIDTH = 0.25  # bucket of a gap: min(BUCKETS - 1, floor(gap / BUCKET_WIDTH))


@dataclass(slots=True)
class EagleInput:
    """`batch.positions` are the pairs' s; `batch.logit_rows` the last row of each sequence.

    `block_tables` and `slot_mapping` are the policy's. Row s attends to cached pairs `first_visible[seq] .. s`.
    """

    batch: DecoderInput
    hidden: Tensor  # [T, H], policy's hidden state of position s - 1, in the compute type
    first_visible: Tensor  # [S] int32, >= 1


@dataclass(slots=True)
class DraftParams:
    """How S chains are drafted (numpy). Candidates at a position are the K largest of logits / T + noise."""

    keys: np.ndarray  # uint64 [S], request keys (`models.keys.request_key`)
    output_positions: np.ndarray  # int32 [S], output position t of the first drafted token
    temperature: np.ndarray  # float32 [S], 0: greedy
    max_len: np.ndarray  # int32 [S], most tokens to draft; blocks for them exist
    topk: int
    rates: (
        np.ndarray
    )  # float32 [DEPTHS, BUCKETS], estimated P(match) by depth and gap between best and second
    min_cumulative_acceptance: (
        float  # a chain ends before a token whose cumulative acceptance (product of rates) is below
    )
    want_logits: bool = False


@dataclass(slots=True)
class DraftRows:
    """Drafted chains. Entry [s, l] is valid for l < lengths[s]."""

    lengths: np.ndarray  # int32 [S]
    tokens: np.ndarray  # int32 [S, L, K], best first
    gaps: (
        np.ndarray
    )  # float32 [S, L, K]: [.., 0] best minus second best score; [.., k] best minus k-th, k >= 1
    cumulative_acceptance: np.ndarray  # float32 [S, L], of the best token: product of the rates up to it
    logits: np.ndarray | None = None  # float32 [S, L, V], if wanted


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

    def forward(self, inputs: EagleInput, kv: KVCache) -> DecoderOutput:
        """One pass over the pairs: logits and hidden states of `batch.logit_rows`; writes the cache."""

    def draft(self, inputs: EagleInput, params: DraftParams, kv: KVCache) -> DraftRows:
        """Feeds the pairs, then drafts a chain for each sequence; writes the cache at the drafted positions too."""


def eagle_parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the drafter of a policy: what it trains, saves and loads. Never embedding or LM head.

    `fc` joins [embedding of the token at s ; hidden state of s - 1], in this order; the layer is one of the
    policy's, without the norm before its attention; no norm follows it (TLT's form of EAGLE).
    """
    one = replace(config, num_layers=1)
    prefix = "model.layers.0."
    layer = {
        f"layer.{name.removeprefix(prefix)}": shape
        for name, shape in one.parameter_shapes().items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    return {"fc.weight": (config.hidden_size, 2 * config.hidden_size), **layer}


class DraftRecorder:
    """Fills a `DraftRows`, draft position by draft position."""

    def __init__(self, params: DraftParams, vocab: int):
        count, longest = len(params.keys), int(params.max_len.max(initial=0))
        self._params, self._cumulative_acceptance = params, np.ones(count, np.float32)
        self._out = DraftRows(
            np.zeros(count, np.int32),
            np.zeros((count, longest, params.topk), np.int32),
            np.zeros((count, longest, params.topk), np.float32),
            np.zeros((count, longest), np.float32),
            np.zeros((count, longest, vocab), np.float32) if params.want_logits else None,
        )

    def take(
        self, step: int, active: np.ndarray, tokens: np.ndarray, gaps: np.ndarray, logits: Tensor
    ) -> np.ndarray:
        """Notes what the chains `active` [A] drew at position `step`; bool [A]: which of them go on behind it.

        tokens int32 [A, K or more], best first; gaps float32 as `gaps_of`; logits [A, V]. A chain that could not
        survive its next token, however large that token's gap, ends here.
        """
        params, out, k = self._params, self._out, self._params.topk
        bucket = np.minimum(gaps[:, 0] / BUCKET_WIDTH, BUCKETS - 1).astype(np.int64)
        self._cumulative_acceptance[active] *= params.rates[min(step, DEPTHS - 1), bucket]
        kept = self._cumulative_acceptance[active] >= params.min_cumulative_acceptance
        rows = active[kept]
        out.lengths[rows] = step + 1
        out.tokens[rows, step], out.gaps[rows, step] = tokens[kept, :k], gaps[kept, :k]
        out.cumulative_acceptance[rows, step] = self._cumulative_acceptance[rows]
        if out.logits is not None:
            out.logits[rows, step] = logits.float().cpu().numpy()[kept]
        most = params.rates[min(step + 1, DEPTHS - 1)].max()
        may_survive = self._cumulative_acceptance[active] * most >= params.min_cumulative_acceptance
        going: np.ndarray = kept & may_survive & (params.max_len[active] > step + 1)
        return going

    def result(self) -> DraftRows:
        """The drafts."""
        return self._out


def gaps_of(scores: np.ndarray) -> np.ndarray:
    """Gaps float32 [A, C], as in `DraftRows`, of candidates' scores [A, C], best first; infinite for a single one."""
    gaps: np.ndarray = scores[:, :1] - scores
    gaps[:, 0] = gaps[:, 1] if scores.shape[1] > 1 else np.inf
    return gaps
