"""Reading a run directory: of a run in progress, of one without speculation, of hundreds of ranks. Torch-free.

All files but events and samples hold a row a step. Of these a rank's, or those of some steps, are read at a time: there
are a few kilobytes of events a rank and step, and a response may have megabytes. Lines that cannot be read are skipped,
and `RunData.warnings` names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType

from megatron_tlt.errors import ConfigError, no_such_file, shortened
from megatron_tlt.observe.events import events_path, step_of
from megatron_tlt.observe.jsonl import JsonRow, SkippedLines, read_rows
from megatron_tlt.observe.metrics import METRICS_FILE, OF_RANK
from megatron_tlt.observe.rollouts import ROLLOUTS_FILE, SAMPLES_FILE

CONFIG_FILE = "config.json"
CHANGES_FILE = "config_changes.jsonl"
# Settings of what an evaluation measures, and those of rollouts that it has unless they are its own.
_OF_MEASURE = ("data.eval", "held_out", "tokenizer", "eval", "rewards", "code", "env", "rollout.stop")
_UNLESS_OWN = ("max_tokens", "top_k", "top_p", "min_p")
NOT_IN_STEP = {"step", "log", "eval", "checkpoint"}  # of `time/`: the step itself, and what is in no `time/step`
_STEP_OF_ROW = re.compile(rb'\{"step":(\d+),')  # how `StepFile` begins a line
_EVENT = {"ts": int | float, "step": int | None, "kind": str, "name": str}
_FIELDS: dict[str, dict[str, type | UnionType]] = {
    METRICS_FILE: {"step": int, "time": int | float},
    ROLLOUTS_FILE: {"step": int, "samples": int},
    CHANGES_FILE: {"step": int, "changed": dict},
    SAMPLES_FILE: {"step": int, "reward": int | float, "prompt": str, "response": str},
}
"""Fields that a row of each file has; rows without them are skipped like torn lines."""


@dataclass
class RunData:
    """The files of a run, as far as it has written them."""

    run_dir: Path
    config: JsonRow
    steps: list[JsonRow]
    """Rows of metrics.jsonl that are steps, by step."""
    evals: list[JsonRow]
    """Rows that are evaluations, by step."""
    rollouts: list[JsonRow]
    ranks: list[int]
    """Those that have an event log: of every start."""
    skipped: SkippedLines = field(default_factory=dict)
    """Grows as events and samples are read."""
    condition: str = ""
    """What the status files say, as `RunStatus.condition`; empty: there are none."""
    measured_since: int = -1
    """The step after which what evaluations measure was changed last; evaluations until then are another measure."""
    reasons: list[str] = field(default_factory=list)
    """Why it ended."""

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
    def num_ranks(self) -> int:
        """Ranks of the last step; before the first one, those that have an event log."""
        last = self.steps[-1] if self.steps else {}
        return sum(name.startswith(OF_RANK) for name in last) or len(self.ranks)

    @property
    def phases(self) -> set[str]:
        """Names of the phases within steps."""
        names = {name.removeprefix("time/") for row in self.steps for name in row if name.startswith("time/")}
        return names - NOT_IN_STEP

    @property
    def whole_steps(self) -> list[JsonRow]:
        """Rows of the steps that generated all of their responses: of others a restart read some from the rollout
        cache, so their seconds are of less work.
        """
        return [row for row in self.steps if not row.get("rollout_cache/reused")]

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all its steps; status files, if there are any, say that it has ended well, too."""
        return self.condition in ("", "finished") and self.num_steps is not None and self.last_step >= self.num_steps

    @property
    def warnings(self) -> list[str]:
        """One line for each file of which lines were skipped, with their numbers."""
        return [
            f"{path}: skipped {len(lines)} line{'s' * (len(lines) > 1)} that cannot be read: {shortened(sorted(lines))}"
            for path, lines in sorted(self.skipped.items())
        ]

    def column(self, name: str, rows: Sequence[JsonRow] | None = None) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, where it is there; in `steps`, or in other rows."""
        rows = self.steps if rows is None else rows
        found = [row for row in rows if isinstance(row.get(name), int | float)]
        return [row["step"] for row in found], [float(row[name]) for row in found]

    def total(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return sum(self.column(name)[1])

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps that have it; 0 where none has."""
        values = self.column(name)[1]
        return sum(values) / len(values) if values else 0.0

    def seconds_some_rank_waits(self) -> float:
        """Seconds of the rollouts in which at least one rank had no request left, over all steps."""
        waits = ([v for name, v in row.items() if name.startswith(OF_RANK)] for row in self.steps)
        return float(sum(max(seconds, default=0.0) for seconds in waits))

    def idle_seconds(self) -> list[float]:
        """Seconds that each rank of the last step waited for the others' rollouts, over all steps."""
        return [self.total(name) for row in self.steps[-1:] for name in row if name.startswith(OF_RANK)]

    def samples(self, steps: Collection[int]) -> Iterator[JsonRow]:
        """Rows of samples.jsonl of `steps`, in their order. The others, of which long runs have GB, are not parsed."""

        def is_other(line: bytes) -> bool:
            begin = _STEP_OF_ROW.match(line)
            return begin is not None and line.endswith(b"}\n") and int(begin[1]) not in steps

        is_sample = partial(has_fields, fields=_FIELDS[SAMPLES_FILE])
        rows = read_rows(self.run_dir / SAMPLES_FILE, self.skipped, is_sample, is_other)
        return (row for row in rows if row["step"] in steps)

    def events(self, rank: int, of_step: Callable[[int], bool] = lambda step: True) -> Iterator[JsonRow]:
        """Events of one rank, in the order they were written: those of no step, and of the steps (0 is the first) for
        which `of_step` is true. The others, of which long runs have GB, are not parsed.
        """

        def is_other(line: bytes) -> bool:
            step = step_of(line)
            return step is not None and not of_step(step)

        return read_rows(events_path(self.run_dir, rank), self.skipped, is_event, is_other)

    def events_of_steps(self, rank: int, steps: Collection[int]) -> dict[int, list[JsonRow]]:
        """A rank's events of `steps` (0 is the first). Of a step done again after a resume, the later ones."""
        found: dict[int, list[JsonRow]] = {}
        of_start: dict[int, list[JsonRow]] = {}
        for row in self.events(rank, steps.__contains__):
            if row["name"] == "open":
                found, of_start = found | of_start, {}
            elif row["step"] in steps:
                of_start.setdefault(row["step"], []).append(row)
        return found | of_start


