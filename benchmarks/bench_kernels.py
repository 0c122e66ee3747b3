"""Time of one decode step: native and PyTorch decoders, against the machine's own limits.

    python benchmarks/bench_kernels.py [--quick] [--out r.json] [--threads 1 2] [--kernels native torch]

Random Qwen2-layout models of about 10M and 60M parameters, 512 cached positions a sequence. The variants
of a row take turns (A B A B), medians are printed, minimum and maximum are in the JSON. `limit` is the
time that the step's weights would take at the speed of a bare matrix product of PyTorch, without
attention. A second table feeds several rows a sequence (150 cached positions), as the verification of a draft does, to
random models of the demo policy's and of SmolLM2-135M's shape, and as many as a prefill: CPU seconds of one thread.

Summary: `tokens_per_s_*` by model, threads and batch; of the 135M model `gflops_n` for n rows, and `of_bound_n`, the
least time by the machine's own rates (that of one row, which reads all weights, or of n rows at prefill's rate,
whichever is longer) over the time measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lib.bench_record import write_record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_tlt.models.base import Decoder
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.factory import build_decoder
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.native.decoder import keyed_sample

MODELS = {
    "10M": ModelConfig("qwen2", 4096, 320, 8, 5, 1, 64, 896, qkv_bias=True, tie_word_embeddings=True),
    "60M": ModelConfig("qwen2", 16384, 640, 10, 10, 2, 64, 2048, qkv_bias=True, tie_word_embeddings=True),
}
ROWS_OF = {
    "demo": ModelConfig("qwen3", 288, 128, 12, 4, 2, 32, 384, qk_norm=True, tie_word_embeddings=True),
    "135M": ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, tie_word_embeddings=True),
}
PREFILL = 256  # rows, each with its logits
BLOCK = 16


def make_step(decoder: Decoder, batch: int, context: int, rows: int = 1) -> Callable[[], object]:
    """A step of `rows` next tokens of each of `batch` sequences at `context` cached positions."""
    per_sequence = (context + rows - 1) // BLOCK + 1
    kv = decoder.new_kv_cache(batch * per_sequence, BLOCK)
    kv.data.fill_(0)
    order = torch.randperm(batch * per_sequence, dtype=torch.int32).view(batch, per_sequence)
    at = torch.arange(context, context + rows)
    inputs = DecoderInput(
        token_ids=torch.arange(batch * rows, dtype=torch.int32) % decoder.config.vocab_size,
        positions=at.repeat(batch).to(torch.int32),
        slot_mapping=(order[:, at // BLOCK] * BLOCK + at % BLOCK).flatten().to(torch.int32),
        query_start=torch.arange(0, batch * rows + 1, rows, dtype=torch.int32),
        context_lens=torch.full((batch,), context + rows, dtype=torch.int32),
        block_tables=order.contiguous(),
        logit_rows=torch.arange(batch * rows, dtype=torch.int32),
    )
    return lambda: decoder.forward(inputs, kv)


def make_decoder(config: ModelConfig, kernels: str, threads: int) -> Decoder:
    decoder = build_decoder(config, kernels=kernels, threads=threads)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    decoder.load_weights(
        (name, torch.randn(shape, generator=generator) * 0.05)
        for name, shape in config.parameter_shapes().items()
    )
    return decoder


def interleaved(
    variants: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Runs the variants in turns for about `seconds` each; milliseconds per call by `clock`."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    end = time.perf_counter() + seconds * len(variants)
    while time.perf_counter() < end:
        for name, call in variants.items():
            for _ in range(5):
                start = clock()
                call()
                times[name].append((clock() - start) * 1e3)
    return times


def gemm_limit(config: ModelConfig, batch: int, threads: int) -> float:
    """Milliseconds for the step's products by torch.nn.functional.linear, one per weight."""
    torch.set_num_threads(threads)
    shapes = [s for n, s in config.parameter_shapes().items() if len(s) == 2]
    weights = [torch.randn(s) for s in shapes]
    inputs = {s[1]: torch.randn(batch, s[1]) for s in shapes}

    def products() -> None:
        for w in weights:
            torch.nn.functional.linear(inputs[w.shape[1]], w)

    return statistics.median(interleaved({"limit": products}, 0.4)["limit"])


