"""Measures the seconds of the engine's steps and its drafters' acceptance, for `megatron-tlt simulate`.

    python tools/fit_cost_model.py configs/quickstart.yaml --out benchmarks/results/step-costs-quickstart-cpu.json

The engine generates responses to the config's training prompts. A recorder in the selector's place uses plain decoding
and drafts of several lengths in turn, and records of every step the running requests B, the rows T fed to the policy,
the cached tokens C and the seconds (on CPU this thread's own time, without other processes' load). Fitted to these:

    plain    c0 + cB B + cC C                        drafts, by kind    a + b B + c nodes
    verify   c0 + cB B + cT T + cC C + cA C T / B    prefill            a + b tokens

and for each drafter the acceptance rate of each position (`rates`), `coverage`, `reach` and `spread`, the fields of
`drafters` in a simulation's config. `lengths` are 64 quantiles of the responses' tokens. `measured` names the model,
the device and the largest steps: a simulation of another model or device is refused.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.bench_record import commit, record_text

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.models.decoders.draft import Draft
    from megatron_tlt.rollout.rows import RunningRows
    from megatron_tlt.types import DraftedBy, DraftStrategy, Prompt, StepMeasurement

LENGTHS = (0, 1, 2, 3, 5, 8, 11)  # drafted in turn; 0: plain decoding
SPAN = 6  # steps of each, of which the first two do not count
POSITIONS = 12
KINDS = ("none", "suffix", "trained")  # of drafters


@dataclass
class Recorder:
    """A selector that uses every draft length in turn and records its steps."""

    kind: DraftedBy
    rows: RunningRows
    steps: list[tuple[bool, int, int, float, int, float, float]] = field(default_factory=list)
    tried: np.ndarray = field(default_factory=lambda: np.zeros(POSITIONS))
    right: np.ndarray = field(default_factory=lambda: np.zeros(POSITIONS))
    asked: int = 0
    counts: list[np.ndarray] = field(default_factory=list)
    cumulative_acceptances: list[np.ndarray] = field(default_factory=list)
    _turn: int = 0
    _cached: float = 0.0

    def select(self, num_running: int) -> DraftStrategy:
        """The strategy whose turn it is."""
        from megatron_tlt.types import NO_DRAFT, DraftStrategy

        self._cached = float(self.rows.context_lens[:num_running].sum())
        length = LENGTHS[(self._turn // SPAN) % len(LENGTHS)] if self.kind != "none" else 0
        self._turn += 1
        return DraftStrategy(self.kind, length) if length else NO_DRAFT

    def add_draft(self, strategy: DraftStrategy, draft: Draft) -> None:
        """Records what was drafted, before pruning."""
        if strategy.draft_len == max(LENGTHS):
            self.asked += len(draft.counts)
            self.counts.append(draft.counts.copy())
            self.cumulative_acceptances.append(draft.cumulative_acceptance[draft.positions == 0].copy())

    def record(self, measurement: StepMeasurement) -> None:
        """Records the step."""
        length = len(measurement.reached)
        self.tried[:length] += measurement.reached
        self.right[:length] += measurement.accepted
        if (self._turn - 1) % SPAN >= 2:
            running, rows = measurement.num_running, measurement.num_rows
            drafted = measurement.strategy.kind != "none"
            seconds = (measurement.draft_seconds, measurement.step_seconds)
            self.steps.append((drafted, running, rows, self._cached, rows - running, *seconds))

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {"selector": "recorder"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No state."""

    def drafter(self) -> dict[str, Any]:
        """Acceptance of the drafter, as in a simulation's configuration."""
        rates = [r / t for r, t in zip(self.right, self.tried, strict=True) if t >= 200]
        counts = np.concatenate(self.counts)
        drafted = counts[counts > 0]
        whole = max(LENGTHS)
        ends = np.count_nonzero(drafted < whole)
        first = np.concatenate(self.cumulative_acceptances)
        mean, spread = float(first.mean()), float(first.var())
        return {
            "rates": [round(min(float(r), 0.995), 4) for r in rates],
            "coverage": round(len(drafted) / max(1, self.asked), 4),
            "reach": round(1 - ends / max(1, int(drafted.sum()) - int(np.count_nonzero(drafted == whole))), 4),
            "spread": round(max(0.2, mean * (1 - mean) / max(spread, 1e-6) - 1), 2),
        }


