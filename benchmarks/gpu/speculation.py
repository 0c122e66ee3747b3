"""Speculative rollouts on one GPU: trains a policy and its drafter from nothing, then measures speculation.

    python benchmarks/gpu/speculation.py --out r.json                   # 15 to 20 minutes
    python benchmarks/gpu/speculation.py --smoke --device cpu --out r.json   # every line, small; meaningless figures

1. Trains a policy (28 layers, 350M parameters, bf16) for `--train-minutes` and warms up a drafter on its answers.
2. Speed-up of each strategy over our own plain decoding, by batch size, all through one graph pool a side; sides take
   turns, medians of ratios of one round. In bf16 the shape of a forward rounds, so a few answers differ from plain
   decoding's: their share stands beside that of plain decoding at another batch size.
3. Memory of captured graphs: one strategy; a pool for each strategy with every batch size; ours.
4. Acceptance by drafted position: 1 - TV, Gumbel-coupled, p(arg max q), p(top-4 of q).
5. Time of a forward against its tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_speculation import table  # noqa: E402
from gpu_drafter import acceptance, collect, warm_up  # noqa: E402
from gpu_policy import train_policy  # noqa: E402
from lib.bench_record import write_record  # noqa: E402

from megatron_tlt.backends.build import build_backend  # noqa: E402
from megatron_tlt.backends.embedded import EmbeddedBackend  # noqa: E402
from megatron_tlt.config.drafter import DrafterSection  # noqa: E402
from megatron_tlt.config.load import load_config  # noqa: E402
from megatron_tlt.config.model import ModelSection  # noqa: E402
from megatron_tlt.config.rollout import RolloutSection  # noqa: E402
from megatron_tlt.data.prompts import build_prompts  # noqa: E402
from megatron_tlt.data.tokenizer import HFTokenizer  # noqa: E402
from megatron_tlt.models.config import ModelConfig  # noqa: E402
from megatron_tlt.models.inputs import DecoderInput  # noqa: E402
from megatron_tlt.models.loader import iter_weights  # noqa: E402
from megatron_tlt.models.torch.decoder import TorchDecoder  # noqa: E402
from megatron_tlt.rollout.graph_pool import GraphPool, PooledDecoder, PoolSizes  # noqa: E402
from megatron_tlt.trainer.setup import sampling_params  # noqa: E402
from megatron_tlt.types import Prompt, SamplingParams  # noqa: E402

SAMPLES = 8
BLOCK = 16
# Name -> rollout.speculation. "ours" is the default selector.
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "ours": {"drafter": "hybrid", "selector": "cost_model"},
    "eagle cost_model": {"drafter": "eagle", "selector": "cost_model"},
    "eagle beg_mab": {"drafter": "eagle", "selector": "beg_mab"},
    "suffix cost_model": {"drafter": "suffix", "selector": "cost_model"},
    "eagle 2": {"drafter": "eagle", "selector": "fixed", "draft_len": 2},
    "eagle 4": {"drafter": "eagle", "selector": "fixed", "draft_len": 4},
    "eagle 8": {"drafter": "eagle", "selector": "fixed", "draft_len": 8},
    "eagle 4 top2": {"drafter": "eagle", "selector": "fixed", "draft_len": 4, "topk": 2},
}
FIXED = tuple(name for name, s in STRATEGIES.items() if s.get("selector") == "fixed")
# Tokens verified for each sequence, by largest batch: as TLT, long drafts for few requests and short ones for many.
VERIFY = {2: (4, 8, 16, 32), 8: (4, 8, 16), 16: (4, 8), 32: (2, 4)}


@dataclass(frozen=True)
class Setup:
    """What all parts share."""

    device: torch.device
    policy: Path
    drafter: Path
    batches: list[int]
    repeats: int
    tokens: int  # longest answer
    config: Any  # the quickstart's, for its prompts and sampling

    @property
    def dtype(self) -> str:
        """bf16, but fp32 where the run is only a rehearsal."""
        return "bf16" if self.device.type == "cuda" else "fp32"


# Engines.


def open_engine(setup: Setup, speculation: dict[str, Any]) -> EmbeddedBackend:
    """An engine whose decoding and verifying steps go through a graph pool."""
    values = dict(speculation)
    if values["drafter"] in ("eagle", "hybrid"):
        values["drafter_path"] = str(setup.drafter)
    rollout = RolloutSection.model_validate(
        {
            "dtype": setup.dtype,
            "kernels": "auto" if setup.device.type == "cuda" else "torch",
            "max_running_requests": max(setup.batches),
            "kv_cache_mib": 2048 if setup.device.type == "cuda" else 64,
            "order": "arrival",
            "speculation": values,
        }
    )
    section = ModelSection(path=str(setup.policy), max_context=512)
    backend = build_backend(rollout, section, device=setup.device, load_weights=True)
    runner = backend.engine.runner
    if not isinstance(runner.decoder, PooledDecoder):
        sizes = PoolSizes(max(setup.batches), section.max_context, rollout.block_size)
        runner.decoder = PooledDecoder(runner.decoder, runner.kv, sizes)
    return backend


def pool_of(backend: EmbeddedBackend) -> GraphPool:
    """The graph pool of an engine."""
    decoder = backend.engine.runner.decoder
    assert isinstance(decoder, PooledDecoder)
    return decoder.pool


def open_prompts(setup: Setup, count: int) -> tuple[list[Prompt], SamplingParams]:
    """The quickstart's prompts and sampling."""
    tokenizer = HFTokenizer(setup.policy)
    stream = build_prompts(setup.config.data, "train", tokenizer, setup.config.train.seed)
    params = replace(
        sampling_params(setup.config), stop_token_ids=tokenizer.eos_token_ids, max_tokens=setup.tokens
    )
    return stream.next_batch(count), params


