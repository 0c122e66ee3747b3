"""What a trained drafter costs rollouts that decode plainly: CPU seconds with one at hand over those without.

    python benchmarks/lib/plain_cost.py --model DIR --drafter DIR [--requests 1 4 16] [--dtype bf16] --out r.json

Two engines of one process take turns (A B B A ..) with the same requests, each until all have their tokens: one without
a drafter, one with a drafter whose selector has chosen plain decoding, and whose hidden states are collected as
training does. So the second pays for hidden states, the drafter's cache, the selector's measurements, and nothing
else. Both must give the same responses.

Rows: {"requests", "plain", "with_drafter" (CPU seconds by turn), "ratio" (median of the turns' ratios: the sides of a
turn run one after the other, under the same load)}.
Summary: `plain_cost_n` for n requests, and `plain_cost`, the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.bench_record import write_record

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.types import HiddenStateSample

CONTEXT, PROMPT = 512, 64
Rows = list[dict[str, Any]]


def open_engine(model: Path, speculation: dict[str, Any], dtype: str) -> EmbeddedBackend:
    """An engine of one thread with the model's weights."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.trainer.models import push_policy

    section = RolloutSection.model_validate(
        {"dtype": dtype, "max_running_requests": 16, "kv_cache_mib": 1024, "speculation": speculation}
    )
    policy = ModelSection(path=str(model), max_context=CONTEXT)
    backend = build_backend(EngineOptions(section, policy))
    push_policy(model, backend)
    return backend


def rollout(backend: EmbeddedBackend, first: int, requests: int, tokens: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of a rollout of `requests` responses, up to four to a prompt, and the responses."""
    from megatron_tlt.types import GenerateCall, Prompt, SamplingParams

    vocab, samples_each = backend.engine.limits.vocab_size, min(requests, 4)
    rng, numbers = np.random.default_rng(first), range(first, first + requests // samples_each)
    prompts = [Prompt(i, "", tuple(rng.integers(0, vocab, PROMPT).tolist()), "") for i in numbers]
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    started = time.process_time()
    samples = backend.generate(GenerateCall(prompts, params, samples_each))
    return time.process_time() - started, [list(s.token_ids) for s in samples]


def measure(sides: dict[str, EmbeddedBackend], requests: int, turns: int, tokens: int) -> dict[str, Any]:
    """The row of one number of requests. Raises SystemExit if the sides' responses differ."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, turns):  # the first warms up
        outputs = []
        for name in [*sides] if turn % 2 else [*sides][::-1]:
            took, responses = rollout(sides[name], (turn + 1) * requests, requests, tokens)
            outputs.append(responses)
            if turn >= 0:
                seconds[name].append(took)
        if outputs[0] != outputs[1]:
            raise SystemExit(f"{requests} requests, turn {turn}: the drafter changed a response")
    plain, other = seconds.values()
    ratios = [b / a for a, b in zip(plain, other, strict=True)]
    ratio = statistics.median(ratios)
    print(f"{requests:3d} requests: ratio {ratio:.3f}, {min(ratios):.3f} to {max(ratios):.3f} by turn", flush=True)
    return {"requests": requests, **seconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="of a response")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    kind = json.loads((args.drafter / "config.json").read_text())["drafter"]
    spec = {"drafter": kind, "drafter_path": str(args.drafter), "selector": "beg_mab", "bandit": {"arms": [0]}}
    sides = {
        name: open_engine(args.model, speculation, args.dtype)
        for name, speculation in (("plain", {}), ("with_drafter", spec))
    }
    kept: list[HiddenStateSample] = []
    sides["with_drafter"].collect_hidden_states(lambda sample: (kept.clear(), kept.append(sample)))
    rows = [measure(sides, n, args.turns, args.tokens) for n in args.requests]
    summary = {f"plain_cost_{row['requests']}": row["ratio"] for row in rows}
    write_record(args.out, rows, {**summary, "plain_cost": max(summary.values())})


if __name__ == "__main__":
    main()
