"""Runs with TLT on and off that must have the same responses and gradients in every step, by arithmetic: invariant
numerics.

What they cost stands beside part `rl`: seconds of a step in the same recipe with default numerics. Both tables fill
the one of docs/design/numerics.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.batches import BLOCK, blocks_for, chains
from benchmarks.gpu.check import Check, random_weights
from benchmarks.gpu.result import Result
from benchmarks.gpu.rl import FIXED, Pair, judge
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder

STEPS, SMOKE_STEPS = 2, 1


def run(check: Check, found: Result) -> None:
    """In bf16 on a GPU, and in float32."""
    steps = SMOKE_STEPS if check.smoke else STEPS
    dtypes = ("bf16", "fp32") if check.is_cuda else ("fp32",)
    for dtype in dtypes:
        share = rows_alike(check, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
        found.note({f"{dtype}_rows_alike": share})
        if share < 1:
            found.fail(f"{dtype}: {1 - share:.2%} of the forwards round a row in another way than alone")
    for dtype in dtypes:
        judge(check, Pair(dtype, steps, changes(check, dtype), must_agree=True), found)


def changes(check: Check, dtype: str) -> dict[str, Any]:
    """Invariant numerics, drafts in every step, deterministic updates. In float32 half the tokens of a micro-batch."""
    invariant: dict[str, Any] = {
        "actor": {"dtype": dtype},
        "rollout": {"dtype": dtype, "numerics": "invariant", **FIXED},
        "train": {"deterministic": True, "prompts_per_step": 4},
    }
    if check.is_cuda:
        # Sequences of several tiles of attention: shorter ones have one order of sums in any backward pass.
        invariant["rollout"]["max_tokens"] = 1024
        if dtype == "fp32":
            invariant["actor"]["micro_batch_tokens"] = 4096
    return invariant


def rows_alike(check: Check, dtype: torch.dtype) -> float:
    """Share of forwards, of several batches and blocks of rows, whose logits are those of each row alone, bit for bit.

    Two layers of the recipe's policy, with random weights. On a GPU with the static forward, too, which graphs capture.
    """
    context, sequences, rows = (5, 5, 4) if check.smoke else (100, 64, 32)
    config, device = replace(check.shape(), num_layers=2), check.device
    kernels = "auto" if check.is_cuda else "torch"
    decoder = build_decoder(config, device, dtype, kernels, numerics="invariant")
    assert isinstance(decoder, TorchDecoder)
    decoder.load_weights(random_weights(config.parameter_shapes(), device=device).items())
    kv = decoder.new_kv_cache(blocks_for(sequences, rows, context), BLOCK)
    whole = chains(sequences, context + rows, 0, config.vocab_size, device)
    every = list(range(sequences))
    decoder.forward(_part(whole, every, 0, context), kv)
    watched = (0, sequences // 2, sequences - 1)
    alone = {
        (s, row): decoder.forward(_part(whole, [s], row, 1), kv).logits[0]
        for s in watched
        for row in range(context, context + rows)
    }
    equal = []
    for size in (1, 3, 17, 64):
        for block in (1, 3, 17, 32):
            size, block = min(size, sequences), min(block, rows)  # noqa: PLW2901
            taken = list(dict.fromkeys([*watched, *every]))[:size]
            part = _part(whole, taken, context, block)
            forwards = [decoder.forward(part, kv)]
            if decoder.paged is not None:
                forwards.append(decoder.forward_static(part, kv, block))
            for out in forwards:
                logits = out.logits.float().unflatten(0, (size, block))
                pairs = [(logits[i, j], alone[s, context + j]) for i, s in enumerate(taken[:3]) for j in range(block)]
                equal.append(all(torch.equal(got, want) for got, want in pairs))
    return sum(equal) / len(equal)


def _part(whole: DecoderInput, sequences: list[int], first: int, rows: int) -> DecoderInput:
    """`rows` rows from position `first` of some sequences of `whole`, which has all positions of each."""
    device = whole.positions.device
    at = torch.arange(first, first + rows, device=device)
    index = (whole.query_start.long()[sequences][:, None] + at).flatten()
    starts = torch.arange(0, len(index) + 1, rows, device=device)
    ends = torch.full((len(sequences),), first + rows, device=device)
    by_row = [tensor[index] for tensor in (whole.token_ids, whole.positions, whole.slot_mapping)]
    parts = [*by_row, starts, ends, whole.block_tables[sequences], torch.arange(len(index), device=device)]
    return DecoderInput.of([part.int().contiguous() for part in parts])
