"""Numbers of every step: JSON lines always, TensorBoard and Weights & Biases as configured. Rank 0 writes.

run_dir/metrics.jsonl holds a row for each call of `log`: `{"step", "time", <name>: number, ...}`. A resumed run first
drops the rows after the step it resumes from, so that no step is there twice.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.run import ObserveSection
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.observe.jsonl import JsonRow, StepFile

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"

Scalars = Mapping[str, float]
_OF_RESPONSE = ("task", "prompt_id", "sample_index", "prompt", "finish_reason", "reward", "env_failure")
_OF_TURN = ("response", "observation", "reward", "seconds")


class JsonlSink:
    """run_dir/metrics.jsonl."""

    def __init__(self, run_dir: Path, start_step: int):
        self._file = StepFile(run_dir / METRICS_FILE, start_step)
        self.close = self._file.close

    def write(self, step: int, scalars: Scalars) -> None:
        self._file.write_rows(step, {"time": round(wall_seconds(), 3), **scalars})


class TensorBoardSink:
    """Event files under run_dir/tensorboard."""

    def __init__(self, run_dir: Path, start_step: int):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step hides what an interrupted run wrote after the step that this one resumes from.
        purge_step = start_step + 1 if start_step else 0
        self._writer = tensorboard.SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=purge_step)
        self.close = self._writer.close

    def write(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbSink:
    """A Weights & Biases run; a resumed job continues the run whose id is kept in run_dir."""

    def __init__(self, run_dir: Path, project: str, run_config: Mapping[str, Any]):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            allowed = "needs the package wandb (pip install wandb), or set it to null"
            raise ConfigError(ConfigProblem("observe.wandb_project", project, allowed)) from error
        self._new_table = wandb.Table
        id_file = run_dir / "wandb-run-id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
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
        self.close = self._run.finish

    def write(self, step: int, scalars: Scalars) -> None:
        self._run.log({"step": step, **scalars})

    def write_samples(self, step: int, rows: Sequence[JsonRow]) -> None:
        """The rows of samples.jsonl as a table: a row a response, of trajectories a row a turn."""
        data = []
        for row in rows:
            for number, turn in enumerate(row.get("turns") or [{"response": row["response"]}], 1):
                calls = json.dumps(turn["calls"], ensure_ascii=False) if "calls" in turn else None
                data.append([*map(row.get, _OF_RESPONSE), number, calls, *map(turn.get, _OF_TURN)])
        columns = [*_OF_RESPONSE, "turn", "calls", *(f"turn_{name}" for name in _OF_TURN)]
        self._run.log({"step": step, "samples": self._new_table(columns=columns, data=data)})


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
        self._sinks: list[JsonlSink | TensorBoardSink | WandbSink] = []
        if rank != 0:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if section.wandb_project is not None:  # first, because it can fail
            self._sinks.append(WandbSink(directory, section.wandb_project, run_config or {}))
        self._sinks.append(JsonlSink(directory, start_step))
        if section.tensorboard:
            self._sinks.append(TensorBoardSink(directory, start_step))

    def log(self, step: int, scalars: Scalars) -> None:
        """Writes the numbers of a step; names look like `reward/mean`."""
        for sink in self._sinks:
            sink.write(step, scalars)

    def log_samples(self, step: int, rows: Sequence[JsonRow]) -> None:
        """Shows rows of samples.jsonl in W&B, if it is configured."""
        for sink in self._sinks:
            if isinstance(sink, WandbSink):
                sink.write_samples(step, rows)

    def close(self) -> None:
        """Closes every sink; a second call does nothing."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
