"""Speculation on a policy that has something to say: the demo policy and its drafter, widened to a GPU's size.

`lib/larger_policy.py` widens them without changing an output, so acceptance is the demo policy's, and nothing needs
training or downloading. Engines of all strategies take turns on the same prompts; ratios are over plain decoding of
the same engine in the same round. In bf16 the shape of a forward rounds, so a few responses differ from plain
decoding's: their share stands beside that of plain decoding at another batch size.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import ROOT, TOKENIZER, Check
from benchmarks.gpu.decode import open_engine, pool_of
from benchmarks.gpu.result import Result, Row
from benchmarks.lib.larger_policy import widen, widen_drafter
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import GenerateCall, Prompt, SamplingParams

DRAFTER = ROOT / "assets/demo-drafter"
WIDE = (2048, 6144)  # hidden and MLP size: 600M parameters, whose reading bounds small batches
SAMPLES, SMOKE_SAMPLES = 8, 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "eagle": {"drafter": "eagle", "selector": "cost_model"},
    "eagle 4": {"drafter": "eagle", "selector": "fixed", "draft_len": 4},
}
FIXED = "eagle 4"  # drafts in every step: whether drafts are accepted is judged by it, and no selector's clock decides
WORST = 0.9  # of plain decoding: the selector falls back to it, so less means that it mismeasures

Responses = list[list[int]]


class Side:
    """One strategy's engine."""

    def __init__(self, check: Check, name: str, folders: tuple[Path, Path], batches: list[int]):
        speculation = dict(STRATEGIES[name])
        if speculation["drafter"] == "eagle":
            speculation["drafter_path"] = str(folders[1])
        self.samples = SMOKE_SAMPLES if check.smoke else SAMPLES
        self.name, self.backend = name, open_engine(check, folders[0], max(batches), 512, **speculation)

    def run(self, prompts: list[Prompt], params: SamplingParams, running: int) -> tuple[float, Responses, float]:
        """Tokens a second, responses and accept length with at most `running` requests at a time."""
        scheduler = self.backend.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_running=running)
        started = time.perf_counter()
        samples = self.backend.generate(GenerateCall(prompts, params, self.samples))
        seconds = time.perf_counter() - started
        stats = self.backend.take_stats()
        rate = stats.generated_tokens / seconds
        return rate, [s.token_ids for s in samples], stats.speculation.accept_length


def run(check: Check, found: Result) -> None:
    """Every strategy at every batch size."""
    batches, rounds, tokens = ([1, 4], 1, 16) if check.smoke else ([1, 8, 32], 2, 320)
    folders = policy_and_drafter(check)
    names = ["plain", FIXED] if check.smoke else list(STRATEGIES)
    sides = [Side(check, name, folders, batches) for name in names]
    for batch in batches:
        each = max(2, batch // SAMPLES * 2)  # prompts of a round: 16 responses or twice the batch
        prompts, params = open_prompts(folders[0], each * (rounds + 1), tokens)
        chunks = [prompts[i * each : (i + 1) * each] for i in range(rounds + 1)]
        for row in compare(sides, chunks, params, batch):
            found.add_row(row)
    summarize(found, sides, check)


def policy_and_drafter(check: Check) -> tuple[Path, Path]:
    """The widened pair; in a smoke run the demo's own."""
    if check.smoke:
        return TOKENIZER, DRAFTER
    policy, drafter = check.work / "wide-policy", check.work / "wide-drafter"
    if not drafter.is_dir():
        small = ModelConfig.from_hf(TOKENIZER)
        widen(TOKENIZER, WIDE[1], policy, hidden_size=WIDE[0], max_positions=2048)
        widen_drafter(DRAFTER, small, ModelConfig.from_hf(policy), drafter)
    return policy, drafter


def open_prompts(policy: Path, count: int, tokens: int) -> tuple[list[Prompt], SamplingParams]:
    """Sums as the demo policy knows them: most of 2 to 4 terms, one in eight of 7 to 10 with a response much longer."""
    tokenizer, rng, prompts = HFTokenizer(policy), random.Random(0), []
    for at in range(count):
        terms = rng.randint(7, 10) if at % 8 == 7 else rng.randint(2, 4)
        text = f"Calculate {' + '.join(str(rng.randint(1, 99)) for _ in range(terms))}."
        prompts.append(Prompt(at, f"sum:{at}", tuple(tokenizer.encode_chat(text)), text))
    return prompts, SamplingParams(stop_token_ids=tokenizer.eos_token_ids, max_tokens=tokens)


def compare(sides: list[Side], chunks: list[list[Prompt]], params: SamplingParams, batch: int) -> list[Row]:
    """Rows of one batch size; the first chunk only warms up (captures graphs, learns costs)."""
    for side in sides:
        side.run(chunks[0], params, batch)
    ratios: dict[str, list[float]] = {side.name: [] for side in sides}
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    differing: dict[str, list[float]] = {side.name: [] for side in sides}
    lengths: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn, prompts in enumerate(chunks[1:]):
        responses = {}
        for side in sides if turn % 2 == 0 else sides[::-1]:
            rate, responses[side.name], length = side.run(prompts, params, batch)
            rates[side.name].append(rate)
            lengths[side.name].append(length)
        for name, own in rates.items():
            ratios[name].append(own[-1] / rates["plain"][-1])
            differing[name].append(share_of_different(responses[name], responses["plain"]))
        if turn == 0:  # how much plain decoding differs from itself at another shape
            _, other, _ = sides[0].run(prompts, params, batch + 1 if batch == 1 else batch // 2)
            differing["plain"] = [share_of_different(other, responses["plain"])]
    return [
        {"batch": batch, "strategy": name, "tokens_per_s": statistics.median(rates[name])}
        | {"speedup": statistics.median(found), "min": min(found), "max": max(found)}
        | {"accept_length": statistics.median(lengths[name]), "differing": statistics.mean(differing[name])}
        for name, found in ratios.items()
    ]


def share_of_different(a: Responses, b: Responses) -> float:
    """Share of responses that are not the same token for token."""
    return sum(x != y for x, y in zip(a, b, strict=True)) / len(a)


def summarize(found: Result, sides: list[Side], check: Check) -> None:
    """Figures of the default selector, in a smoke run of the fixed strategy; responses that must not differ. Mutates
    `found`.
    """
    fixed = [row for row in found.rows if row["strategy"] == FIXED]
    ours = fixed if check.smoke else [row for row in found.rows if row["strategy"] == "eagle"]
    found.note({f"speedup_b{row['batch']}": row["speedup"] for row in ours})
    found.note({"accept_length": ours[0]["accept_length"], "worst_batch": min(r["speedup"] for r in ours)})
    drafted = [row["differing"] for row in found.rows if row["strategy"] != "plain"]
    plain = max(row["differing"] for row in found.rows if row["strategy"] == "plain")
    found.note({"differing_responses": max(drafted), "differing_plain": plain})
    if not check.is_cuda and max(drafted) > 0:
        found.fail(f"in float32 {max(drafted):.0%} of the responses changed with speculation")
    if max(row["accept_length"] for row in fixed) <= 1.0:
        found.fail("the drafter's drafts are never accepted")
    if not check.smoke and min(r["speedup"] for r in ours) < WORST:
        found.fail(f"speculation is {min(r['speedup'] for r in ours):.2f} of plain decoding")
    for side in sides:
        if not pool_of(side.backend).graphs.stats.replays:
            found.fail(f"{side.name}: no step went through the graph pool")
