"""Numbers of every step: JSON lines always, TensorBoard and Weights & Biases as configured. Rank 0 writes.

run_dir/metrics.jsonl holds a row for each call of `log`: `{"step", "time", <name>: number, ...}`. A resumed run first
drops the rows after the step it resumes from, so that no step is there twice.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_tlt.config.run import ObserveSection
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.observe.clock import wall_seconds
from megatron_tlt.observe.jsonl import JsonRow, StepFile

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
OF_RANK = "idle/rank"  # begins a name of one rank's number

Scalars = Mapping[str, float]
_WANDB_NAME, _WANDB_REFUSED = 128, "/\\#?%:"  # characters of a project's name at most, and those that W&B refuses
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


def wandb_problems(project: str | None) -> list[ConfigProblem]:
    """A project's name that W&B does not take, or W&B that is not installed."""
    at = "observe.wandb_project"
    if project is None:
        return []
    if not project or len(project) > _WANDB_NAME or set(project) & set(_WANDB_REFUSED):
        allowed = f"must have 1 to {_WANDB_NAME} characters, none of {' '.join(_WANDB_REFUSED)}"
        return [ConfigProblem(at, project, f"{allowed} (WANDB_ENTITY names a team)")]
    if importlib.util.find_spec("wandb") is None:
        return [ConfigProblem(at, project, "needs the package wandb (pip install wandb), or set it to null")]
    return []


class WandbSink:
    """A Weights & Biases run; a resumed job continues the run whose id is kept in run_dir, where steps that it makes
    again have their earlier rows, too.

    W&B must not end a run: after its first failure of any kind it is off until the next start, with a warning.
    """

    def __init__(self, run_dir: Path, project: str, run_config: Mapping[str, Any], start_step: int):
        self._run: Any = None
        self._new_table: Any = None
        with self._off_at_failure():
            wandb = importlib.import_module("wandb")
            self._new_table = wandb.Table
            id_file = run_dir / "wandb-run-id"
            if start_step == 0:  # a new run in an old directory
                id_file.unlink(missing_ok=True)
            run_id = id_file.read_text().strip() if id_file.exists() else None
            run = wandb.init(
                project=project,
                dir=str(run_dir),
                name=run_dir.name,
                id=run_id,
                resume="allow",
                config=dict(run_config),
            )
            id_file.write_text(f"{run.id}\n")
            # Our own step axis: after a resume the steps go back, which W&B's built-in one refuses.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            self._run = run

    @contextmanager
    def _off_at_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the client raises its own errors, and those of sockets, pipes and JSON
            _log.warning("W&B is off until the next start: %s: %s", type(error).__name__, error)
            self._run = None

    def write(self, step: int, scalars: Scalars) -> None:
        """The numbers of a step."""
        if self._run is not None:
            with self._off_at_failure():
                self._run.log({"step": step, **scalars})

    def close(self) -> None:
        """Uploads the rest."""
        if self._run is not None:
            with self._off_at_failure():
                self._run.finish()

    def write_samples(self, step: int, rows: Sequence[JsonRow]) -> None:
        """The rows of samples.jsonl as a table: a row a response, of trajectories a row a turn."""
        if self._run is None:
            return
        data = []
        for row in rows:
            for number, turn in enumerate(row.get("turns") or [{"response": row["response"]}], 1):
                calls = json.dumps(turn["calls"], ensure_ascii=False) if "calls" in turn else None
                data.append([*map(row.get, _OF_RESPONSE), number, calls, *map(turn.get, _OF_TURN)])
        columns = [*_OF_RESPONSE, "turn", "calls", *(f"turn_{name}" for name in _OF_TURN)]
        with self._off_at_failure():
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
        """`start_step` counts the steps already done: later rows are dropped. `run_config` is shown by W&B."""
        self._sinks: list[JsonlSink | TensorBoardSink | WandbSink] = []
        if rank != 0:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if section.wandb_project is not None:
            self._sinks.append(WandbSink(directory, section.wandb_project, run_config or {}, start_step))
        self._sinks.append(JsonlSink(directory, start_step))
        if section.tensorboard:
            self._sinks.append(TensorBoardSink(directory, start_step))

    def log(self, step: int, scalars: Scalars) -> None:
        """Writes the numbers of a step; names look like `reward/mean`. Those of single ranks are in the file only: in
        TensorBoard and W&B each would be a chart.
        """
        charts = {name: value for name, value in scalars.items() if not name.startswith(OF_RANK)}
        for sink in self._sinks:
            sink.write(step, scalars if isinstance(sink, JsonlSink) else charts)

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
