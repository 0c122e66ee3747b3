"""Captured graphs of the recipe's policy: the same results as eager forwards, their cost, memory, and what they save.

launches    kernels of one decoding forward outside a graph, and of them those of one layer (torch's profiler)
graph / eager   milliseconds of a forward by sequences and rows of each; of a graph with the upload of its inputs
error_after_release   of a replay after the cache's memory was given back and taken again
mib         of all graphs with their buffers
"""

from __future__ import annotations

import statistics

from benchmarks.gpu.batches import BLOCK, blocks_for, chains
from benchmarks.gpu.check import Check
from benchmarks.gpu.kernels import LIMITS, distance
from benchmarks.gpu.result import Result, Row
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes

CONTEXT = 256
# Rows of each sequence when verifying, by largest batch: long drafts for few requests and short ones for many.
VERIFY = {2: (4, 8, 16), 8: (4, 8, 16), 32: (2, 4, 8), 128: (2, 4)}


def open_decoder(check: Check) -> TorchDecoder:
    """The recipe's policy with random weights, as the engine builds it."""
    folder = check.random_policy()
    config = ModelConfig.from_hf(folder)
    decoder = build_decoder(config, check.device, check.dtype, "auto" if check.is_cuda else "torch")
    assert isinstance(decoder, TorchDecoder)
    decoder.load_weights(iter_weights(folder, config))
    return decoder


def run(check: Check, found: Result) -> None:
    """Equality first, then times and memory."""
    batches = [1, 4] if check.smoke else [1, 8, 32, 128]
    decoder = open_decoder(check)
    kv = decoder.new_kv_cache(blocks_for(max(batches), max(VERIFY[2]), CONTEXT), BLOCK)
    if check.is_cuda:
        kv.fix_address()
    rollout = RolloutSection(max_running_requests=max(batches))
    sizes = PoolSizes(max(batches), 2 * CONTEXT, BLOCK, rollout.verify_rows)
    pool = GraphPool(decoder, kv, sizes)
    pool.capture(max(VERIFY[2]))
    for batch in batches:
        for tokens in (1, *strategies_of(batch)):
            row = compare(check, decoder, pool, kv, batch, tokens)
            found.add_row(row)
            if row["error"] > LIMITS[check.dtype]:  # another split of the context rounds otherwise
                found.fail(f"batch {batch}, {tokens} rows each: off by {row['error']:.1e}")
    if check.is_cuda:  # what a rollout finds after an update
        kv.release()
        kv.resume(decoder.new_kv_cache)
        error = compare(check, decoder, pool, kv, batches[0], 1)["error"]
        found.note({"error_after_release": error})
        if error > LIMITS[check.dtype]:
            found.fail(f"a graph replayed after the cache was released and taken again: off by {error:.1e}")
    graphs, eager = pool.graphs, pool.graphs.stats.eager
    found.note({f"speedup_{r['batch']}": r["eager_ms"] / r["graph_ms"] for r in found.rows if r["rows"] == 1})
    found.note({"captures": float(len(graphs.keys)), "capture_s": graphs.stats.capture_seconds})
    found.note({"mib": graphs.memory_bytes / 2**20})
    found.note(launches(check, decoder, kv))
    if check.is_cuda and eager:
        found.fail(f"{eager} steps had no graph")


def strategies_of(batch: int) -> tuple[int, ...]:
    """Rows of each sequence that verifying steps of such a batch have."""
    return next(rows for most, rows in VERIFY.items() if batch <= most)


def compare(check: Check, decoder: TorchDecoder, pool: GraphPool, kv: KVCache, batch: int, tokens: int) -> Row:
    """One shape: the pool's result against an eager static forward, and the time of both."""
    inputs = chains(batch, tokens, CONTEXT, decoder.config.vocab_size)
    moved = chains(batch, tokens, CONTEXT, decoder.config.vocab_size, check.device)
    got = pool.run(inputs).logits.clone()
    want = decoder.forward_static(moved, kv, tokens).logits
    graph = check.seconds(lambda: pool.run(inputs))
    eager = check.seconds(lambda: decoder.forward_static(moved, kv, tokens))
    row = {"batch": batch, "rows": tokens, "error": distance(got, want)}
    return row | {"graph_ms": 1e3 * statistics.median(graph), "eager_ms": 1e3 * statistics.median(eager)}


def launches(check: Check, decoder: TorchDecoder, kv: KVCache) -> dict[str, float]:
    """Kernels of an eager decoding forward of one sequence; on a CPU, where nothing is launched, operators."""
    moved = chains(1, 1, CONTEXT, decoder.config.vocab_size, check.device)
    decoder.forward_static(moved, kv, 1)
    names = check.events(lambda: decoder.forward_static(moved, kv, 1))
    count = sum(not name.startswith("cuda") for name in names)
    return {"launches": float(count), "launches_per_layer": count / decoder.config.num_layers}
