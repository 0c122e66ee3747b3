"""Speculative against plain decoding: the same engine, prompts and noise, so the same responses, token for token.

Strategies take turns within a round (A B C ... C B A ...); every figure is the median over rounds of the ratio to plain
decoding in the same round. Ratios are of CPU time of this process, which runs one thread: on a machine that others
share, preemption alone moves wall time by a fifth. Wall time is in the rows, too (`speedup_wall`). A side's turn lasts
`--seconds` of plain decoding at least. A batch size b means: at most b requests run, and enough wait to keep it so. The
long-tailed rollout starts 64 requests together and runs until the last has ended. Prompts, sampling and lengths are
the quickstart's. Responses of all strategies are compared; a difference ends the benchmark with an error.

    python benchmarks/bench_speculation.py [--quick] [--layers 48] [--model DIR] [--drafter DIR] --out r.json

`--layers N` makes the policy deeper by layers that change nothing (their output projections are zero): the same
responses and acceptance at the cost of a larger model, whose weights do not fit the processor's cache. That is the
case of real policies, where a forward is bound by reading weights and further rows are nearly free.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.bench_record import ROOT, write_record

sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.types import Prompt, SamplingParams

SAMPLES, TAIL = 8, 64
# Name -> rollout.speculation. "ours" is the default selector; the others are fixed strategies and the bandit.
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "ours": {"drafter": "eagle", "selector": "cost_model"},
    "suffix cost_model": {"drafter": "suffix", "selector": "cost_model"},
    "eagle beg_mab": {"drafter": "eagle", "selector": "beg_mab"},
    **{
        f"{drafter} {k}": {"drafter": drafter, "selector": "fixed", "draft_len": k}
        for drafter, lengths in {"suffix": (4, 8), "eagle": (1, 2, 4, 5, 8, 11)}.items()
        for k in lengths
    },
}
FIXED = tuple(name for name, s in STRATEGIES.items() if s.get("selector") == "fixed")


@dataclass
class Turn:
    """What a side did with a round's work: seconds of CPU and wall time, tokens and responses."""

    cpu: float
    wall: float
    tokens: int
    responses: list[Any]


@dataclass
class Side:
    """One strategy's engine."""

    name: str
    backend: EmbeddedBackend
    accept_length: float = 0.0

    def run(self, prompts: list[Prompt], params: SamplingParams, running: int) -> Turn:
        """Responses with at most `running` requests at a time, and what they took."""
        from megatron_tlt.types import GenerateCall

        scheduler = self.backend.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_running=running)
        wall, cpu = time.perf_counter(), time.process_time()
        samples = self.backend.generate(GenerateCall(prompts, params, SAMPLES))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        stats = self.backend.take_stats()
        if stats.speculation.row_steps:
            self.accept_length = stats.speculation.accept_length
        return Turn(cpu, wall, stats.generated_tokens, [(s.token_ids, s.logprobs) for s in samples])


