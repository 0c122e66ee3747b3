"""Reading a run directory: of a run in progress, of one without speculation, of hundreds of ranks. Torch-free.

All files but the events hold a row a step; events are read a rank at a time, since there are a few kilobytes of them a
rank and step. Lines that cannot be read are skipped, and `RunData.warnings` names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.errors import ConfigError, shortened
from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.jsonl import Row, SkippedLines, read_rows
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.rollouts import ROLLOUTS_FILE
from megatron_tlt.observe.samples import SAMPLES_FILE
from megatron_tlt.observe.summary import SUMMARY_FILE

CONFIG_FILE = "config.json"
_IDLE_RANK = re.compile(r"idle/rank(\d+)")


@dataclass
class RunData:
    """What a run has written so far."""

    run_dir: Path
    config: Row
    steps: list[Row]
    """Rows of metrics.jsonl that are steps, by step."""
    evals: list[Row]
    """Rows that are evaluations, by step."""
    rollouts: list[Row]
    samples: list[Row]
    summary: Row | None
    ranks: list[int]
    skipped: SkippedLines = field(default_factory=dict)
    """Grows as events are read."""

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.run_dir.resolve().name

    @property
    def num_steps(self) -> int | None:
        """Steps that the run is configured to make."""
        return self.config.get("train", {}).get("num_steps")

    @property
    def last_step(self) -> int:
        """Steps done."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all its steps. A summary from before a resume does not count."""
        return self.summary is not None and (self.num_steps is None or self.last_step >= self.num_steps)

    @property
    def warnings(self) -> list[str]:
        """One line for each file of which lines were skipped, with their numbers."""
        return [
            f"{path}: skipped {len(lines)} line{'s' * (len(lines) > 1)} that cannot be read: "
            f"{shortened(sorted(lines))}"
            for path, lines in sorted(self.skipped.items())
        ]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, where it is there."""
        found = [(row["step"], row[name]) for row in self.steps if row.get(name) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

    def total(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return sum(self.column(name)[1])

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps that have it; 0 where none has."""
        values = self.column(name)[1]
        return sum(values) / len(values) if values else 0.0

    def idle_by_rank(self) -> dict[int, float]:
        """Seconds that each rank waited, over all steps."""
        totals: dict[int, float] = {}
        for row in self.steps:
            for name, value in row.items():
                match = _IDLE_RANK.fullmatch(name)
                if match is not None and value is not None:
                    rank = int(match[1])
                    totals[rank] = totals.get(rank, 0.0) + value
        return totals

    def events(self, rank: int) -> Iterator[Row]:
        """All events of one rank, in the order they were written."""
        return read_rows(events_path(self.run_dir, rank), self.skipped, is_event)

    def events_of_steps(self, rank: int, steps: Collection[int]) -> dict[int, list[Row]]:
        """A rank's events of `steps` (0 is the first). Of a step done again after a resume, the later ones."""
        found: dict[int, list[Row]] = {}
        repeated: set[int] = set()  # steps begun before the last restart
        for row in self.events(rank):
            step = row["step"]
            if row["name"] == "open":
                repeated = set(found)
            elif step in steps:
                if step in repeated:
                    repeated.discard(step)
                    found[step] = []
                found.setdefault(step, []).append(row)
        return found


def is_event(row: Row) -> bool:
    """Whether a row has an event's fields, of the right types."""
    name, kind, attrs = row.get("name"), row.get("kind"), row.get("attrs", {})
    numbers = [row.get("ts"), *([row.get("dur")] if kind in ("span", "state") else [])]
    return (
        all(isinstance(number, int | float) for number in numbers)
        and isinstance(name, str)
        and isinstance(kind, str)
        and isinstance(row.get("step", ""), int | None)
        and isinstance(attrs, dict)
        and (name != "curve" or {"start", "running"} <= attrs.keys())
    )


def _is_metrics(row: Row) -> bool:
    values = [value for value in row.values() if value is not None]
    return _has(row, step=int, time=(int, float)) and all(isinstance(v, int | float | list) for v in values)


def _is_rollout(row: Row) -> bool:
    if "strategies" in row and not _has(
        row, strategies=dict, drafted_at=list, accepted_at=list, by_batch=dict
    ):
        return False
    return _has(row, step=int, samples=int, longest=int, lengths=list)


def _is_sample(row: Row) -> bool:
    is_traced = _has(row.get("drafts") or {"pieces": [], "runs": []}, pieces=list, runs=list)
    return is_traced and _has(row, step=int, reward=(int, float), prompt=str, response=str)


def _has(row: object, **fields: type | tuple[type, ...]) -> bool:
    """Whether a row is an object with fields of these types."""
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in fields.items())


def read_run(run_dir: str | Path) -> RunData:
    """All but the events. Raises ConfigError where there is no run."""
    folder = Path(run_dir)
    if not folder.is_dir():
        allowed = "must be a directory that `megatron-tlt train` has written"
        raise ConfigError.of("RUN_DIR", str(run_dir), allowed)
    if not (folder / METRICS_FILE).exists() and not (folder / "events").is_dir():
        raise ConfigError.of("RUN_DIR", str(run_dir), f"holds no run: neither {METRICS_FILE} nor events/")
    skipped: SkippedLines = {}

    def rows(name: str, is_valid: Callable[[Row], bool]) -> list[Row]:
        return list(read_rows(folder / name, skipped, is_valid))

    steps: dict[int, Row] = {}
    evals: dict[int, Row] = {}
    for row in rows(METRICS_FILE, _is_metrics):
        kind = evals if any(name.startswith("eval/") for name in row) else steps
        kind[row["step"]] = row
    return RunData(
        folder,
        _object(folder / CONFIG_FILE, skipped) or {},
        [steps[s] for s in sorted(steps)],
        [evals[s] for s in sorted(evals)],
        rows(ROLLOUTS_FILE, _is_rollout),
        rows(SAMPLES_FILE, _is_sample),
        _object(folder / SUMMARY_FILE, skipped),
        ranks_of(folder),
        skipped,
    )


def require_metrics(run: RunData) -> None:
    """Raises ConfigError where metrics.jsonl has lines and none of them can be read."""
    if run.run_dir / METRICS_FILE in run.skipped and not run.steps and not run.evals:
        raise ConfigError.of("RUN_DIR", str(run.run_dir), f"nothing could be read: {'; '.join(run.warnings)}")


def _object(path: Path, skipped: SkippedLines) -> Row | None:
    """The JSON object in a file; None where there is no file or, added to `skipped`, no whole object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        skipped[path] = {getattr(error, "lineno", 1)}
        return None
    return value if isinstance(value, dict) else None


def ranks_of(run_dir: Path) -> list[int]:
    """Ranks that have an event log."""
    names = (path.stem.removeprefix("rank-") for path in (run_dir / "events").glob("rank-*.jsonl"))
    return sorted(int(name) for name in names if name.isdigit())


def chosen_steps(run: RunData, most: int) -> list[int]:
    """At most `most` steps (0 is the first) to show in detail: first, last, the longest rollout, others evenly."""
    every = [row["step"] - 1 for row in run.steps]
    if len(every) <= most:
        return every
    longest = max(run.steps, key=lambda row: row.get("time/rollout", 0.0))["step"] - 1
    spread = [every[round(i * (len(every) - 1) / (most - 2))] for i in range(most - 1)]
    return sorted({*spread, longest})
