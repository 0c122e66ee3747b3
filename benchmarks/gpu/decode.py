"""Plain decoding of the recipe's policy with random weights: tokens a second of the engine against the device's bounds,
and where the rest of a step goes.

engine   `Engine.step` until all responses are done, one token a response and step
forward  the captured decoding forward of that batch at the mean context alone, replayed on inputs that are there
sampler  drawing one row of logits a sequence, with the upload of its parameters
host     the engine's step without the two: scheduling, inputs and their upload, what Python costs
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.batches import blocks_for, chains
from benchmarks.gpu.bounds import bound, mean_context
from benchmarks.gpu.check import Check
from benchmarks.gpu.result import Result, Row
from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import KV_BLOCK, RolloutSection
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.models.decoders.factory import sample_kernel
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.types import SamplingParams


def open_engine(
    check: Check, policy: Any, batch: int, context: int, given: SavedDrafter | None = None, **speculation: Any
) -> EmbeddedBackend:
    """An engine whose decoding and verifying steps go through a graph pool, without graphs on a CPU. Its cache has room
    for `batch` sequences of `context` tokens, with their drafter's, if half of the free memory has.
    """
    rollout = RolloutSection.model_validate(
        {
            "dtype": check.dtype_name,
            "kernels": "auto" if check.is_cuda else "torch",
            "max_running_requests": batch,
            "max_batched_tokens": max(8192, batch * context),  # all prompts in one step, which is not timed
            "speculation": speculation,
        }
    )
    section = ModelSection(path=str(policy), max_context=context)
    backend = build_backend(EngineOptions(rollout, section, device=check.device, drafter=given))
    push_policy(policy, backend)
    runner = backend.engine.runner
    if runner.pool is None:
        assert isinstance(runner.decoder, TorchDecoder)
        sizes = PoolSizes(batch, context, KV_BLOCK, rollout.verify_rows)
        runner.pool = GraphPool(runner.decoder, runner.kv, sizes)
        backend.engine.capture_graphs(rollout.speculation.rows_each)
    return backend


def require_running(engine: Engine, batch: int) -> None:
    """Raises RuntimeError where not all requests of a batch decode: their figures would be another batch's."""
    if engine.num_running != batch:
        cache = f"the KV cache has {engine.runner.kv.num_blocks} blocks of {KV_BLOCK} tokens"
        raise RuntimeError(f"{engine.num_running} of {batch} requests run: {cache}")


def pool_of(backend: EmbeddedBackend) -> GraphPool:
    """The graph pool of an engine."""
    pool = backend.engine.runner.pool
    assert pool is not None
    return pool


def run(check: Check, found: Result) -> None:
    """All batch sizes, the smallest first."""
    batches = [1, 4] if check.smoke else [1, 8, 32, 128]
    prompt, tokens, repeats = (8, 16, 2) if check.smoke else (128, 256, 3)
    peaks, config = check.peaks(), check.shape()
    backend = open_engine(check, check.random_policy(), max(batches), prompt + tokens)
    for batch in batches:
        row = measure(check, backend, batch, prompt, tokens, repeats)
        limit = bound(config, peaks, batch, mean_context(prompt, tokens), check.dtype.itemsize)
        row |= {"of_bandwidth": row["tokens_per_s"] / limit}
        row |= {"forward_of_bandwidth": batch / (row["forward_ms"] / 1e3) / limit}
        found.add_row(row)
        found.note({f"tokens_per_s_{batch}": row["tokens_per_s"]})
        found.note({f"of_bandwidth_bound_{batch}": row["of_bandwidth"]})
        found.note({f"forward_of_bound_{batch}": row["forward_of_bandwidth"]})
        found.note({f"host_ms_{batch}": row["host_ms"]})
    if check.is_cuda and not pool_of(backend).graphs.stats.replays:
        found.fail("no decoding step was a captured graph")


def measure(check: Check, backend: EmbeddedBackend, batch: int, prompt: int, tokens: int, repeats: int) -> Row:
    """One batch size: medians of `repeats` rounds after one that warms up and captures."""
    rng, vocab = np.random.default_rng(batch), check.shape().vocab_size
    seconds, engine = [], backend.engine
    for _ in range(repeats + 1):
        for at in range(batch):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            engine.add(rng.integers(3, vocab, prompt).tolist(), params, at, indices=[0])
        engine.step()  # prefill and first tokens
        check.synchronize()
        started = time.perf_counter()
        finished = engine.step()
        require_running(engine, batch)
        while not engine.is_idle:
            finished += engine.step()
        seconds.append(time.perf_counter() - started)
        assert {len(r.output) for r in finished} == {tokens}, "a response of another length"
    step = statistics.median(seconds[1:]) / (tokens - 1)
    forward = forward_seconds(check, backend, batch, prompt + tokens // 2)
    sampler = sampler_seconds(check, batch, vocab)
    return {
        "batch": batch,
        "tokens_per_s": batch / step,
        "step_ms": 1e3 * step,
        "forward_ms": 1e3 * forward,
        "sampler_ms": 1e3 * sampler,
        "host_ms": 1e3 * (step - forward - sampler),
        "min_ms": 1e3 * min(seconds[1:]) / (tokens - 1),
        "max_ms": 1e3 * max(seconds[1:]) / (tokens - 1),
    }


def forward_seconds(check: Check, backend: EmbeddedBackend, batch: int, context: int) -> float:
    """One captured decoding forward (which overwrites the cache's first blocks: nothing runs meanwhile)."""
    pool, room = pool_of(backend), backend.engine.runner.kv.num_blocks
    assert blocks_for(batch, 1, context) <= room, "the cache is smaller than the batch"
    inputs = chains(batch, 1, context, check.shape().vocab_size)
    pool.run(inputs)  # they are in the graph's buffers now
    key = pool.key(batch, 1)
    return statistics.median(check.seconds(lambda: pool.graphs.run(key, lambda: pool.run(inputs)), repeats=20))


def sampler_seconds(check: Check, batch: int, vocab: int) -> float:
    """Drawing one token a row, without masks."""
    logits = torch.randn(batch, vocab, device=check.device)
    keys = np.random.default_rng(0).integers(0, 1 << 63, batch, dtype=np.uint64)
    ones, off = np.ones(batch, np.float32), np.zeros(batch, np.int32)
    rows = SamplingRows(keys, ones, off, np.ones(batch), np.zeros(batch, np.float32), False)
    sampler = Sampler(check.device, kernel=sample_kernel("auto", check.device))
    return statistics.median(check.seconds(lambda: sampler.sample(logits, rows), repeats=20))