def bench_steps(args: argparse.Namespace) -> list[dict]:
    rows = []
    for model in args.models:
        for threads in args.threads:
            torch.set_num_threads(threads)
            decoders = {k: make_decoder(MODELS[model], k, threads) for k in args.kernels}
            for batch in args.batches:
                variants = {k: make_step(d, batch, args.context) for k, d in decoders.items()}
                times = interleaved(variants, args.seconds)
                limit = gemm_limit(MODELS[model], batch, threads) if args.limit else float("nan")
                for kernels, t in times.items():
                    row = {
                        "model": model, "threads": threads, "batch": batch, "kernels": kernels,
                        "ms": statistics.median(t), "min_ms": min(t), "max_ms": max(t),
                        "tokens_per_s": batch * 1e3 / statistics.median(t), "limit_ms": limit,
                    }  # fmt: skip
                    rows.append(row)
                    print(
                        f"{model:4} {threads} threads  B={batch:<3} {kernels:7}"
                        f"{row['ms']:9.3f} ms (min {row['min_ms']:.3f}) {row['tokens_per_s']:8.0f} tok/s"
                        f"   limit {limit:.3f} ms",
                        flush=True,
                    )
    return rows


def bench_rows(args: argparse.Namespace) -> list[dict]:
    """Native forwards of 1, 2, ... rows a sequence and of a prefill, one thread; the row counts take turns."""
    records = []
    torch.set_num_threads(1)
    for model, batch in (("demo", 1), ("demo", 8), ("135M", 1)):
        decoder = make_decoder(ROWS_OF[model], "native", 1)
        steps = {str(r): make_step(decoder, batch, 150, r) for r in (*args.rows, PREFILL)}
        times = interleaved(steps, args.seconds / 3, time.process_time)
        for rows, t in ((int(name), t) for name, t in times.items()):
            ms = statistics.median(t)
            gflops = 2e-6 * ROWS_OF[model].num_parameters * batch * rows / ms
            row = {"model": model, "batch": batch, "rows": rows, "ms": ms, "min_ms": min(t), "gflops": gflops}
            records.append(row)
            print(f"{model} 1 thread  B={batch:<3} rows {rows:<3} {ms:8.3f} ms  {gflops:6.1f} Gflop/s", flush=True)
    return records


def summarise_rows(records: list[dict]) -> dict[str, float]:
    """`gflops_n` and `of_bound_n` of the 135M model."""
    of_real = {row["rows"]: row for row in records if row["model"] == "135M"}
    least = {n: max(of_real[min(of_real)]["ms"], of_real[PREFILL]["ms"] * n / PREFILL) for n in of_real}
    return {f"gflops_{n}": row["gflops"] for n, row in of_real.items()} | {
        f"of_bound_{n}": least[n] / row["ms"] for n, row in of_real.items()
    }


def bench_sampling(args: argparse.Namespace) -> list[dict]:
    rows = []
    for vocab in (288, 4096, 151936):
        for batch in (1, 16):
            logits = torch.randn(batch, vocab) * 3
            temperature, keys = torch.ones(batch), torch.arange(batch, dtype=torch.int64)
            call = lambda: keyed_sample(logits, temperature, keys, threads=args.threads[-1])  # noqa: E731, B023
            ms = statistics.median(interleaved({"s": call}, 0.3)["s"])
            rows.append({"sampling_vocab": vocab, "batch": batch, "ms": ms})
            print(f"keyed_sample V={vocab} R={batch} {args.threads[-1]} threads: {ms:.3f} ms")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="10M model only, half a second a row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--kernels", nargs="+", default=["native", "torch"], choices=["native", "torch"])
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 2, 4, 5, 8, 16, 32], help="rows a sequence, second table"
    )
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each variant of a row")
    parser.add_argument("--no-limit", dest="limit", action="store_false")
    args = parser.parse_args()
    if args.quick:
        args.models, args.seconds = ["10M"], 0.5
    several = bench_rows(args)
    rows = bench_steps(args) + several + bench_sampling(args)
    summary = {
        f"tokens_per_s_{r['model']}_{r['threads']}t_{r['batch']}": r["tokens_per_s"]
        for r in rows
        if r.get("kernels") == "native"
    }
    write_record(args.out, rows, summary | summarise_rows(several))


if __name__ == "__main__":
    main()
