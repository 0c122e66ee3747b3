"""Drafter training on packed sequences against batches padded to their longest sequence.

    python benchmarks/bench_packing.py [--quick] [--out r.json] [--responses N] [--rounds N]

The model is the demo policy's drafter; an optimizer step of each kind has about as many responses. All three train on
the same responses, in turns (A B A B), and medians of processor time are compared (one thread: on a machine that
others use, too, it is the steadier clock):

    padded   responses in random order, so many a batch; every row of the rectangle is computed, padding included,
             and would be masked in the loss
    packed   the same batches, packed: rows are those of real tokens; attention alone is padded
    trained  as the trainer batches: packed, and responses of about one length share a batch

Lengths: `traces`, those of the demo policy's traces (its own responses look like them); `long-tailed`, lognormal with
sigma 1, median 120, at most 1024 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from demo_traces import generate

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafter.batching import DraftSequence, collate, group_by_length
from megatron_tlt.drafter.pretrain import lookup_tables
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DraftBatch
from megatron_tlt.models.eagle.config import EagleConfig
from megatron_tlt.models.eagle.model import EagleModel

POLICY = ROOT / "assets" / "demo-policy"
TOKENS = 2048  # of a packed batch: the demo drafter's own training has 1536
PROMPT = 24


def trace_lengths(count: int) -> list[tuple[int, int]]:
    """(tokens, prompt tokens) of the demo policy's traces."""
    tokenizer = HFTokenizer(POLICY)
    out = []
    for example in generate(count, seed=55):
        prompt = len(tokenizer.encode_chat(example.prompt))
        out.append((prompt + len(tokenizer.encode(example.completion)) + 1, prompt))
    return out


def long_tailed_lengths(count: int) -> list[tuple[int, int]]:
    """The same of a heavier tail."""
    drawn = np.random.default_rng(0).lognormal(np.log(120), 1.0, count)
    return [(int(n), PROMPT) for n in np.clip(drawn, PROMPT + 2, 1024)]


def make_sequences(shapes: list[tuple[int, int]], config: ModelConfig) -> list[DraftSequence]:
    """Random tokens and hidden states: what they are does not change the time."""
    generator = torch.Generator().manual_seed(0)
    return [
        DraftSequence(
            torch.randint(0, config.vocab_size, (n,), generator=generator),
            torch.randn(n - 1, config.hidden_size, generator=generator),
            np.arange(n) >= prompt,
            prompt,
        )
        for n, prompt in shapes
    ]


def padded(sequences: list[DraftSequence]) -> DraftBatch:
    """All as long as the longest; padding counts as response, so that its rows are computed."""
    longest = max(s.length for s in sequences)
    wide = []
    for s in sequences:
        extra = longest - s.length
        tokens = torch.cat([s.token_ids, s.token_ids.new_zeros(extra)])
        hidden = torch.cat([s.hidden, s.hidden.new_zeros(extra, s.hidden.shape[1])])
        drawn = np.append(s.drawn, np.ones(extra, np.bool_))
        wide.append(DraftSequence(tokens, hidden, drawn, s.response_start))
    return collate(wide)


def batches(sequences: list[DraftSequence]) -> dict[str, list[DraftBatch]]:
    """The three kinds, over the same responses."""
    mean = sum(s.length for s in sequences) / len(sequences)
    each = max(1, round(TOKENS / mean))
    groups = [sequences[i : i + each] for i in range(0, len(sequences), each)]
    return {
        "padded": [padded(g) for g in groups],
        "packed": [collate(g) for g in groups],
        "trained": [collate(g) for g in group_by_length(sequences, TOKENS)],
    }


def seconds_of(step: Callable[[DraftBatch], object], data: list[DraftBatch]) -> float:
    """One pass over the batches."""
    started = time.process_time()
    for batch in data:
        step(batch)
    return time.process_time() - started


def measure(name: str, shapes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Rows of one distribution of lengths."""
    config = ModelConfig.from_hf(POLICY)
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    tables = lookup_tables(POLICY, config, torch.device("cpu"))
    trainer = DrafterTrainer(model, *tables, DrafterSection(draft_steps=3, lr=1e-6))
    sequences = make_sequences(shapes, config)
    kinds = batches(sequences)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for data in kinds.values():
        seconds_of(trainer.step, data[:1])
    for _ in range(rounds):
        for kind, data in kinds.items():
            seconds[kind].append(seconds_of(trainer.step, data))
    lengths = [s.length for s in sequences]
    taught = sum(s.num_bases for s in sequences)
    rows = []
    for kind, data in kinds.items():
        median = statistics.median(seconds[kind])
        row = {"lengths": name, "kind": kind, "responses": len(sequences), "batches": len(data)}
        row |= {"rows": sum(len(b.tokens) for b in data), "tokens": sum(lengths)}
        row |= {"mean_length": statistics.mean(lengths), "max_length": max(lengths)}
        row |= {"seconds": median, "min": min(seconds[kind]), "max": max(seconds[kind])}
        row |= {"response_tokens_per_s": taught / median}
        rows.append(row)
        shown = f"{name:12s} {kind:8s} {row['rows']:7d} rows  {median:6.2f} s"
        print(
            f"{shown} ({row['min']:.2f} - {row['max']:.2f})  {taught / median:8.0f} response tokens/s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer responses, one round")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--responses", type=int)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count, rounds = (48, 1) if args.quick else (192, 3)
    count, rounds = args.responses or count, args.rounds or rounds
    rows, summary = [], {}
    for name, shapes in (("traces", trace_lengths(count)), ("long-tailed", long_tailed_lengths(count))):
        mine = measure(name, shapes, rounds)
        rows += mine
        speed = {row["kind"]: row["response_tokens_per_s"] for row in mine}
        suffix = "" if name == "traces" else "_long_tailed"
        summary[f"packed_vs_padded{suffix}"] = speed["trained"] / speed["padded"]
        summary[f"same_batches{suffix}"] = speed["packed"] / speed["padded"]
    for key, value in summary.items():
        print(f"{key} {value:.2f}")
    write_record(args.out, rows, summary)


main()
