"""Metrics and events of a run: gathers those of the ranks once a step and writes them through `observe/`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_tlt.config.dims import is_first_of_engine
from megatron_tlt.observe.curves import curve_attrs, parked_spans
from megatron_tlt.observe.equal_rewards import EqualRewards
from megatron_tlt.observe.events import EventLog
from megatron_tlt.observe.jsonl import StepFile, cut_back, cut_back_ranks, rank_file
from megatron_tlt.observe.memory import PhasePeaks
from megatron_tlt.observe.metrics import METRICS_FILE, OF_RANK, TENSORBOARD_DIR, MetricsLogger
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.observe.reduction import Metric, RankMetrics, Reduce, reduced, sums, values_of
from megatron_tlt.observe.rollouts import (
    RESPONSES_DIR,
    ROLLOUTS_FILE,
    SAMPLES_FILE,
    DraftsOf,
    TurnsOf,
    rank_row,
    response_rows,
    sample_rows,
    step_row,
)
from megatron_tlt.observe.runfiles import read_run
from megatron_tlt.observe.summary import print_summary
from megatron_tlt.trainer.acceptance import AcceptanceMonitor
from megatron_tlt.trainer.turn_metrics import failure_warning, turn_metrics
from megatron_tlt.types import EngineStats

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.idle.window import WindowReport
    from megatron_tlt.trainer.evaluation import EvalResult
    from megatron_tlt.trainer.recovery import TrainState
    from megatron_tlt.types import SampleGroup

_log = logging.getLogger(__name__)
_EVERY_STEP = 1 << 30  # more than a run has
_COUNTERS = ("steps", "prompt_tokens", "generated_tokens", "finished_requests", "preemptions")
_NOT_OF_PROCESSES = {"preemptions", "prefill_steps"}  # which engines in processes of their own do not count
_TURN_COUNTERS = ("turns", "given_tokens", "prefill_steps")
_GRAPH_COUNTERS = ("graph_replays", "graph_misses")
_SPEC_COUNTERS = ("row_steps", "drafted_tokens", "accepted_tokens", "emitted_tokens")
_PRE_ROLLED = ("pre_rolled_rows", "pre_rolled_drafted", "pre_rolled_accepted")
_DRAFTER = ("loss", "accept/1")  # of the micro-steps' metrics


class RunMetrics:
    """Events, metrics, samples and progress display of one rank."""

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainState,
        drafts_of: DraftsOf | None = None,
        turns_of: TurnsOf | None = None,
    ):
        """`state`: the loop's. For samples.jsonl, `drafts_of` returns what this rank's engine drafted for a sample,
        `turns_of` the turns of a trajectory.
        """
        self.world, self.state = world, state
        self._config, self._drafts_of, self._turns_of = config, drafts_of, turns_of
        self._is_first = is_first_of_engine(world.rank, config.rollout.tp)
        self._run_dir = Path(config.train.run_dir)
        self._events = EventLog(self._run_dir, world.rank)
        self._progress = build_progress(config.observe.progress, config.train.num_steps, world.rank)
        self._peaks = PhasePeaks(world.device)
        self._windows: list[RankMetrics] = []  # idle windows of the step under way
        self._metrics: MetricsLogger | None = None
        self._samples: StepFile | None = None
        self._rollouts: StepFile | None = None
        self._responses: StepFile | None = None
        self._step = 1  # the step under way, from 1, until the next one begins
        self._steps_done = 0  # when it began: its number in events, also of what follows its update
        self._step_started = time.perf_counter()
        self._acceptance = AcceptanceMonitor()
        self._equal_rewards = EqualRewards(config.algorithm.name)
        self._may_warn_of_threshold = world.is_main and config.rewards.is_of_unknown_scale

    def start(self) -> None:
        """Opens the files that a resumed run continues; rows after the steps done are dropped where steps are left."""
        section, steps_done, num_steps = self._config.observe, self.state.step, self._config.train.num_steps
        self._step, self._steps_done = min(steps_done + 1, num_steps), steps_done
        if steps_done >= num_steps:  # only to be evaluated
            steps_done = _EVERY_STEP
        self._events.start(steps_done, self.world.size)
        dump = self._config.model_dump(mode="json")
        self._metrics = MetricsLogger(self._run_dir, section, self.world.rank, steps_done, dump)
        if self.world.is_main:
            self._rollouts = StepFile(self._run_dir / ROLLOUTS_FILE, steps_done)
            if section.samples_per_step:
                self._samples = StepFile(self._run_dir / SAMPLES_FILE, steps_done)
            else:
                cut_back(self._run_dir / SAMPLES_FILE, steps_done)
            # Of ranks that do not open theirs now: an earlier start had more, or saved them.
            num_open = self.world.size if section.save_responses else 0
            cut_back_ranks(self._run_dir / RESPONSES_DIR, num_open, steps_done)
        if section.save_responses:
            directory = self._run_dir / RESPONSES_DIR
            directory.mkdir(mode=0o700, exist_ok=True)
            self._responses = StepFile(rank_file(directory, self.world.rank), steps_done)
        if self._steps_done:
            self._progress.note(f"resumed after step {self._steps_done}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step: timed and its memory measured, and named in errors, log lines and the display."""
        self.world.enter(name, self._step)
        self._progress.phase(name, self._step)
        with self._peaks.phase(name), self._events.span(name, self._steps_done):
            yield

    def begin_step(self) -> None:
        """A step begins: its time and its idle windows are counted from here on."""
        self._step, self._steps_done = self.state.step + 1, self.state.step
        self._step_started = time.perf_counter()
        self._windows.clear()

    def end_window(self, report: WindowReport, dropped_tokens: int = 0) -> None:
        """Adds an idle window's metrics to those of the step; see `window_metrics`. `dropped_tokens`: pre-rolled
        ones of all replicas that were not kept, the same number on every rank.
        """
        row = window_metrics(report, self._is_first)
        if dropped_tokens and self.world.is_main:
            row |= sums({"pre_rollout/dropped_tokens": dropped_tokens})
        self._windows.append(row)

    def rank_state(self, name: str, started: float, seconds: float) -> None:
        """Logs the rank's state for `seconds` from `started` (seconds since the epoch) on, in the present step."""
        self._events.state(name, self._steps_done, started, seconds)

    def on_rollout(self, running: int, waiting: int, generated_tokens: int) -> None:
        """Progress of this rank's engine: requests, and tokens since the rollout began."""
        self._progress.rollout(running, waiting, generated_tokens)

    def note(self, text: str) -> None:
        """A line of the progress display (rank 0)."""
        self._progress.note(text)

    def log(
        self,
        metrics: Mapping[str, float],
        stats: EngineStats,
        groups: Sequence[SampleGroup],
        scored: Sequence[SampleGroup],
        mine: RankMetrics,
    ) -> None:
        """Writes everything of the last step. Collective: phase times, engine counters and `mine` are gathered here.

        `metrics` are equal on all ranks; names without a section belong to `policy/`. Of this rank: the `groups` that
        were trained on, all that were `scored`, and metrics, `mine`.
        """
        step = self.state.step
        seconds = time.perf_counter() - self._step_started
        of_engine = stats if self._is_first else EngineStats()  # every rank of an engine counts all of it
        self._log_rollout(step, of_engine, stats)
        phases = self._events.end_step()
        own = mine | reduced(self._windows) | self._peaks.take() | self._counters(of_engine, stats)
        if self._config.env is not None:
            own |= turn_metrics(scored)
        if self._config.rewards.functions:
            own |= sums({"reward/failures": sum(r.failure is not None for group in scored for r in group.rewards)})
        if (failures := failure_warning(scored)) is not None:
            _log.warning(failures)
        responses = rank_row(of_engine, scored)
        gathered = self.world.all_gather_object((phases, own, responses))
        all_phases = [of_rank for of_rank, _, _ in gathered]
        row = {name if "/" in name else f"policy/{name}": value for name, value in metrics.items()}
        if not self._config.rewards.functions:  # nothing was judged
            row = {name: value for name, value in row.items() if not name.startswith("reward/")}
        row |= _phase_times(all_phases) | values_of([of_rank for _, of_rank, _ in gathered])
        row |= {"time/step": seconds} | _rollout_rates(row, all_phases)
        row |= _acceptance(row) | _stop_time(row)
        self._warn(row, groups)
        if self._metrics is not None:
            self._metrics.log(step, row)
        if self._rollouts is not None:
            self._rollouts.write_rows(step, step_row([of_rank for *_, of_rank in gathered]))
        self._log_responses(step, groups, scored)
        self._progress.step_done(step, row)

    def _warn(self, row: Mapping[str, float], groups: Sequence[SampleGroup]) -> None:
        """Logs what the metrics of a step show to be wrong."""
        for warning in self._acceptance.check(row):
            if self.world.is_main:
                _log.warning(warning)
            self._progress.note(f"warning: {warning}")
        if self._may_warn_of_threshold and (unreached := threshold_warning(row)) is not None:
            self._may_warn_of_threshold = False
            _log.warning(unreached)
        equal = self._equal_rewards.check(row, lambda: sample_rows(groups, 1, turns_of=self._turns_of))
        if equal is not None and self.world.is_main:
            _log.warning(equal)

    def _counters(self, of_engine: EngineStats, stats: EngineStats) -> RankMetrics:
        """Of an engine, on its first rank, and this rank's waits for environments."""
        names = _COUNTERS + (_TURN_COUNTERS if stats.turns else ())
        names += _GRAPH_COUNTERS if stats.graph_replays or stats.graph_misses else ()
        left_out = set() if self._config.rollout.engine_process is None else _NOT_OF_PROCESSES
        values = {name: getattr(of_engine, name) for name in names if name not in left_out}
        if stats.turns:
            values["parked_seconds"] = stats.parked_seconds
        names = _SPEC_COUNTERS + (_PRE_ROLLED if stats.speculation.pre_rolled_rows else ())
        values |= {f"spec_{name}": getattr(of_engine.speculation, name) for name in names}
        return sums({f"engine/{name}": value for name, value in values.items()})

    def _log_rollout(self, step: int, of_engine: EngineStats, stats: EngineStats) -> None:
        """The engine's curve, and this rank's waits for environments in it, as events."""
        curve = curve_attrs(of_engine)
        if curve is not None:
            self._events.instant("curve", step - 1, **curve)
        for start, seconds in parked_spans(stats):
            self._events.state("WAITING", step - 1, start, seconds)

    def _log_responses(self, step: int, groups: Sequence[SampleGroup], scored: Sequence[SampleGroup]) -> None:
        """Some of this rank's responses in `groups`, and where it is configured all that were `scored`."""
        if self._samples is not None:
            rows = sample_rows(groups, self._config.observe.samples_per_step, self._drafts_of, self._turns_of)
            self._samples.write_rows(step, *rows)
            if self._metrics is not None:
                self._metrics.log_samples(step, rows)
        if self._responses is not None:
            self._responses.write_rows(step, *response_rows(scored, self._turns_of))

    def log_eval(self, result: EvalResult, seconds: float) -> None:
        """Writes an evaluation, which took so many seconds, beside the metrics of its step."""
        if self._metrics is not None:
            self._metrics.log(result.step, result.metrics() | {"eval/seconds": seconds})
        shown = "  ".join(f"pass@{k} {value:.3f}" for k, value in result.pass_at.items())
        error = "" if math.isnan(result.stderr) else f"± {result.stderr:.3f}, "
        self.note(
            f"evaluation after step {result.step}: {shown} ({error}{result.num_prompts} prompts), "
            f"length {result.mean_length:.0f}, truncated {result.truncated:.1%}"
        )

    def finish(self, checkpoint: Path | None) -> None:
        """Prints the final tables."""
        self._progress.close()
        if not self.world.is_main:
            return
        paths = {"metrics": self._run_dir / METRICS_FILE, "events": self._run_dir / "events"}
        if self._config.observe.tensorboard:
            paths["TensorBoard"] = self._run_dir / TENSORBOARD_DIR
        if checkpoint is not None:
            paths["checkpoint"] = checkpoint
        run = read_run(self._run_dir, with_rollouts=False)
        print_summary(run, paths, Console(highlight=False, markup=False, emoji=False))

    def close_display(self) -> None:
        """Removes the live line."""
        self._progress.close()

    def close(self) -> None:
        """Closes all files."""
        for part in (self._events, self._metrics, self._samples, self._rollouts, self._responses):
            if part is not None:
                part.close()


