"""What rank 0 of a tensor-parallel engine sends in a decoding step: strategy and draft, as numbers of the host.

The sizes of both are known to all ranks, so each is one broadcast, and nothing is pickled.
Legend: B running rows, N drafted nodes.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.types import DraftStrategy

_KIND_BYTES = 16  # of a strategy's kind
_HEADER = 6  # int32: N; which of four fields there are; padding to whole float64


def agreed_strategy(tp: TensorParallel, strategy: DraftStrategy) -> DraftStrategy:
    """Rank 0's strategy. Collective."""
    if tp.size == 1:
        return strategy
    integers = strategy.draft_len, strategy.topk, strategy.num_verify_tokens
    numbers = np.array([*integers, strategy.min_cumulative_acceptance], np.float64)
    kind = strategy.kind.encode().ljust(_KIND_BYTES, b"\0")
    message = np.frombuffer(bytearray(kind + numbers.tobytes()), np.uint8)
    tp.broadcast(torch.from_numpy(message))
    length, topk, most, least = message[_KIND_BYTES:].view(np.float64).tolist()
    name = message[:_KIND_BYTES].tobytes().rstrip(b"\0").decode()
    return DraftStrategy(name, int(length), int(topk), int(most), least)


def agreed_draft(tp: TensorParallel, draft: Draft, most: int) -> Draft:
    """Rank 0's draft, of at most `most` nodes. `draft` is of equally many rows on all ranks. Collective."""
    if tp.size == 1:
        return draft
    count, rows = draft.num_nodes, len(draft.counts)
    assert count <= most, "a row has more nodes than were reserved for it"
    message = np.zeros(_HEADER + 4 * rows + 5 * most, np.int32)
    header, by_row = message[:_HEADER], message[_HEADER : _HEADER + 4 * rows].reshape(4, rows)
    nodes = message[_HEADER + 4 * rows :].reshape(5, most)
    passed_over, (counts, source) = by_row[:2].reshape(-1).view(np.float64), by_row[2:]
    fields = draft.parents, draft.feature, draft.source, draft.passed_over
    header[:5] = count, *(field is not None for field in fields)
    counts[:] = draft.counts
    values = (draft.tokens, draft.cumulative_acceptance.view(np.int32), draft.depths, draft.parents, draft.feature)
    for place, value in zip([*nodes[:, :count], source, passed_over], [*values, *fields[2:]], strict=True):
        if value is not None:
            place[:] = value
    tp.broadcast(torch.from_numpy(message))
    nodes = nodes[:, : header[0]]
    has_parents, has_feature, has_source, has_passed = header[1:5].tolist()
    return Draft(
        counts,
        nodes[0],
        nodes[1].view(np.float32),
        nodes[2],
        nodes[3] if has_parents else None,
        nodes[4] if has_feature else None,
        source.astype(np.int8) if has_source else None,
        passed_over if has_passed else None,
    )
