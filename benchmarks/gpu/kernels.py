"""Kernels against references: every case is an error and its limit, and none stops the others.

`tests/gpu/test_kernels.py` runs the same cases one by one.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.batches import BLOCK, blocks_for, chains
from benchmarks.gpu.check import TINY, Check, random_weights, reason
from benchmarks.gpu.result import Result
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.keyed_noise import best_candidates, gumbel_noise, key_tensor
from megatron_tlt.models.decoders.torch.attention import BlockPlan, RaggedPlan
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.layers import PLAIN
from megatron_tlt.models.decoders.torch.paged import PagedPlan
from megatron_tlt.rollout.graph_capture import CudaCapturer, EagerCapturer
from megatron_tlt.rollout.sampler import Sampler, SamplingRows

KV_HEADS, GROUP, HEAD_DIM = 2, 6, 128  # Qwen2.5-1.5B's attention
# Error over the largest value of the reference.
FP32, BF16 = torch.float32, torch.bfloat16
LIMITS = {FP32: 2e-5, BF16: 2e-2}
GRAPH_BYTES = 2 << 30  # of keys and values that a timed graph reads: half a millisecond, beside one launch


class Found(NamedTuple):
    """How far off, and how far it may be."""

    error: float
    limit: float


def distance(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value of `want`; NaN counts as infinity."""
    got, want = got.double().cpu(), want.double().cpu()
    off = float((got - want).abs().max() / want.abs().max())
    return off if math.isfinite(off) else math.inf


def attention(check: Check, sequences: int, tokens: int, context: int, dtype: torch.dtype) -> Found:
    """Triton's paged attention against gathered attention in float64."""
    from megatron_tlt.models.decoders.torch.kernels.attention import attend

    if check.smoke:
        context = min(context, 40)
    dtype = dtype if check.is_cuda else FP32  # Triton's interpreter multiplies no bf16
    batch = chains(sequences, tokens, context, 1000, check.device)
    q, keys, values = _cache(check, sequences, tokens, context, dtype)
    plan = PagedPlan(attend, batch, BLOCK, (KV_HEADS, GROUP))
    want = RaggedPlan(batch, BLOCK).attend(q.double(), keys.double(), values.double())
    return Found(distance(plan.attend(q, keys, values), want), LIMITS[dtype])


def blocks(check: Check, context: int, window: int) -> Found:
    """The same of blocks of 8 slots of a block drafter, which see each other and a layer's window."""
    from megatron_tlt.models.decoders.torch.kernels.attention import attend

    sequences, size, dtype = 3, 8, BF16 if check.is_cuda else FP32
    context, window = (min(n, 40) if check.smoke else n for n in (context, window))
    batch = chains(sequences, size, context, 1000, check.device)
    low = torch.ones(sequences, device=check.device)
    batch.slot_mapping = torch.arange(sequences * size, device=check.device)
    q, keys, values = _cache(check, sequences, size, context, dtype)
    own = torch.stack([keys[-len(q) :], values[-len(q) :]])
    places = batch.positions.view(sequences, size)
    gathered = BlockPlan(places, low, batch.block_tables, BLOCK)
    want = gathered.attend(q.double(), keys.double(), values.double(), own.double(), window)
    plan = PagedPlan(attend, batch, BLOCK, (KV_HEADS, GROUP), size, low)
    return Found(distance(plan.attend(q, keys, values, own, window), want), LIMITS[dtype])