def has_fields(row: JsonRow, fields: Mapping[str, type | UnionType]) -> bool:
    """Whether a row has values of these types."""
    return all(name in row and isinstance(row[name], kind) for name, kind in fields.items())


def is_event(row: JsonRow) -> bool:
    """Whether a row has an event's fields, of the right types."""
    fields = _EVENT | ({} if row.get("kind") == "instant" else {"dur": int | float})
    needed = {"start", "running"} if row.get("name") == "curve" else set()
    attrs = row.get("attrs", {})
    return has_fields(row, fields) and isinstance(attrs, dict) and needed <= attrs.keys()


def read_run(run_dir: str | Path, with_rollouts: bool = True) -> RunData:
    """All but events and samples; rollouts only `with_rollouts`. Raises ConfigError where there is no run."""
    require_run(run_dir)
    folder = Path(run_dir)
    skipped: SkippedLines = {}
    config = _object(folder / CONFIG_FILE, skipped) or {}

    def rows(name: str) -> list[JsonRow]:
        return list(read_rows(folder / name, skipped, partial(has_fields, fields=_FIELDS[name])))

    steps: dict[int, JsonRow] = {}
    evals: dict[int, JsonRow] = {}
    for row in rows(METRICS_FILE):
        kind = evals if _is_evaluation(row) else steps
        kind[row["step"]] = row
    return RunData(
        folder,
        config,
        [steps[s] for s in sorted(steps)],
        [evals[s] for s in sorted(evals)],
        rows(ROLLOUTS_FILE) if with_rollouts else [],
        ranks_of(folder),
        skipped,
        measured_since=_measured_since(rows(CHANGES_FILE), config),
    )


def _measured_since(changes: Iterable[JsonRow], config: JsonRow) -> int:
    """`RunData.measured_since` from the rows of `CHANGES_FILE`; how often is evaluated is no measure."""
    own = config.get("eval") or {}
    of = [f"{name}." for name in (*_OF_MEASURE, *(f"rollout.{n}" for n in _UNLESS_OWN if own.get(n) is None))]
    fields = [(row["step"], f"{name}.") for row in changes for name in row["changed"].keys() - {"eval.every"}]
    return max((step for step, name in fields if name.startswith(tuple(of))), default=-1)


def _is_evaluation(row: JsonRow) -> bool:
    return any(name.startswith("eval/") for name in row)


def require_run(run_dir: str | Path) -> None:
    """Raises ConfigError where there is no run."""
    folder = Path(run_dir)
    if not folder.is_dir():
        allowed = f"must be a directory that `megatron-tlt train` has written: {no_such_file(folder)}"
        raise ConfigError.of("RUN_DIR", str(run_dir), allowed)
    if not (folder / METRICS_FILE).exists() and not (folder / "events").is_dir():
        raise ConfigError.of("RUN_DIR", str(run_dir), f"holds no run: neither {METRICS_FILE} nor events/")


def require_metrics(run: RunData) -> None:
    """Raises ConfigError where metrics.jsonl has lines and none of them can be read."""
    if run.run_dir / METRICS_FILE in run.skipped and not run.steps and not run.evals:
        raise ConfigError.of("RUN_DIR", str(run.run_dir), f"nothing could be read: {'; '.join(run.warnings)}")


def _object(path: Path, skipped: SkippedLines) -> JsonRow | None:
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