# The table.


class Side:
    """One strategy's engine."""

    def __init__(self, name: str, setup: Setup):
        self.name, self.backend = name, open_engine(setup, STRATEGIES[name])
        self.accept_length = 0.0

    def run(
        self, prompts: list[Prompt], params: SamplingParams, running: int
    ) -> tuple[float, list[list[int]]]:
        """Tokens per second and answers with at most `running` requests at a time."""
        scheduler = self.backend.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_running=running)
        started = time.perf_counter()
        samples = self.backend.generate(prompts, params, SAMPLES)
        seconds = time.perf_counter() - started
        stats = self.backend.take_stats()
        self.accept_length = stats.speculation.accept_length
        return stats.generated_tokens / seconds, [s.token_ids for s in samples]


def speedups(setup: Setup, prompts: list[Prompt], params: SamplingParams) -> list[dict[str, Any]]:
    """Rows of every strategy at every batch size."""
    sides = [Side(name, setup) for name in STRATEGIES]
    rows = []
    for batch in setup.batches:
        each = max(2, batch // 2)  # prompts of a round: 8 samples each, so at least four times the batch
        rounds = [prompts[i : i + each] for i in range(0, len(prompts) - each + 1, each)][: setup.repeats + 1]
        rows += compare(sides, rounds, params, batch)
        print(table([r for r in rows if r["batch"] == batch], [batch]), flush=True)
    for side in sides:
        stats = pool_of(side.backend).stats()
        if not stats.replays:
            raise SystemExit(
                f"{side.name}: no step went through the graph pool (the engine uploads every batch)"
            )
        rows.append(
            {"measure": "pool", "strategy": side.name} | {k: getattr(stats, k) for k in stats.__slots__}
        )
    return rows


def compare(
    sides: list[Side], rounds: list[list[Prompt]], params: SamplingParams, running: int
) -> list[dict[str, Any]]:
    """Rows of one batch size; the first round only warms up (captures graphs, learns costs)."""
    for side in sides:
        side.run(rounds[0], params, running)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    differing: dict[str, list[float]] = {side.name: [] for side in sides}
    lengths: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn, prompts in enumerate(rounds[1:]):
        answers = {}
        for side in sides if turn % 2 == 0 else sides[::-1]:
            rate, answers[side.name] = side.run(prompts, params, running)
            rates[side.name].append(rate)
            lengths[side.name].append(side.accept_length)
        for side in sides:
            differing[side.name].append(share_of_different(answers[side.name], answers["plain"]))
        if turn == 0:  # how much plain decoding differs from itself at another shape
            _, other = sides[0].run(prompts, params, running + 1 if running == 1 else running // 2)
            differing["plain"] = [share_of_different(other, answers["plain"])]
    rows = []
    for side in sides:
        ratios = [a / b for a, b in zip(rates[side.name], rates["plain"], strict=True)]
        row = {"measure": "speedup", "batch": running, "strategy": side.name, "repeats": len(ratios)}
        row |= {"speedup": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        row |= {"tokens_per_s": statistics.median(rates[side.name])}
        row |= {"accept_length": statistics.median(lengths[side.name])}
        rows.append(row | {"differing_answers": statistics.mean(differing[side.name])})
    return rows


def share_of_different(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of answers that are not the same token for token."""
    return sum(x != y for x, y in zip(a, b, strict=True)) / len(a)


# Graphs.


def synthetic(pool_blocks: int, sequences: int, tokens: int, context: int) -> DecoderInput:
    """Chains of `tokens` rows behind `context` cached positions each, in blocks of their own while there are any."""
    blocks = -(-(context + tokens) // BLOCK)
    tables = (torch.arange(sequences * blocks) % pool_blocks).view(sequences, blocks)
    positions = context + torch.arange(tokens).repeat(sequences)
    owner = torch.arange(sequences).repeat_interleave(tokens)
    slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    rows = torch.arange(sequences * tokens + 1)
    parts = (rows[:-1] % 100, positions, slots, rows[::tokens])
    more = (torch.full((sequences,), context + tokens), tables, rows[:-1])
    return DecoderInput.of([p.to(torch.int32).contiguous() for p in (*parts, *more)])


def graph_memory(decoder: TorchDecoder, batches: list[int]) -> list[dict[str, Any]]:
    """Bytes for one strategy, for naive many (a pool each, every batch size) and for ours; plain decoding included."""
    context, block_count = 256, max(batches) * 24
    kv = decoder.new_kv_cache(block_count, BLOCK)
    strategies = sorted({k for tokens in VERIFY.values() for k in tokens})
    plain = [(b, 1) for b in batches]
    one = [*plain, *((b, 16) for b in batches)]
    ours = plain + [(b, k) for b in batches for k in next(v for most, v in VERIFY.items() if b <= most)]
    naive = [[*plain, *((b, k) for b in batches)] for k in strategies]
    rows = []
    for name, pools in (("one strategy", [one]), ("naive many", naive), ("ours", [ours])):
        total = graphs = 0
        seconds = 0.0
        kept = []
        for shapes in pools:
            sizes = PoolSizes(max(batches), 512, BLOCK, verify_rows=max(b * k for b, k in shapes))
            pool = GraphPool(decoder, kv, sizes)
            for batch, tokens in shapes:
                output = pool.run(synthetic(block_count, batch, tokens, context), tokens)
                assert bool(output.logits.isfinite().all())  # waits: the next run writes the same host memory
            stats = pool.stats()
            total, graphs = total + stats.memory_bytes, graphs + stats.graphs
            seconds += stats.capture_seconds
            kept.append(pool)  # all of them stay, as in an engine
        rows.append(
            {"measure": "graph_memory", "pool": name, "bytes": total, "graphs": graphs, "seconds": seconds}
        )
        del kept, pool, output
    return rows


def step_times(decoder: TorchDecoder, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a forward, by sequences and tokens of each."""
    block_count = max(batches) * 24
    kv = decoder.new_kv_cache(block_count, BLOCK)
    pool = GraphPool(decoder, kv, PoolSizes(max(batches), 512, BLOCK))
    rows = []
    for sequences in sorted({batches[0], batches[len(batches) // 2], batches[-1]}):
        for tokens in (1, 2, 4, 8, 16, 32):
            key = pool.key(sequences, tokens, 256)
            if key is None:
                continue
            batch = synthetic(block_count, sequences, tokens, 256)
            taken = timed(lambda batch=batch, tokens=tokens: pool.run(batch, tokens), decoder.device, repeats)
            row = {"measure": "step_time", "sequences": sequences, "tokens": sequences * tokens}
            rows.append(row | {"ms": 1e3 * statistics.median(taken), "min": 1e3 * min(taken)})
    return rows


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs after two to warm up, the device waited for."""
    taken = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return taken[2:]


# Drafter and report.


def make_drafter(setup: Setup, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Warms a drafter up on answers of the plain engine; returns its acceptance on other prompts' answers."""
    prompts, params = open_prompts(setup, args.drafter_prompts + args.drafter_prompts // 8)
    backend = open_engine(setup, STRATEGIES["plain"])
    samples = backend.generate(prompts, params, 4)
    decoder = backend.engine.runner.decoder
    assert isinstance(decoder, PooledDecoder)
    sequences = collect(decoder.inner, prompts, samples)
    backend.close()
    policy = ModelConfig.from_hf(str(setup.policy))
    weights = {n: w for n, w in iter_weights(setup.policy, policy) if "embed_tokens" in n or "lm_head" in n}
    embed = weights["model.embed_tokens.weight"].to(setup.device, torch.float32)
    head = weights.get("lm_head.weight", embed).to(setup.device, torch.float32)
    section = DrafterSection(
        num_steps=args.drafter_steps,
        batch_tokens=args.drafter_tokens,
        dtype="bf16" if setup.device.type == "cuda" else "fp32",
    )
    held_out = (len(prompts) - args.drafter_prompts) * 4  # samples are in order of their prompts
    model = warm_up(setup.drafter, policy, embed, head, sequences[:-held_out], section)
    return acceptance(model, embed, head, sequences[-held_out:], section.eval_steps, args.drafter_tokens)


def summarize(rows: list[dict[str, Any]], batches: list[int]) -> dict[str, float]:
    """The keys of this benchmark."""
    of = {(r["strategy"], r["batch"]): r for r in rows if r["measure"] == "speedup"}
    ours = [of["ours", b]["speedup"] for b in batches]
    fixed = [max([of[name, b]["speedup"] for name in FIXED] + [1.0]) for b in batches]
    summary = {"speedup_b1": ours[0], f"speedup_b{batches[-1]}": ours[-1], "worst_batch": min(ours)}
    summary["adaptive_vs_best_fixed"] = min(a / b for a, b in zip(ours, fixed, strict=True))
    summary["accept_length"] = of["ours", batches[0]]["accept_length"]
    summary["differing_answers"] = max(
        r["differing_answers"] for r in of.values() if r["strategy"] != "plain"
    )
    summary["differing_plain"] = max(of["plain", b]["differing_answers"] for b in batches)
    for row in rows:
        if row["measure"] == "graph_memory":
            summary[f"graphs_gb_{row['pool'].replace(' ', '_')}"] = row["bytes"] / 1e9
        if row["measure"] == "acceptance" and row["position"] == 1:
            summary |= {f"accept_{name}": row[name] for name in ("tv", "coupled", "argmax", "top4")}
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny policy and few steps: runs every line")
    parser.add_argument("--train-minutes", type=float, default=5.0)
    parser.add_argument("--drafter-prompts", type=int, default=2048)
    parser.add_argument("--drafter-steps", type=int, default=1500)
    parser.add_argument("--drafter-tokens", type=int, default=16384, help="token budget of a drafter step")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=320, help="longest answer")
    parser.add_argument(
        "--work", type=Path, help="keep policy and drafter here, and use those that are there"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        args.train_minutes, args.drafter_prompts, args.drafter_steps = 0.1, 16, 20
        args.drafter_tokens, args.batches, args.repeats, args.tokens = 2048, [1, 4], 2, 24
    return args


def measure(args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All parts in order."""
    device = torch.device(args.device)
    setup = Setup(
        device,
        work / "policy",
        work / "drafter",
        args.batches,
        args.repeats,
        args.tokens,
        load_config(ROOT / "configs/quickstart.yaml"),
    )
    rows: list[dict[str, Any]] = []
    if not (setup.policy / "config.json").is_file():
        print("policy", flush=True)
        made = train_policy(setup.policy, device, 60 * args.train_minutes, "smoke" if args.smoke else "full")
        rows.append({"measure": "policy"} | made)
    print("drafter", flush=True)
    rows += make_drafter(setup, args)
    policy = ModelConfig.from_hf(str(setup.policy))
    decoder = TorchDecoder(policy, device, torch.bfloat16 if setup.dtype == "bf16" else torch.float32)
    decoder.load_weights(iter_weights(setup.policy, policy))
    print("graphs", flush=True)
    rows += graph_memory(decoder, args.batches)
    rows += step_times(decoder, args.batches, 20 * args.repeats)
    del decoder
    prompts, params = open_prompts(setup, (args.repeats + 1) * max(2, max(args.batches) // 2))
    rows += speedups(setup, prompts, params)
    print(table([r for r in rows if r["measure"] == "speedup"], args.batches))
    return rows, summarize(rows, args.batches)


def main() -> None:
    args = parse_arguments()
    if args.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows, summary = measure(args, args.work or Path(scratch))
    for row in rows:
        if row["measure"] in ("policy", "acceptance", "graph_memory", "step_time"):
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    for name, value in summary.items():
        print(f"{name:28s} {value:10.3f}")
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "no GPU"
    write_record(args.out, rows, summary, device=gpu)


if __name__ == "__main__":
    main()