def _cache(check: Check, sequences: int, tokens: int, context: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator(check.device).manual_seed(1)
    slots, rows = blocks_for(sequences, tokens, context) * BLOCK, sequences * tokens
    shapes = ((rows, KV_HEADS * GROUP), (slots, KV_HEADS), (slots, KV_HEADS))
    made = [torch.randn(n, h, HEAD_DIM, generator=generator, device=check.device) for n, h in shapes]
    return [t.to(dtype) for t in made]


def decoder(check: Check, dtype: torch.dtype, tokens: int, static: bool) -> Found:
    """The whole decoder with all kernels of a rollout, against float32 on the CPU without Triton."""
    from megatron_tlt.models.decoders.torch.kernels.attention import attend
    from megatron_tlt.models.decoders.torch.kernels.layers import FUSED

    dtype = dtype if check.is_cuda else FP32
    config, sequences, context = TINY, 2, 7  # the interpreter takes milliseconds a program
    if check.is_cuda:
        wide = {"hidden_size": 256, "num_heads": 8, "head_dim": 32, "intermediate_size": 512}
        config, sequences, context = replace(TINY, **wide), 4, 40
    weights = random_weights(config.parameter_shapes(), 2)
    logits = []
    for device, kind, paged, ops in ((torch.device("cpu"), FP32, None, PLAIN), (check.device, dtype, attend, FUSED)):
        made = TorchDecoder(config, device, kind, paged=paged, ops=ops)
        made.load_weights(weights.items())
        kv = made.new_kv_cache(blocks_for(sequences, tokens, context), BLOCK)
        batch = chains(sequences, tokens, context, config.vocab_size, device)
        made.forward(_before(batch, sequences, context, config.vocab_size), kv)
        run = made.forward_static(batch, kv, tokens) if static and paged else made.forward(batch, kv)
        logits.append(run.logits)
    return Found(distance(logits[1], logits[0]), 1e-4 if dtype == FP32 else 0.1)


def _before(batch: DecoderInput, sequences: int, context: int, vocab: int) -> DecoderInput:
    """The prefill of the positions that `batch` has behind it."""
    device, at = batch.positions.device, torch.arange(context, device=batch.positions.device)
    made = chains(sequences, context, 0, vocab, device)
    made.block_tables = batch.block_tables
    slots = batch.block_tables.long()[:, at // BLOCK] * BLOCK + at % BLOCK
    made.slot_mapping = slots.flatten().int()
    return made


def experts(check: Check, rows: int, dtype: torch.dtype) -> Found:
    """A layer's experts against float32 on the CPU; rows that choose others than there count as errors of 1 each."""
    from megatron_tlt.models.decoders.torch.kernels.layers import FUSED

    dtype = dtype if check.is_cuda else FP32
    hidden, width, count, k = (1024, 384, 32, 8) if check.is_cuda else (64, 24, 6, 2)
    generator = torch.Generator().manual_seed(3)
    shapes = (rows, hidden), (count, hidden), (count, 2 * width, hidden), (count, hidden, width)
    made = [(torch.randn(s, generator=generator) * s[-1] ** -0.5).to(dtype) for s in shapes]
    h, router, gate_up, down = (t.float() for t in made)
    gates, ids = PLAIN.route(h, router, k, True)
    want = PLAIN.mix_experts(h, gates, ids, gate_up, down)
    h, router, gate_up, down = (t.to(check.device) for t in made)
    chosen = FUSED.route(h, router, k, True)[1].cpu()
    gates, ids = gates.to(check.device), ids.to(check.device, torch.int32)
    off = distance(FUSED.mix_experts(h, gates, ids, gate_up, down), want)
    return Found(off + float((chosen != ids.cpu()).any(-1).float().mean()), LIMITS[dtype])


def grouped_experts(check: Check) -> Found:
    """The update's products of experts, forward and gradients, against a loop in float32; some experts have no row."""
    dtype = BF16 if check.is_cuda else FP32
    counts, hidden, width = ([0, 37, 0, 128, 1, 90] if check.is_cuda else [0, 5, 0, 3]), 128, 64
    generator, ends = torch.Generator().manual_seed(4), torch.tensor(counts).cumsum(0)
    shapes = (sum(counts), hidden), (len(counts), width, hidden), (sum(counts), width)
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    rows, weights, grad = (t.float() for t in made)
    parts = zip(rows.split(counts), weights, grad.split(counts), strict=True)
    wanted = [(x @ w.T, g @ w, g.T @ x) for x, w, g in parts]
    here = [t.to(check.device).requires_grad_() for t in made[:2]]
    out = F.grouped_mm(here[0], here[1].transpose(1, 2), offs=ends.to(check.device, torch.int32))
    out.backward(made[2].to(check.device))
    of_rows, of_weights = here[0].grad, here[1].grad
    assert of_rows is not None and of_weights is not None
    used = torch.tensor(counts) > 0  # of the others `actor.experts` makes the gradient zero
    pairs = (out, torch.cat([w[0] for w in wanted])), (of_rows, torch.cat([w[1] for w in wanted]))
    pairs += ((of_weights.cpu()[used], torch.stack([w[2] for w in wanted])[used]),)
    return Found(max(distance(got.detach(), want) for got, want in pairs), LIMITS[dtype])


def noise(check: Check) -> Found:
    """Keyed Gumbel noise here against the CPU's: the logarithms of two devices differ by rounding only."""
    keys = np.random.default_rng(0).integers(0, 1 << 63, 64, dtype=np.uint64)
    here, there = (gumbel_noise(key_tensor(keys, d), 2000) for d in (check.device, "cpu"))
    return Found(distance(here, there), 1e-6)


def sampled(check: Check, masked: bool) -> Found:
    """Share of rows whose token differs from what PyTorch draws on the CPU."""
    from megatron_tlt.models.decoders.torch.kernels.sampling import draw

    rng, (rows, vocab) = np.random.default_rng(1), (256, 1000) if check.is_cuda else (9, 300)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    ones = np.ones(rows, np.float32)
    how = SamplingRows(
        rng.integers(0, 1 << 63, rows, dtype=np.uint64),
        np.where(np.arange(rows) % 8 == 0, 0, ones).astype(np.float32),
        np.where(np.arange(rows) % 3 == 0, 20, 0).astype(np.int32) * masked,
        np.where(np.arange(rows) % 3 == 1, 0.9, 1.0) if masked else ones.astype(np.float64),
        np.where(np.arange(rows) % 3 == 2, 0.05, 0.0).astype(np.float32) * masked,
        masked,
    )
    here, _ = Sampler(check.device, kernel=draw).sample(logits.to(check.device), how)
    there, _ = Sampler(torch.device("cpu")).sample(logits, how)
    return Found(float((here.cpu() != there).float().mean()), 0.0)


def candidates(check: Check) -> Found:
    """Best tokens of a drafter that has some of them, against PyTorch on the CPU: scores, and the share of rows with
    other tokens.
    """
    from megatron_tlt.models.decoders.torch.kernels.sampling import best_candidates as best_here

    rng, (rows, vocab) = np.random.default_rng(2), (64, 5000) if check.is_cuda else (5, 300)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    keys = key_tensor(rng.integers(0, 1 << 63, rows, dtype=np.uint64), "cpu")
    temperature = torch.linspace(0.5, 1.5, rows)
    ids = 3 * torch.arange(vocab)
    scores, tokens = best_candidates(logits.clone(), keys, temperature, 4, ids)
    *on_device, named = (t.to(check.device) for t in (logits, keys, temperature, ids))
    found, chosen = best_here(*on_device, 4, named)
    return Found(distance(found, scores) + float((chosen.cpu() != tokens).any(-1).float().mean()), 1e-5)


CASES: dict[str, Callable[[Check], Found]] = {
    "attention decode fp32": lambda c: attention(c, 3, 1, 700, FP32),
    "attention decode bf16": lambda c: attention(c, 3, 1, 700, BF16),
    "attention long context, split": lambda c: attention(c, 1, 1, 8000, BF16),
    "attention wide batch": lambda c: attention(c, 128 if c.is_cuda else 4, 1, 300, BF16),
    "attention prefill": lambda c: attention(c, 2, 500 if c.is_cuda else 40, 0, BF16),
    "attention verify chain": lambda c: attention(c, 4, 12, 333, BF16),
    "attention of blocks": lambda c: blocks(c, 700, 0),
    "attention of blocks, window": lambda c: blocks(c, 700, 100),
    "decoder decode fp32": lambda c: decoder(c, FP32, 1, static=False),
    "decoder decode bf16": lambda c: decoder(c, BF16, 1, static=False),
    "decoder static verify fp32": lambda c: decoder(c, FP32, 5, static=True),
    "experts decode bf16": lambda c: experts(c, 8, BF16),
    "experts prefill bf16": lambda c: experts(c, 700 if c.is_cuda else 40, BF16),
    "experts decode fp32": lambda c: experts(c, 8, FP32),
    "experts of an update": grouped_experts,
    "keyed noise": noise,
    "drafter's candidates": candidates,
    "sampled tokens": lambda c: sampled(c, masked=False),
    "sampled tokens, masks": lambda c: sampled(c, masked=True),
}


def attention_speed(check: Check) -> dict[str, float]:
    """Bytes of keys and values a second that attention reads, as a share of the device's bandwidth: in one captured
    graph over layers with more bytes than L2 holds, as a decoding step has them. A layer alone is launched for longer
    than it runs.
    """
    from megatron_tlt.models.decoders.torch.kernels.attention import attend

    summary, bandwidth = {}, check.peaks().bandwidth
    for sequences, context in ((1, 8000), (32, 2000), (128, 2000)) if check.is_cuda else ((2, 64),):
        q, *first = _cache(check, sequences, 1, context, check.dtype)
        read = 2 * sequences * context * KV_HEADS * HEAD_DIM * q.element_size()
        layers = [[t.clone() for t in first] for _ in range(-(-GRAPH_BYTES // read) if check.is_cuda else 2)]
        batch = chains(sequences, 1, context, 1000, check.device)
        plan = PagedPlan(attend, batch, BLOCK, (KV_HEADS, GROUP), rows_each=1)

        def step(q: Tensor = q, plan: PagedPlan = plan, layers: list[list[Tensor]] = layers) -> None:
            for keys, values in layers:
                plan.attend(q, keys, values)

        capturer = CudaCapturer(check.device) if check.is_cuda else EagerCapturer()
        capturer.warm_up(step)
        taken = statistics.median(check.seconds(capturer.capture(step).replay)) / len(layers)
        summary[f"attention_of_bandwidth_{sequences}x{context}"] = read / taken / bandwidth
    return summary


def run(check: Check, found: Result) -> None:
    """All cases, then the speed of attention."""
    for name, case in CASES.items():
        try:
            error, limit = case(check)
        except Exception as error_:  # noqa: BLE001 - the edge: one kernel that does not compile must not hide the others
            found.fail(f"{name}: {reason(error_)}")
            traceback.print_exc()  # into the part's log
            continue
        found.add_row({"case": name, "error": error, "limit": limit})
        if error > limit:
            found.fail(f"{name}: error {error:.2e}, limit {limit:.0e}")
    found.note({"cases": float(len(CASES)), "failed": float(len(found.failures))})
    found.note(attention_speed(check))
