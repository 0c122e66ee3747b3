"""What a run tells about itself: gathers the ranks' figures once a step and hands them to `observe/`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.observe.curves import curve_attrs
from megatron_tlt.observe.events import EventLog
from megatron_tlt.observe.log import enter_phase
from megatron_tlt.observe.memory import PhasePeaks
from megatron_tlt.observe.metrics import TENSORBOARD_DIR, MetricsLogger
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.observe.rollouts import RolloutLog, own_figures
from megatron_tlt.observe.samples import DraftsOf, SampleLog
from megatron_tlt.observe.summary import Accuracy, RunSummary, print_summary, write_summary

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.trainer.evaluation import EvalResult
    from megatron_tlt.types import EngineStats, SampleGroup

_IDLE_TOTALS = ("idle/seconds", "idle/recovered_seconds", "drafter/steps", "idle/stolen_requests")


class Observer:
    """Events, metrics, samples and progress of one rank."""

    def __init__(self, config: Config, world: World):
        self._config, self._world = config, world
        self._run_dir = Path(config.train.run_dir)
        self._events = EventLog(self._run_dir, world.rank)
        self._progress = build_progress(config.observe.progress, config.train.num_steps, world.rank)
        self._peaks = PhasePeaks.of(world.device)
        self._metrics: MetricsLogger | None = None
        self._samples: SampleLog | None = None
        self._rollouts: RolloutLog | None = None
        self.drafts_of: DraftsOf | None = None  # of this rank's engine, for the samples
        self._first_step = 0
        self._started = time.perf_counter()
        self._tokens = 0  # of all ranks since the start
        self._idle: Counter[str] = Counter()  # figures of idle time, of all ranks since the start
        self._accept_lengths: list[float] = []

    def on_rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """How far this rank's engine is: requests, and tokens since the rollout began."""
        self._progress.rollout(running, waiting, generated_tokens)
        if self._config.observe.live:
            self._events.running(self._world.step, running, waiting, generated_tokens)

    def start(self, steps_done: int) -> None:
        """Opens the files that a resumed run continues; rows after `steps_done` are dropped."""
        section, rank = self._config.observe, self._world.rank
        dump = self._config.model_dump(mode="json")
        self._metrics = MetricsLogger(self._run_dir, section, rank, steps_done, dump)
        self._samples = SampleLog(self._run_dir, section.samples_per_step, rank, steps_done)
        self._samples.drafts_of = self.drafts_of
        self._rollouts = RolloutLog(self._run_dir, rank, steps_done)
        self._first_step, self._started = steps_done, time.perf_counter()
        if steps_done:
            self._progress.note(f"resumed after step {steps_done}")

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """Times a phase and measures its memory; log lines and the display name it too."""
        enter_phase(name, step)
        self._progress.phase(name, step)
        if self._config.observe.live:
            self._events.enter(name, step)
        with self._peaks.phase(name), self._events.span(name, step) as fields:
            yield fields

    def state(self, name: str, started: float, seconds: float) -> None:
        """Notes the rank's state for `seconds` from `started` (seconds since the epoch) on, in the present step."""
        self._events.state(name, self._world.step, started, seconds)

    def note(self, text: str) -> None:
        """A line for the person watching (rank 0)."""
        self._progress.note(text)

    def log_step(
        self,
        step: int,
        seconds: float,
        metrics: Mapping[str, float],
        stats: EngineStats,
        groups: Sequence[SampleGroup],
        mine: Mapping[str, float] | None = None,
    ) -> None:
        """Everything one step says. Collective: the ranks' phase times and engine counters are gathered here.

        `mine` are figures of this rank; logged is their sum over the ranks, their maximum if the name ends in _max or
        _peak_mib, or the mean of the ranks that have one if it ends in _mean.
        """
        curve = curve_attrs(stats)
        if curve is not None:
            self._events.instant("curve", step - 1, **curve)
        phases = self._events.end_step()
        of_rank = {**(mine or {}), **self._peaks.take()}
        figures = own_figures(stats, groups, self._config.rollout.max_tokens)
        gathered = self._world.all_gather_object((phases, _counters(stats), of_rank, figures))
        ranks = [(times, counters) for times, counters, _, _ in gathered]
        names = sorted({name for rank_phases, _ in ranks for name in rank_phases})
        times = {f"time/{name}": sum(p.get(name, 0.0) for p, _ in ranks) / len(ranks) for name in names}
        idle = {f"idle/rank{rank:03d}": p.get("idle", 0.0) for rank, (p, _) in enumerate(ranks)}
        idle |= combined([own for _, _, own, _ in gathered])
        counters = {f"engine/{name}": float(sum(c[name] for _, c in ranks)) for name in _counters(stats)}
        tokens = int(counters["engine/generated_tokens"])
        self._tokens += tokens
        self._idle.update({name: idle.get(name, 0.0) for name in _IDLE_TOTALS})
        row = {_qualified(name): value for name, value in metrics.items()}
        row |= {
            **times,
            **idle,
            **counters,
            **_acceptance(counters),
            "time/step": seconds,
            "engine/tokens_per_s": _rate(ranks),
        }
        if "spec/accept_length" in row:
            self._accept_lengths.append(row["spec/accept_length"])
        if self._metrics is not None:
            self._metrics.log(step, row)
        if self._rollouts is not None:
            self._rollouts.log(step, [rank_figures for *_, rank_figures in gathered])
        if self._samples is not None:
            self._samples.log(step, groups)
        self._progress.step_done(step, seconds, tokens, row)

    def log_eval(self, result: EvalResult) -> None:
        """An evaluation, beside the metrics of its step."""
        if self._metrics is not None:
            middles = [
                (low + high) / 2
                for low, high in zip(result.histogram_edges, result.histogram_edges[1:], strict=False)
            ]
            lengths = [
                m for m, count in zip(middles, result.histogram_counts, strict=True) for _ in range(count)
            ]
            self._metrics.log(result.step, result.metrics(), {"eval/length": lengths})
        shown = "  ".join(f"pass@{k} {value:.3f}" for k, value in result.pass_at.items())
        self._progress.note(
            f"evaluation after step {result.step}: {shown} (± {result.stderr:.3f}, {result.num_prompts} prompts), "
            f"length {result.mean_length:.0f}, truncated {result.truncated:.1%}"
        )

    def finish(self, evaluations: Sequence[EvalResult], checkpoint: Path | None) -> None:
        """The final table and summary.json. Collective."""
        seconds = time.perf_counter() - self._started
        totals = self._world.all_gather_object(dict(self._events.phase_totals))
        self._progress.close()
        if not self._world.is_main:
            return
        summary = RunSummary(
            num_steps=self._config.train.num_steps - self._first_step,
            seconds=seconds,
            phases=totals[0],
            generated_tokens=self._tokens,
            rollout_seconds=totals[0].get("rollout", 0.0) + totals[0].get("idle", 0.0),
            idle_fractions=[t.get("idle", 0.0) / seconds for t in totals],
            idle_seconds=self._idle["idle/seconds"],
            recovered_seconds=self._idle["idle/recovered_seconds"],
            drafter_steps=int(self._idle["drafter/steps"]),
            stolen_requests=int(self._idle["idle/stolen_requests"]),
            accept_lengths=self._accept_lengths,
            before=_accuracy(evaluations[0]) if evaluations else None,
            after=_accuracy(evaluations[-1]) if evaluations else None,
            paths=self._paths(checkpoint),
        )
        write_summary(summary, self._run_dir)
        print_summary(summary)

    def _paths(self, checkpoint: Path | None) -> dict[str, str]:
        paths = {"metrics": str(self._run_dir / "metrics.jsonl"), "events": str(self._run_dir / "events")}
        if self._config.observe.tensorboard:
            paths["TensorBoard"] = str(self._run_dir / TENSORBOARD_DIR)
        if checkpoint is not None:
            paths["checkpoint"] = str(checkpoint)
        return paths

    def close(self) -> None:
        """Closes all files."""
        self._events.close()
        for part in (self._metrics, self._samples, self._rollouts):
            if part is not None:
                part.close()