def open_side(name: str, args: argparse.Namespace) -> Side:
    """An engine with the policy's weights and one strategy."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.load import load_config
    from megatron_tlt.trainer.models import push_policy

    overrides = [f"model.path={args.model}", "rollout.max_running_requests=64", f"rollout.dtype={args.dtype}"]
    spec = dict(STRATEGIES[name])
    if spec["drafter"] == "eagle":
        spec["drafter_path"] = str(args.drafter)
    overrides += [f"rollout.speculation.{key}={value}" for key, value in spec.items()]
    config = load_config(args.config, overrides)
    backend = build_backend(EngineOptions(config.rollout, config.model))
    push_policy(args.model, backend)
    return Side(name, backend)


def open_prompts(args: argparse.Namespace) -> tuple[PromptStream, SamplingParams]:
    """The quickstart's prompts and sampling.

    Every measurement takes its own prompts from the stream: the same prompt again has the same response, by keyed
    sampling, and a suffix drafter that remembers it drafts all of it.
    """
    from megatron_tlt.config.load import load_config
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.trainer.sampling import sampling_params

    config = load_config(args.config, [f"model.path={args.model}"])
    tokenizer = HFTokenizer(args.model)
    stream = build_prompts(config.data, "train", tokenizer, config.train.seed)
    params = replace(sampling_params(config), stop_token_ids=tokenizer.eos_token_ids)
    return stream, params


def measure(
    sides: list[Side], work: list[list[Prompt]], params: SamplingParams, running: int, repeats: int
) -> list[dict[str, Any]]:
    """Rows of one batch size. The first prompts only warm the engines up; each round takes the next ones."""
    for side in sides:
        side.run(work[0], params, running)
    turns: dict[str, list[Turn]] = {side.name: [] for side in sides}
    lengths: dict[str, list[float]] = {side.name: [] for side in sides}
    for round_ in range(repeats):
        expected = None
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            turn = side.run(work[1 + round_ % (len(work) - 1)], params, running)
            if expected is None:
                expected = turn.responses
            elif turn.responses != expected:
                raise SystemExit(f"{side.name} gave other responses than the others at batch {running}")
            turn.responses = []
            turns[side.name].append(turn)
            lengths[side.name].append(side.accept_length)
    rows = []
    for side in sides:
        pairs = list(zip(turns[side.name], turns["plain"], strict=True))
        ratios = [plain.cpu / turn.cpu for turn, plain in pairs]
        rows.append(
            {
                "batch": running,
                "strategy": side.name,
                "speedup": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
                "speedup_wall": statistics.median(plain.wall / turn.wall for turn, plain in pairs),
                "tokens_per_s": statistics.median(turn.tokens / turn.cpu for turn, _ in pairs),
                "tokens_per_s_wall": statistics.median(turn.tokens / turn.wall for turn, _ in pairs),
                "accept_length": statistics.median(lengths[side.name]),
                "repeats": repeats,
            }
        )
    return rows


def plan_work(
    plain: Side, prompts: PromptStream, params: SamplingParams, running: int, args: argparse.Namespace
) -> list[list[Prompt]]:
    """Warm-up and rounds: each at least four times the batch, and `--seconds` of plain decoding."""
    first = prompts.next_batch(max(2, running // 2))
    plain.run(first, params, running)
    seconds = plain.run(first, params, running).cpu / len(first)
    each = max(len(first), math.ceil(args.seconds / seconds))
    return [prompts.next_batch(each) for _ in range(args.repeats + 1)]


def table(rows: list[dict[str, Any]], batches: list[Any]) -> str:
    """Strategies down, batch sizes across."""
    lines = ["| strategy | " + " | ".join(str(b) for b in batches) + " |", "|---|" + "---|" * len(batches)]
    for name in dict.fromkeys(r["strategy"] for r in rows):
        cells = [
            f"{r['speedup']:.2f} ({r['accept_length']:.1f})" if r["accept_length"] else f"{r['speedup']:.2f}"
            for b in batches
            for r in rows
            if (r["strategy"], r["batch"]) == (name, b)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summarize(rows: list[dict[str, Any]], batches: list[int]) -> dict[str, float]:
    """Summary keys: the default selector, and its ratio to the best fixed strategy of each batch size."""
    of = {(r["strategy"], r["batch"]): r for r in rows}
    ours = [of["ours", b]["speedup"] for b in batches]
    fixed = [max([of[name, b]["speedup"] for name in FIXED if (name, b) in of] + [1.0]) for b in batches]
    summary = {"speedup_b1": ours[0], "worst_batch": min(ours)}
    summary["adaptive_vs_best_fixed"] = min(a / b for a, b in zip(ours, fixed))
    if ("ours", "tail") in of:
        summary["speedup_tail"] = of["ours", "tail"]["speedup"]
    summary["accept_length"] = of["ours", batches[0]]["accept_length"]
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8, the tail, few strategies, 3 rounds")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/demo-policy")
    parser.add_argument("--drafter", type=Path, default=ROOT / "assets/demo-drafter")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, help="deepen the policy to so many layers, same responses")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--strategies", nargs="+", choices=[*STRATEGIES], default=[*STRATEGIES])
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of plain decoding in a side's turn")
    parser.add_argument("--no-tail", action="store_true", help="leave the long-tailed rollout out")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.strategies[0] != "plain" or "ours" not in args.strategies:
        raise SystemExit("--strategies: plain comes first, as what the others are compared with, and ours is needed")
    import torch

    torch.set_num_threads(1)
    if args.quick:
        args.batches, args.repeats, args.seconds = [1, 8], 3, 0.0
        args.strategies = ["plain", "ours", "suffix 4", "eagle 2", "eagle 4"]
    with tempfile.TemporaryDirectory() as folder:
        if args.layers:
            from lib.larger_policy import deepen

            args.model = deepen(args.model, args.layers, Path(folder))
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    sides = [open_side(name, args) for name in args.strategies]
    prompts, params = open_prompts(args)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        work = plan_work(sides[0], prompts, params, batch, args)
        rows += measure(sides, work, params, batch, args.repeats)
        print(table([r for r in rows if r["batch"] == batch], [batch]), flush=True)
    if not args.no_tail:
        work = [prompts.next_batch(TAIL // SAMPLES) for _ in range(args.repeats + 1)]
        tail = measure(sides, work, params, TAIL, args.repeats)
        rows += [row | {"batch": "tail"} for row in tail]
    print(table(rows, [*args.batches, "tail"]))
    summary = summarize(rows, args.batches)
    for name, value in summary.items():
        print(f"{name:28s} {value:10.3f}")
    write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
