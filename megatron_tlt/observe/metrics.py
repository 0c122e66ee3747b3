"""Numbers of every step: JSON lines always, TensorBoard and Weights & Biases as configured. Rank 0 writes.

run_dir/metrics.jsonl holds a row for each call of `log`: `{"step", "time", <name>: number, ...}`. A resumed
run first drops the rows after the step it resumes from, so that no step stands there twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_tlt.config.run import ObserveSection
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.observe.jsonl import LineFile, cut_back, to_line

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class Sink(Protocol):
    """One place that metrics go to."""

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Adds the numbers of one step."""

    def close(self) -> None:
        """Writes out what is buffered."""


class JsonlSink:
    """run_dir/metrics.jsonl. Histograms are kept as their values' quartiles and extremes."""

    def __init__(self, run_dir: Path, start_step: int):
        path = run_dir / METRICS_FILE
        cut_back(path, start_step)
        self._file = LineFile(path)

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Appends one row, at once on disk."""
        row: dict[str, Any] = {"step": step, "time": round(wall_seconds(), 3), **scalars}
        row |= {f"{name}/quartiles": quartiles(values) for name, values in histograms.items() if len(values)}
        self._file.write([to_line(row)])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardSink:
    """Event files under run_dir/tensorboard."""

    def __init__(self, run_dir: Path, start_step: int):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step hides what an interrupted run wrote after the step that this one resumes from.
        purge_step = start_step + 1 if start_step else 0
        self._writer = tensorboard.SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=purge_step)

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Adds scalars and histograms."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            if len(values):
                self._writer.add_histogram(name, np.asarray(values, dtype=np.float64), step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; a resumed job continues the run whose id is kept in run_dir."""

    def __init__(self, run_dir: Path, project: str, run_config: Mapping[str, Any]):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            allowed = "needs the package wandb (pip install wandb), or set it to null"
            raise ConfigError(ConfigProblem("observe.wandb_project", project, allowed)) from error
        id_file = run_dir / "wandb-run-id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            dir=str(run_dir),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            config=dict(run_config),
        )
        id_file.write_text(f"{self._run.id}\n")
        # Our own step axis: after a resume the steps go back, which W&B's built-in one refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Logs one row."""
        shapes = {
            name: self._wandb.Histogram(list(values)) for name, values in histograms.items() if len(values)
        }
        self._run.log({"step": step, **scalars, **shapes})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class MetricsLogger:
    """All sinks of a run; on ranks other than 0 it does nothing."""

    def __init__(
        self,
        run_dir: str | Path,
        section: ObserveSection,
        rank: int,
        start_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
    ):
        """`start_step` counts the steps already done: later rows are dropped. `run_config` is shown by W&B.

        Raises ConfigError if W&B is configured and not installed.
        """
        self._sinks: list[Sink] = []
        if rank != 0:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if section.wandb_project is not None:  # first, because it can fail
            self._sinks.append(WandbSink(directory, section.wandb_project, run_config or {}))
        self._sinks.append(JsonlSink(directory, start_step))
        if section.tensorboard:
            self._sinks.append(TensorBoardSink(directory, start_step))

    def log(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Writes the numbers of a step; names look like `reward/mean`. Histograms are lists of values."""
        for sink in self._sinks:
            sink.write(step, scalars, histograms or {})

    def close(self) -> None:
        """Closes every sink; a second call does nothing."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []


def quartiles(values: Sequence[float]) -> list[float]:
    """Minimum, quartiles and maximum of some values (linear interpolation)."""
    ordered = sorted(float(v) for v in values)
    points = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        points.append(ordered[low] + (ordered[high] - ordered[low]) * (position - low))
    return points