def combined(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of all ranks as one: sums, but maxima of names in _max and _peak_mib, and means of those in _mean."""
    names = sorted({name for figures in ranks for name in figures})
    values = {name: [figures[name] for figures in ranks if name in figures] for name in names}
    return {
        name: max(of)
        if name.endswith(("_max", "_peak_mib"))
        else sum(of) / (len(of) if name.endswith("_mean") else 1)
        for name, of in values.items()
    }


def _qualified(name: str) -> str:
    """Metrics that the policy reports without a section belong to `policy/`."""
    return name if "/" in name else f"policy/{name}"


def _counters(stats: EngineStats) -> dict[str, int]:
    names = ("steps", "prompt_tokens", "generated_tokens", "finished_requests", "preemptions", "near_ties")
    spec = ("row_steps", "drafted_tokens", "emitted_tokens")
    return {name: getattr(stats, name) for name in names} | {
        f"spec_{name}": getattr(stats.speculation, name) for name in spec
    }


def _acceptance(counters: Mapping[str, float]) -> dict[str, float]:
    """What speculation did in this step, over all ranks; nothing where there was none."""
    rows, drafted = counters["engine/spec_row_steps"], counters["engine/spec_drafted_tokens"]
    if not rows:
        return {}
    emitted = counters["engine/spec_emitted_tokens"]
    return {
        "spec/accept_length": emitted / rows,
        "spec/accept_rate": (emitted - rows) / drafted if drafted else 0.0,
        "spec/share": emitted / max(1.0, counters["engine/generated_tokens"]),
    }


def _rate(ranks: Sequence[tuple[Mapping[str, float], Mapping[str, int]]]) -> float:
    """Generated tokens of all ranks over the rollout's wall time: that of the rank that answered for longest."""
    wall = max(phases.get("rollout", 0.0) for phases, _ in ranks)
    return sum(counts["generated_tokens"] for _, counts in ranks) / wall if wall > 0 else 0.0


def _accuracy(result: EvalResult) -> Accuracy:
    return Accuracy(result.step, result.pass_at[1], result.stderr, result.num_prompts)
