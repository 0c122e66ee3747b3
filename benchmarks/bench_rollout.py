"""Rollouts of this project with TLT against `transformers.generate` and vLLM's CPU build with its own speculation.

    python benchmarks/bench_rollout.py [--quick] [--model DIR --drafter DIR] [--requests 4 16]
        [--sides "ours TLT in vllm" "vllm eagle" ..] [--equal] [--dtype bf16] --out r.json

Figures are tokens per second on the same prompts. Sides: ours plain and with TLT (eagle, the default selector), in the
embedded engine and, without torch.compile, inside vLLM (`rollout.backend: vllm`); transformers, one static batch that
runs until its longest response has ended; vLLM plain, with ngram, with suffix decoding
(arctic-inference) and with EAGLE, for which this project's drafter is written in vLLM's layout. vLLM 0.32 divides the
logits of drafted positions by uninitialised memory at any temperature above 0 on CPUs (vllm#55005): its speculating
sides run with that kernel replaced, and one more side, "vllm ngram as-shipped", without. Every side is a process of one
thread; they take turns (A B .. A B ..). A turn is `--batches` rollouts of n requests, n / 4 new prompts times 4
responses (one prompt below 4 requests), each until all of its responses have ended. Responses differ between the
engines, so a rate is tokens over seconds, and each row has the mean reward and length of the side's responses: a side
that samples wrongly shows there.
Ours agree up to near-ties in whatever engine and with whatever drafter: "parted" counts those that differ. With
`--equal` no response ends before its longest length: every step has n requests, for the cost of keyed sampling.

Rows: {"requests", "side", "tokens_per_s" (median of turns), "min", "max", "accept_length" (tokens a step of a request,
0 without drafts), "reward", "mean_length", "turns", "parted" (of ours: responses unlike those of our first side)}.
Summary, for n requests: `tokens_per_s_n`, ours with TLT; `vs_transformers_n`, ours plain over transformers;
`vs_vllm_n`, ours with TLT over vLLM's fastest speculating side, `vs_vllm_plain_n` over its plain one; `tlt_gain_n`,
`tlt_in_vllm_gain_n`, `vllm_gain_n`, speculation over plain decoding in the same engine (`vllm_gain_n`: of the fastest
side); `in_vllm_vs_vllm_n`, ours inside vLLM with TLT over vLLM's fastest speculating side; `keyed_vs_plain_n`, ours
inside vLLM over vLLM, both plain (use `--eager`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.bench_record import LARGE_PAGES, ROOT, write_record
from benchmarks.lib.child import Child, serve
from benchmarks.lib.rollout_sides import AS_SHIPPED, OURS, SIDES, Response, Work, load, write_vllm_drafter

if TYPE_CHECKING:
    from megatron_tlt.types import Prompt

SAMPLES = 4
Rows = list[dict[str, Any]]
Score = Callable[[int, list[int]], float]  # reward of a response's tokens by prompt id


@dataclass
class Turns:
    """What one side did with the rollouts of one size."""

    rates: list[float] = field(default_factory=list)  # tokens per second, of each turn
    accept_lengths: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of each response
    lengths: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def add(self, responses: list[Response], works: list[Work], score: Score) -> None:
        """Adds a turn."""
        tokens = sum(len(out) for a in responses for out in a["outputs"])
        self.rates.append(tokens / sum(a["seconds"] for a in responses))
        self.accept_lengths += [a["accept_length"] for a in responses]
        for work, response in zip(works, responses, strict=True):
            for i, out in enumerate(response["outputs"]):
                self.rewards.append(score(work["first_id"] + i // work["samples"], out))
                self.lengths.append(len(out))
                self.outputs.append(out)

    def row(self, requests: int, side: str, ours: list[list[int]] | None) -> dict[str, Any]:
        """The row of the record; `ours`: responses of our first side."""
        is_ours = side in OURS and ours is not None
        parted = {"parted": sum(a != b for a, b in zip(self.outputs, ours, strict=True))} if is_ours else {}
        return {
            **parted,
            "requests": requests,
            "side": side,
            "tokens_per_s": statistics.median(self.rates),
            "min": min(self.rates),
            "max": max(self.rates),
            "accept_length": statistics.mean(self.accept_lengths),
            "reward": statistics.mean(self.rewards),
            "mean_length": statistics.mean(self.lengths),
            "turns": len(self.rates),
            "responses": len(self.outputs),
        }


class PromptSource:
    """The configuration's training prompts, each given out once, and the reward of responses to them."""

    def __init__(self, config: Path, model: Path, are_equal: bool):
        from megatron_tlt.config.load import load_config
        from megatron_tlt.data.prompts import build_prompts
        from megatron_tlt.data.tokenizer import HFTokenizer
        from megatron_tlt.rewards.build import build_scorers

        self.config = load_config(config, [f"model.path={model}"])
        self._tokenizer = HFTokenizer(model)
        self._stream = build_prompts(self.config.data, "train", self._tokenizer, self.config.train.seed)
        self._scorers = build_scorers(self.config.rewards)
        self._prompts: dict[int, Prompt] = {}
        self._ends = [] if are_equal else list(self._tokenizer.eos_token_ids)

    def next_work(self, requests: int) -> Work:
        """One rollout's work."""
        samples = min(SAMPLES, requests)
        prompts = self._stream.next_batch(requests // samples)
        self._prompts |= {p.prompt_id: p for p in prompts}
        return {
            "first_id": prompts[0].prompt_id,
            "prompts": [list(p.token_ids) for p in prompts],
            "samples": samples,
            "max_tokens": self.config.rollout.max_tokens,
            "eos": self._ends,
        }

    def score(self, prompt_id: int, token_ids: list[int]) -> float:
        """The configured reward."""
        from megatron_tlt.rewards.base import judge
        from megatron_tlt.types import Sample

        sample = Sample(prompt_id, 0, token_ids, [], self._tokenizer.decode(token_ids), "stop", 0)
        value = self.config.rewards.failure_value
        return judge(self._scorers, value, self._prompts[prompt_id], sample).value


def open_side(side: str, args: argparse.Namespace, context: int, vllm_drafter: Path) -> Child:
    """The process of one side."""
    is_ours = side in OURS
    python = str(args.vllm_python) if side.startswith("vllm") else sys.executable
    options = ["--serve", side, "--model", str(args.model), "--context", str(context), "--dtype", args.dtype]
    options += ["--vllm-python", str(args.vllm_python), *(["--eager"] if args.eager else [])]
    options += ["--drafter", str(args.drafter if is_ours else vllm_drafter)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Child(side, [python, __file__, *options], 1, {"PYTHONPATH": path, **LARGE_PAGES})


def measure(children: list[Child], source: PromptSource, requests: int, turns: int, batches: int) -> Rows:
    """Rows of one size; the sides take turns, the first rollout warms up."""
    done = {child.name: Turns() for child in children}
    warm = source.next_work(requests)
    for child in children:
        child.run(warm)
    for _ in range(turns):
        works = [source.next_work(requests) for _ in range(batches)]
        for child in children:
            done[child.name].add([child.run(work) for work in works], works, source.score)
    ours = next((of_side.outputs for side, of_side in done.items() if side in OURS), None)
    rows = [of_side.row(requests, side, ours) for side, of_side in done.items()]
    for r in rows:
        print(
            f"{requests:3d} requests  {r['side']:22s} {r['tokens_per_s']:9.1f} tokens/s ({r['min']:.1f} - "
            f"{r['max']:.1f})  accepts {r['accept_length']:5.2f}  reward {r['reward']:.3f}  "
            f"length {r['mean_length']:.1f}  parted {r.get('parted', '-')} of {r['responses']}",
            flush=True,
        )
    return rows


def summarize(rows: Rows) -> dict[str, float]:
    """The summary that the module's docstring lists; keys of sides that did not run are left out."""
    summary: dict[str, float] = {}
    for n in sorted({r["requests"] for r in rows}):
        rate = {r["side"]: r["tokens_per_s"] for r in rows if r["requests"] == n and r["side"] != AS_SHIPPED}
        ours, plain, theirs = rate.get("ours TLT"), rate.get("ours plain"), rate.get("vllm plain")
        inside, keyed = rate.get("ours TLT in vllm"), rate.get("ours plain in vllm")
        best = max((v for k, v in rate.items() if k.startswith("vllm ") and k != "vllm plain"), default=None)
        pairs = {
            "vs_transformers": (plain, rate.get("transformers")),
            "vs_vllm": (ours, best),
            "vs_vllm_plain": (ours, theirs),
            "tlt_gain": (ours, plain),
            "vllm_gain": (best, theirs),
            "tlt_in_vllm_gain": (inside, keyed),
            "in_vllm_vs_vllm": (inside, best),
            "keyed_vs_plain": (keyed, theirs),
        }
        if ours is not None:
            summary[f"tokens_per_s_{n}"] = ours
        summary |= {f"{name}_{n}": a / b for name, (a, b) in pairs.items() if a is not None and b is not None}
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 requests, one turn of 2 rollouts, --eager")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/demo-policy")
    parser.add_argument("--drafter", type=Path, default=ROOT / "assets/demo-drafter")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv/peers-vllm/bin/python")
    sides = [*SIDES, AS_SHIPPED]
    parser.add_argument("--sides", nargs="+", choices=sides, help="default: all, without a vLLM those that need none")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile: starts sooner, is slower")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--equal", action="store_true", help="all responses as long as the longest")
    parser.add_argument("--requests", nargs="+", type=int, default=[4, 16], help=f"below {SAMPLES}, or multiples of it")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="rollouts of a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return args
    has_vllm = args.vllm_python.exists()
    if args.sides is None:
        args.sides = [side for side in sides if has_vllm or "vllm" not in side]
        if not has_vllm:
            print(f"{args.vllm_python} is not there (make bench-vllm): sides of vLLM are left out")
    elif not has_vllm and any("vllm" in side for side in args.sides):
        parser.error(f"{args.vllm_python} is not there: make bench-vllm")
    return args


def run(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Rows and summary."""
    if args.quick:
        args.requests, args.turns, args.batches, args.eager = [4], 1, 2, True
    source = PromptSource(args.config, args.model, args.equal)
    context = source.config.data.max_prompt_tokens + source.config.rollout.max_tokens
    with tempfile.TemporaryDirectory() as folder:
        vllm_drafter = Path(folder) / "drafter"
        write_vllm_drafter(args.drafter, vllm_drafter)
        children = [open_side(side, args, context, vllm_drafter) for side in args.sides]
        rows: Rows = []
        for requests in args.requests:
            rows += measure(children, source, requests, args.turns, args.batches)
        for child in children:
            child.close()
    return rows, summarize(rows)


def main() -> None:
    args = parse_arguments()
    if args.serve:
        python = str(args.vllm_python)
        paths = str(args.model), str(args.drafter)
        serve(lambda: load(args.serve, *paths, args.context, args.eager, args.dtype, python))
        return
    rows, summary = run(args)
    for name, value in summary.items():
        print(f"{name:28s} {value:10.2f}")
    write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()
