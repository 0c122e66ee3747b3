"""Reading a run directory: of a run in progress, of one without speculation, of hundreds of ranks. Torch-free.

Everything but the events is a row a step. Of the events, a few kilobytes a rank and step, only chosen steps are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.metrics import METRICS_FILE
from megatron_tlt.observe.rollouts import ROLLOUTS_FILE
from megatron_tlt.observe.samples import SAMPLES_FILE
from megatron_tlt.observe.summary import SUMMARY_FILE

Row = dict[str, Any]
_STEP = re.compile(rb'"step":(\d+|null)')
_OPEN = b'"name":"open"'
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
    samples: list[Row] = field(default_factory=list)
    summary: Row | None = None
    ranks: list[int] = field(default_factory=list)

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
        """Whether the run has come to its end. A summary of before a resume does not count."""
        return self.summary is not None and (self.num_steps is None or self.last_step >= self.num_steps)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, where it is there."""
        found = [(row["step"], row[name]) for row in self.steps if row.get(name) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

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


def read_run(run_dir: str | Path) -> RunData:
    """All but the events. Raises ConfigError where there is no run."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError.of(
            "RUN_DIR", str(run_dir), "must be a directory that `megatron-tlt train` has written"
        )
    if not (folder / METRICS_FILE).exists() and not (folder / "events").is_dir():
        raise ConfigError.of("RUN_DIR", str(run_dir), f"holds no run: neither {METRICS_FILE} nor events/")
    steps: dict[int, Row] = {}
    evals: dict[int, Row] = {}
    for row in read_rows(folder / METRICS_FILE):
        if isinstance(row.get("step"), int):
            part = evals if any(name.startswith("eval/") for name in row) else steps
            part[row["step"]] = row
    return RunData(
        folder,
        _object(folder / "config.json") or {},
        [steps[s] for s in sorted(steps)],
        [evals[s] for s in sorted(evals)],
        list(read_rows(folder / ROLLOUTS_FILE)),
        list(read_rows(folder / SAMPLES_FILE)),
        _object(folder / SUMMARY_FILE),
        ranks_of(folder),
    )


def _object(path: Path) -> Row | None:
    """A JSON object; None where there is none, or half of one (the run may be writing it)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def ranks_of(run_dir: str | Path) -> list[int]:
    """Ranks that have an event log."""
    names = (path.stem.removeprefix("rank-") for path in (Path(run_dir) / "events").glob("rank-*.jsonl"))
    return sorted(int(name) for name in names if name.isdigit())


def step_rows(path: Path, steps: Collection[int]) -> dict[int, list[Row]]:
    """A rank's events of `steps` (0 is the first). Of a step done twice, before and after a resume, the second time."""
    wanted = {str(step).encode() for step in steps}
    found: dict[int, list[Row]] = {}
    reopened: set[int] = set()  # steps that the rank had begun when it was started again
    for line in _lines(path):
        match = _STEP.search(line)
        if match is None:
            continue
        if match[1] == b"null":
            if _OPEN in line:
                reopened = set(found)
            continue
        if match[1] not in wanted:
            continue
        row = parse(line)
        if row is None:
            continue
        if row["step"] in reopened:
            reopened.discard(row["step"])
            found[row["step"]] = []
        found.setdefault(row["step"], []).append(row)
    return found


def parse(line: bytes) -> Row | None:
    """A line's row; None for a torn one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "ts" in row and "name" in row else None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        return


def chosen_steps(run: RunData, most: int) -> list[int]:
    """At most `most` steps (0 is the first) to look at closely: first, last, the longest rollout, and between them."""
    if not run.steps:
        return []
    every = [row["step"] - 1 for row in run.steps]
    if len(every) <= most:
        return every
    longest = max(run.steps, key=lambda row: row.get("time/rollout", 0.0))["step"] - 1
    spread = [every[round(i * (len(every) - 1) / (most - 2))] for i in range(most - 1)]
    return sorted({*spread, longest})