def open_engine(config: Config, kind: str) -> tuple[EmbeddedBackend, Recorder | None]:
    """An engine with the model's weights and the recorder in the selector's place. The config names the trained drafter
    of the kind "trained".
    """
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions

    changed = {"drafter": "suffix"} if kind in ("none", "suffix") else {}
    spec = config.rollout.speculation.model_copy(update=changed)
    rollout = config.rollout.model_copy(update={"speculation": spec})
    backend = build_backend(EngineOptions(rollout, config.model, tokenizer=None, load_weights=True))
    speculator = backend.engine.speculator
    assert speculator is not None
    recorder = Recorder(kind, backend.engine.scheduler.rows)
    speculator.selector = recorder
    propose = speculator.drafter.propose

    def recorded(rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        draft = propose(rows, lengths, strategy)
        recorder.add_draft(strategy, draft)
        return draft

    speculator.drafter.propose = recorded  # type: ignore[method-assign]
    return backend, recorder


def measure(config: Config, kind: str, stream: PromptStream, most: int, seconds: float) -> tuple[Recorder, list[int]]:
    """Responses prompts for `seconds`, up to `most` at a time; returns what was recorded and the responses' lengths.

    Every batch takes new prompts: a repeated one has the same response, which a suffix drafter would draft in full.
    """
    from megatron_tlt.trainer.sampling import sampling_params
    from megatron_tlt.types import GenerateCall

    backend, recorder = open_engine(config, kind)
    assert recorder is not None
    params, lengths = sampling_params(config), []
    sizes = [most // 2**i or 1 for i in range(5)]
    started, turn = time.process_time(), 0
    while time.process_time() - started < seconds or turn < len(sizes):
        size = sizes[turn % len(sizes)]
        samples = 8 if turn % 3 else 1
        responses = backend.generate(GenerateCall(stream.next_batch(size), params, samples))
        lengths += [len(sample.token_ids) for sample in responses] if size == most else []
        turn += 1
    backend.close()
    return recorder, lengths


def measure_prefill(config: Config, prompts: list[Prompt]) -> list[tuple[int, float]]:
    """(prompt tokens, CPU seconds) of steps that have prompts only."""
    from dataclasses import replace

    from megatron_tlt.trainer.sampling import sampling_params
    from megatron_tlt.types import GenerateCall

    backend, _ = open_engine(config, "suffix")
    params = replace(sampling_params(config), max_tokens=1)
    rows = []
    for turn in range(40):
        size = 1 + turn * len(prompts) // 40
        started = time.thread_time()
        backend.generate(GenerateCall(prompts[:size], params, 1))
        tokens = sum(len(p.token_ids) for p in prompts[:size])
        if tokens <= config.rollout.max_batched_tokens:
            rows.append((tokens, time.thread_time() - started))
    backend.close()
    return rows


def fit(features: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """Non-negative coefficients of the least squares of relative errors, outliers left out; and the median error."""
    keep, weights = np.ones(len(seconds), bool), np.zeros(features.shape[1])
    for _ in range(4):
        scaled = features[keep] / seconds[keep, None]
        active = list(range(features.shape[1]))
        while True:  # drop what comes out negative, the most negative first
            solved = np.linalg.lstsq(scaled[:, active], np.ones(len(scaled)), rcond=None)[0]
            if solved.min() >= 0 or len(active) == 1:
                break
            active.pop(int(solved.argmin()))
        weights = np.zeros(features.shape[1])
        weights[active] = np.maximum(solved, 0)
        error = np.abs(features @ weights / seconds - 1)
        keep = error < max(0.2, 3 * float(np.median(error)))
    return weights.tolist(), float(np.median(error))


def fit_table(recorders: list[Recorder], prefill: list[tuple[int, float]]) -> tuple[dict[str, Any], dict[str, float]]:
    """The table that `sim.cost_model.MeasuredCosts` reads, and the median relative error of each fit."""
    rows = np.array([step for recorder in recorders for step in recorder.steps], np.float64)
    drafted, B, T, C, _, _, seconds = rows.T
    errors: dict[str, float] = {}
    table: dict[str, Any] = {"drafts": {}}
    attended = C * T / B  # positions that rows look at: what attention costs where computing is dear
    for name, mask, parts in (("plain", drafted == 0, (B, C)), ("verify", T > B, (B, T, C, attended))):
        features = np.stack([np.ones(len(B)), *parts], axis=1)
        table[name], errors[name] = fit(features[mask], seconds[mask])
    for recorder in recorders:
        steps = np.array([s for s in recorder.steps if s[0]], np.float64)
        if len(steps):
            features = np.stack([np.ones(len(steps)), steps[:, 1], steps[:, 4]], axis=1)
            table["drafts"][recorder.kind], errors[recorder.kind] = fit(features, np.maximum(steps[:, 5], 1e-7))
    tokens = np.array(prefill, np.float64)
    features = np.stack([np.ones(len(tokens)), tokens[:, 0]], axis=1)
    table["prefill"], errors["prefill"] = fit(features, tokens[:, 1])
    return table, errors


def measured_on(config: Config, recorders: list[Recorder]) -> dict[str, Any]:
    """What the table holds for (`sim.cost_model.Measured`): the model's shape, one CPU rank, the largest steps."""
    from megatron_tlt.models.hf.config import ModelConfig

    steps = [step for recorder in recorders for step in recorder.steps]
    return {
        "model": ModelConfig.from_hf(config.model.path).architecture.model_dump(mode="json"),
        "device": "cpu",
        "tp": 1,
        "requests": max(step[1] for step in steps),
        "cached_tokens": int(max(step[3] for step in steps)),
    }


def parse() -> argparse.Namespace:
    """The command line; ends the process where it cannot be used."""
    from megatron_tlt.config.checks.files import output_file_problems

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML file of an RL run")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")
    parser.add_argument("--drafters", nargs="+", choices=KINDS, default=list(KINDS), help="trained: the config's")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of each drafter")
    parser.add_argument("--raw", type=Path, help="also write every measured step")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.drafters == ["none"]:
        parser.error("--drafters none: verification is not measured without suffix or trained")
    if problems := [
        *output_file_problems("--out", args.out, rb'\{\n "command": ', [args.config]),
        *output_file_problems("--raw", args.raw, rb'\{"\w+": \[', [args.config]),
    ]:
        parser.error(str(problems[0]))
    return args


def check(config: Config, drafters: list[str]) -> None:
    """Raises ConfigError for an engine or a drafter that cannot be measured here."""
    from megatron_tlt.errors import ConfigError

    if config.rollout.backend != "embedded":
        raise ConfigError.of("rollout.backend", config.rollout.backend, "must be embedded: its steps are measured")
    if "trained" in drafters and config.rollout.speculation.trained is None:
        allowed = "must be a trained drafter for --drafters trained; without one: --drafters none suffix"
        raise ConfigError.of("rollout.speculation.drafter", config.rollout.speculation.drafter, allowed)


def run(args: argparse.Namespace) -> None:
    """Measures, fits, writes. Raises TltError."""
    from megatron_tlt.config.load import load_config
    from megatron_tlt.data.hub import on_this_machine
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.distributed.together import SingleProcess
    from megatron_tlt.trainer.chat_settings import with_date
    from megatron_tlt.trainer.token_checks import open_tokenizer

    alone, config = SingleProcess(), load_config(args.config, args.overrides)
    check(config, args.drafters)
    config = with_date(on_this_machine(config, alone), alone)
    stream = build_prompts(config.data, "train", open_tokenizer(config), config.train.seed)
    prompts = stream.next_batch(config.train.prompts_per_step)[: max(1, config.train.prompts_per_step // 2)]
    recorders, lengths = [], []
    for kind in args.drafters:
        recorder, found = measure(config, kind, stream, len(prompts), args.seconds)
        recorders.append(recorder)
        lengths += found
        print(f"{kind}: {len(recorder.steps)} steps", flush=True)
    if args.raw is not None:
        args.raw.write_text(json.dumps({r.kind: r.steps for r in recorders}) + "\n", encoding="utf-8")
    table, errors = fit_table(recorders, measure_prefill(config, prompts))
    quantiles = np.quantile(lengths, (np.arange(64) + 0.5) / 64)
    record = {
        "command": sys.argv,
        "commit": commit(),
        "machine": f"{platform.processor() or platform.machine()}, CPU seconds of one thread",
        "measured": measured_on(config, recorders),
        "table": table,
        "errors": errors,
        "drafters": {r.kind: r.drafter() for r in recorders if r.kind != "none"},
        "lengths": np.rint(quantiles).astype(int).tolist(),
        "prompt_tokens": round(sum(len(p.token_ids) for p in prompts) / len(prompts)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(record_text(record), encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("table", "errors", "drafters")}, indent=1))
    print(f"wrote {args.out}")


def main() -> int:
    """Exit status 0, 1 (failed) or 2 (bad input: arguments, configuration, files)."""
    from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED, OK
    from megatron_tlt.errors import BackendError, TltError, printable

    try:
        run(parse())
    except TltError as error:
        print(printable(f"fit_cost_model: {type(error).__name__}: {error}"), file=sys.stderr)
        return FAILED if isinstance(error, BackendError) else BAD_INPUT
    return OK


if __name__ == "__main__":
    raise SystemExit(main())