def window_metrics(report: WindowReport, is_group_leader: bool) -> RankMetrics:
    """Metrics of one idle window of a rank.

    The ranks of a replica train and decode as one, so only its leader counts micro-steps and tokens.
    """
    row = {"idle/recovered_seconds": report.training_seconds}
    if report.pre_rolling_seconds:
        row["pre_rollout/seconds"] = report.pre_rolling_seconds
    if report.parked_training_seconds:
        row["env/recovered_seconds"] = report.parked_training_seconds
    if is_group_leader:
        if report.pre_rolled_tokens:
            row["pre_rollout/tokens"] = report.pre_rolled_tokens
        row |= {"drafter/steps": report.steps, "drafter/tokens": report.tokens}
    ends = {"idle/entered_max": report.entered_at, "idle/left_max": report.left_at}
    learned = {name: report.metrics[name] for name in _DRAFTER if name in report.metrics}
    steps = report.steps  # windows of many micro-steps count for more
    means = {f"drafter/{name}_mean": Metric(value * steps, Reduce.MEAN, steps) for name, value in learned.items()}
    return sums(row) | {name: Metric(end, Reduce.MAX) for name, end in ends.items()} | means


def _phase_times(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of the phases, means over the ranks, and each rank's idle seconds with their sum."""
    names = sorted({name for phases in ranks for name in phases})
    times = {f"time/{name}": sum(p.get(name, 0.0) for p in ranks) / len(ranks) for name in names}
    waits = {f"{OF_RANK}{rank:03d}": p.get("idle", 0.0) for rank, p in enumerate(ranks)}
    return times | waits | {"idle/seconds": sum(waits.values())}


def _rollout_rates(row: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Tokens a second until the slowest rank ends, which waits least, and the share of all ranks' rollouts in which
    every request waited for its environment. `ranks`: seconds of each one's phases. No rate of tokens where
    all responses come from the rollout cache.
    """
    tokens = row["engine/generated_tokens"]
    seconds = min(phases.get("rollout", 0.0) + phases.get("idle", 0.0) for phases in ranks)
    rates = {"engine/tokens_per_s": tokens / seconds} if tokens and seconds > 0 else {}
    if "engine/parked_seconds" in row and seconds > 0:
        rates["env/parked_share"] = row["engine/parked_seconds"] / sum(phases["rollout"] for phases in ranks)
    return rates


def _stop_time(row: dict[str, float]) -> dict[str, float]:
    """From the last rank's end to the last one's leaving of the step's last window. Removes both times from `row`."""
    if "idle/left_max" not in row:
        return {}
    seconds = row.pop("idle/left_max") - row.pop("idle/entered_max")
    return {"idle/stop_ms_max": 1e3 * max(0.0, seconds)}


def threshold_warning(row: Mapping[str, float]) -> str | None:
    """A warning of rewards above 0 on average, none of which counts as correct; `row`: metrics of a step or eval."""
    if row.get("reward/accuracy") != 0 or row.get("reward/mean", 0.0) <= 0:
        return None
    return (
        f"no reward reaches 1, though their mean is {row['reward/mean']:.3g}: accuracy and pass@k stay 0. "
        "threshold of rewards.functions sets the value from which a response is correct"
    )


def _acceptance(row: Mapping[str, float]) -> dict[str, float]:
    """Acceptance in this step, over all ranks; nothing where no step was speculative."""
    rows, drafted = row["engine/spec_row_steps"], row["engine/spec_drafted_tokens"]
    if not rows:
        return {}
    emitted, generated = row["engine/spec_emitted_tokens"], max(1.0, row["engine/generated_tokens"])
    found = {"spec/accept_length": emitted / rows, "spec/share": emitted / generated}
    if drafted:
        found["spec/accept_rate"] = row["engine/spec_accepted_tokens"] / drafted
    if pre_rolled := row.get("engine/spec_pre_rolled_rows"):
        accepted = row["engine/spec_pre_rolled_accepted"]
        found["pre_rollout/drafted_share"] = accepted / generated
        found["pre_rollout/accept_length"] = 1 + accepted / pre_rolled
    return found
