"""How long the responses of a step are: drawn from a distribution, or from the files of a real run. Torch-free.

Lengths depend on the seed, the step and the prompt only, so every mode and every number of nodes has the same ones.
Empirical ones are the same lengths in every step, dealt anew.
Legend: P prompts of a step, n samples of a prompt.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from megatron_tlt.config.sim import LengthSection, SimConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.jsonl import read_rows

_PATH = "workload.lengths.path"
_LONGEST = 1 << 62  # tokens that still fit an int64


class Lengths:
    """Draws a step's response lengths."""

    def __init__(self, config: SimConfig):
        """Raises ConfigError, naming workload.lengths.path, if there is nothing to draw from."""
        workload, rollout = config.workload, config.rollout
        self._section, self._seed = workload.lengths, workload.seed
        self._shape = workload.prompts_per_step, rollout.samples_per_prompt
        self._most = rollout.max_tokens
        is_given = bool(self._section.values) or self._section.path is not None
        self._quantiles = np.log(quantiles_of(self._section)) if is_given else None

    def of(self, step: int) -> np.ndarray:
        """Tokens of every response of `step` (from 0), int64 [P, n], 1 to max_tokens."""
        clipped: np.ndarray = np.minimum(self._uncut(step), self._most)
        return clipped

    def cut(self, steps: int) -> tuple[int, int]:
        """How many responses of the first `steps` steps are longer than max_tokens, and cut there; and of how many."""
        cut = sum(int((self._uncut(step) > self._most).sum()) for step in range(steps))
        return cut, steps * math.prod(self._shape)

    def _uncut(self, step: int) -> np.ndarray:
        prompts, samples = self._shape
        rng = np.random.default_rng((self._seed, 1, step))
        share = self._section.prompt_share
        normal = math.sqrt(share) * rng.standard_normal((prompts, 1))
        normal = normal + math.sqrt(1 - share) * rng.standard_normal((prompts, samples))
        if self._quantiles is None:
            logs = math.log(self._section.median) + self._section.sigma * normal
        else:
            logs = self._empirical(normal)
        whole: np.ndarray = np.clip(np.rint(np.exp(logs)), 1, _LONGEST).astype(np.int64)
        return whole

    def _empirical(self, normal: np.ndarray) -> np.ndarray:
        """Every step has the distribution's own quantiles, dealt to prompts and samples in the order of `normal`."""
        assert self._quantiles is not None
        rank = np.empty(normal.size)
        rank[normal.ravel().argsort(kind="stable")] = (np.arange(normal.size) + 0.5) / normal.size
        knots = (np.arange(len(self._quantiles)) + 0.5) / len(self._quantiles)
        logs: np.ndarray = np.interp(rank, knots, self._quantiles).reshape(normal.shape)
        return logs


def quantiles_of(section: LengthSection) -> np.ndarray:
    """Lengths of an empirical distribution, float64, ascending, evenly spaced in rank."""
    if section.path is None:
        return np.sort(np.array(section.values, np.float64))
    path = Path(section.path).absolute()
    lengths = _of_run(path) if path.is_dir() else _of_file(path)
    if not len(lengths):
        allowed = "has no lengths: no line with one, or, of a run, no `length/median` in its metrics.jsonl"
        raise ConfigError.of(_PATH, str(path), allowed)
    return np.sort(np.maximum(lengths, 1.0))


def _of_file(path: Path) -> np.ndarray:
    """A number a line, or JSON lines with `tokens` or `token_ids`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON lines may hold the other line ends of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(_PATH, str(path), f"cannot be read: {error}") from error
    lengths: list[float] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                lengths.append(_of_line(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            allowed = (
                "each line must be a number >= 0, or JSON with `tokens` (a number >= 0) or `token_ids`; of a run give "
                f"the directory ({error})"
            )
            raise ConfigError.of(_PATH, f"{path}:{number}", allowed) from error
    return np.array(lengths)


def _of_line(value: Any) -> float:
    """Raises ValueError, TypeError or KeyError for a value that is not a length."""
    if isinstance(value, dict):
        found = value["token_ids"] if "token_ids" in value else value["tokens"]
        value = len(found) if isinstance(found, list) else found
    length = float(value)
    if not 0 <= length < math.inf:
        raise ValueError("not a length")
    return length


def _of_run(run_dir: Path) -> np.ndarray:
    """Lengths of a run from the metrics of each step (`length/median`, `p95`, `max`): 200 quantiles a step.

    Between them the logarithm is taken to be linear in the normal score; below the median it is mirrored.
    """
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "length/median" in row]
    scores = np.array([NormalDist().inv_cdf((i + 0.5) / 200) for i in range(200)])
    lengths = []
    for row in rows:
        count = max(2.0, row.get("rollout/samples", 256.0))
        middle, high, most = (math.log(max(1.0, row[f"length/{k}"])) for k in ("median", "p95", "max"))
        last = max(NormalDist().inv_cdf(1 - 1 / (2 * count)), 1.7)
        knots = [-1.645, 0.0, 1.645, last]
        lengths.append(np.exp(np.interp(scores, knots, [2 * middle - high, middle, high, most])))
    return np.concatenate(lengths) if lengths else np.zeros(0)
