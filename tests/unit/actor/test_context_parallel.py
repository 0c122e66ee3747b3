"""Who holds which rows of a micro-batch under context parallelism, and what Transformer Engine is given of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor import context_parallel
from megatron_tlt.actor.attention import PackedRows
from megatron_tlt.actor.context_parallel import GatheredKeysAttention
from megatron_tlt.actor.microbatch import MicroBatch, RowLayout, pack_micro_batches
from tests.mpi.workers.actor_common import sequences, shortened

CPU = torch.device("cpu")


def of_ranks(cp: int, tp: int = 1, budget: int = 200) -> list[list[MicroBatch]]:
    """Micro-batches by rank."""
    layouts = [RowLayout(CPU, "thd", tp, cp, rank) for rank in range(cp)]
    return [pack_micro_batches(shortened(sequences(12)), budget, layout) for layout in layouts]


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), (4, 2)])
def test_the_ranks_of_a_group_hold_every_row_once(cp, tp):
    for parts in zip(*of_ranks(cp, tp), strict=True):
        first, rows = parts[0], [len(part.input_ids[0]) for part in parts]
        assert rows == [rows[0]] * cp and rows[0] % tp == 0
        gathered = torch.cat([torch.stack([part.input_ids[0], part.positions[0]]) for part in parts], 1)
        tokens, positions = gathered[:, first.packing.to_whole].tolist()
        assert sorted(first.packing.to_whole.tolist()) == list(range(sum(rows)))
        at = 0
        for sequence, end in zip(first.sequences, first.packing.cu_seqlens_q[1:].tolist(), strict=False):
            fed = sequence.trajectory.length - 1
            assert tokens[at : at + fed] == sequence.trajectory.token_ids[:-1].tolist()
            assert not any(tokens[at + fed : end]) and positions[at:end] == list(range(end - at))
            assert (end - at) % (2 * cp) == 0
            at = end


def test_a_rank_holds_a_chunk_from_the_front_and_its_mirror():
    """Transformer Engine's order: rank r has chunks r and 2 cp - 1 - r of every sequence."""
    for rank, batches in enumerate(of_ranks(4)):
        for batch in batches:
            positions, at = batch.positions[0].tolist(), 0
            for size in batch.packing.cu_seqlens_q.diff().tolist():
                c = size // 8
                front, back = rank * c, (7 - rank) * c
                assert positions[at : at + 2 * c] == [*range(front, front + c), *range(back, back + c)]
                at += 2 * c


def test_transformer_engine_gets_whole_sequences_without_gaps():
    """The same tensor object for bounds with and without padding is what keeps flash attention eligible."""
    for batch in of_ranks(2)[1]:
        packing = batch.packing
        bounds = packing.cu_seqlens_q
        assert packing.cu_seqlens_q_padded is packing.cu_seqlens_kv_padded is packing.cu_seqlens_kv is bounds
        assert int(bounds[-1]) == 2 * len(batch.input_ids[0]) and packing.max_seqlen_q == int(bounds.diff().max())
    plain = pack_micro_batches(sequences(3), 200, RowLayout(CPU, "thd"))[0]
    assert plain.packing.cu_seqlens_q_padded is None and plain.own is None


def test_a_chunk_asks_for_its_heads(monkeypatch):
    """Where they are repeated, the outcome is the same."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    config, asked = SimpleNamespace(attention_dropout=0.0, kv_channels=8), []
    layer = GatheredKeysAttention(config, pg_collection=SimpleNamespace(cp=group))
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(*shape, generator=generator) for shape in ((4, 6, 8), (8, 2, 16)))

    def repeated(query: torch.Tensor, *heads: torch.Tensor) -> list[torch.Tensor]:
        asked.append(query.shape[1])
        return [t.repeat_interleave(3, 1) for t in heads]

    want = layer._of_run((1, 8), query, keys, PackedRows())
    monkeypatch.setattr(context_parallel, "heads_for", repeated)
    torch.testing.assert_close(layer._of_run((1, 8), query, keys, PackedRows()), want)
    assert asked == [6, 6]
