"""How often rounding decides a token: speculative against plain decoding, beside plain against plain in other batches.

A pair of runs generates responses to the same requests with the same noise; where two responses part for the first
time, rounding decided one token. The rate is parted responses per token up to there. In `invariant` numerics, and with
the native decoder always, it must be 0 (docs/design/numerics.md).

    python benchmarks/bench_flips.py [--quick] --out r.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))

# Name -> engine settings of the other run of a pair; the first run is plain, 64 requests at a time.
_FIXED = [
    "rollout.max_running_requests=64",
    "rollout.speculation.selector=fixed",
    "rollout.speculation.draft_len=4",
]
OTHERS: dict[str, list[str]] = {
    "plain, 8 at a time": ["rollout.max_running_requests=8"],
    "suffix drafts": [*_FIXED, "rollout.speculation.drafter=suffix"],
    "eagle drafts": [*_FIXED, "rollout.speculation.drafter=eagle"],
}
KINDS = [("native", "default"), ("torch", "default"), ("torch", "invariant")]


def responses(settings: list[str], args: argparse.Namespace) -> list[list[int]]:
    """Token ids of every response of one run."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.load import load_config
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.trainer.sampling import sampling_params
    from megatron_tlt.types import GenerateCall

    config = load_config(ROOT / "configs/quickstart.yaml", [f"model.path={args.model}", *settings])
    tokenizer = HFTokenizer(args.model)
    prompts = build_prompts(config.data, "train", tokenizer, config.train.seed).next_batch(args.prompts)
    params = replace(sampling_params(config), max_tokens=args.max_tokens)
    backend = build_backend(EngineOptions(config.rollout, config.model, tokenizer=tokenizer, load_weights=True))
    return [s.token_ids for s in backend.generate(GenerateCall(prompts, params, 8))]


def compare(first: list[list[int]], second: list[list[int]]) -> dict[str, float]:
    """Parted responses, and the rate per token that both runs drew with the same prefix."""
    parted, common = 0, 0
    for a, b in zip(first, second, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        parted += same is not None
        common += len(a) if same is None else same + 1
    return {"responses": len(first), "parted": parted, "tokens": common, "flip_rate": parted / common}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 prompts, 64 tokens")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/demo-policy")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=448)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = 2, 64
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'kernels':8s}{'numerics':11s}{'dtype':6s}{'other run':22s}{'parted':>8s}{'flips a token':>16s}")
    for kernels, numerics in KINDS:
        for dtype in ("fp32",) if kernels == "native" else ("fp32", "bf16"):
            base = [f"rollout.kernels={kernels}", f"rollout.numerics={numerics}", f"rollout.dtype={dtype}"]
            base.append("rollout.speculation.drafter=none")  # the quickstart's is another
            plain = responses([*base, "rollout.max_running_requests=64"], args)
            for name, settings in OTHERS.items():
                row = {"kernels": kernels, "numerics": numerics, "dtype": dtype, "other": name}
                row |= compare(plain, responses([*base, *settings], args))
                rows.append(row)
                counts = f"{row['parted']:4d}/{row['responses']:<4d}{row['flip_rate']:15.1e}"
                print(f"{kernels:8s}{numerics:11s}{dtype:6s}{name:22s}{counts}", flush=True)
    exact = [r for r in rows if r["kernels"] == "native" or r["numerics"] == "invariant"]
    summary = {
        "flips_where_there_must_be_none": sum(r["parted"] for r in exact),
        "bf16_speculative": next(r["flip_rate"] for r in rows if _is(r, "suffix drafts")),
        "bf16_plain_other_batch": next(r["flip_rate"] for r in rows if _is(r, "plain, 8 at a time")),
    }
    for key, value in summary.items():
        print(f"{key:34s}{value:10.2e}")
    write_record(args.out, rows, summary)


def _is(row: dict[str, Any], other: str) -> bool:
    return (row["kernels"], row["numerics"], row["dtype"], row["other"]) == (
        "torch",
        "default",
        "bf16",
        other,
    )


if __name__ == "__main__":
    main()
