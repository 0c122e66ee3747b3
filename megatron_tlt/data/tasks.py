"""Procedural tasks of `reasoning-gym` as one infinite, seeded, randomly accessible stream."""

from __future__ import annotations

import difflib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_tlt.config.data import TaskConfig
from megatron_tlt.data.hashing import digest, hashed
from megatron_tlt.data.sources import Row
from megatron_tlt.errors import ConfigError, ConfigProblem, DataError

# reasoning-gym draws item i of a dataset from seed + i, so two datasets with near seeds share items. Every
# CHUNK items get a dataset of their own with a hashed seed: streams of different seeds stay apart, and
# tasks that prepare all `size` items at once stay cheap.
CHUNK = 500
# Hashed seeds fill the upper half of the 32 bits that numpy takes; the lower half is left to those who
# write seeds by hand (for example the data the policy was fine-tuned on).
_FIRST_SEED, _SEEDS = 2**31, 2**31 - CHUNK
_CHUNKS_AT_HAND = 2  # datasets kept per task; some hold a dictionary of words
_RESERVED = ("seed", "size")
# What generators raise when a draw or a parameter does not work out; asserts are how they validate.
_GENERATOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class TaskItem:
    """One question. `metadata` is what the task's verifier needs: task_name, task_params, task_entry."""

    question: str
    answer: str | None
    task: str
    metadata: dict[str, Any]


class TaskStream:
    """Item i is a pure function of (tasks, seed, i). Tasks are mixed at random by weight."""

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, path: str = "data.train.tasks"):
        """`path` names the configuration field in errors. Raises ConfigError with all bad tasks at once."""
        problems = [p for k, task in enumerate(tasks) for p in _problems(task, f"{path}.{k}")]
        if not tasks:
            problems = [ConfigProblem(path, [], "needs at least one task")]
        if problems:
            raise ConfigError(problems)
        self._tasks, self._seed = tuple(tasks), seed
        self._bounds = list(accumulate(task.weight for task in tasks))
        self._datasets: OrderedDict[tuple[int, int], Any] = OrderedDict()
        for k, task in enumerate(self._tasks):  # parameters a generator refuses only when it is built
            try:
                self._dataset(k, 0)
            except _GENERATOR_ERRORS as error:
                allowed = f"{task.name} refuses: {error!r}"
                raise ConfigError.of(f"{path}.{k}.params", task.params, allowed) from error

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes an item: tasks, seed, version of the generator."""
        tasks = [task.model_dump(mode="json") for task in self._tasks]
        return digest(
            "tasks", json.dumps(tasks, sort_keys=True, default=str), self._seed, reasoning_gym.__version__
        )

    def __getitem__(self, index: int) -> TaskItem:
        """Item `index` >= 0. Raises DataError naming task and item when the generator fails."""
        draw = hashed(self._seed, "task", index) / 2**64 * self._bounds[-1]
        which = min(bisect_right(self._bounds, draw), len(self._tasks) - 1)
        task = self._tasks[which]
        chunk, offset = divmod(index, CHUNK)
        try:
            entry = self._dataset(which, chunk)[offset]
        except _GENERATOR_ERRORS as error:
            raise DataError(f"task {task.name!r}, item {index}: the generator failed: {error!r}") from error
        answer = entry["answer"]
        metadata = {"task_name": task.name, "task_params": task.params, "task_entry": entry}
        return TaskItem(entry["question"], None if answer is None else str(answer), task.name, metadata)

    def _dataset(self, which: int, chunk: int) -> Any:
        key = which, chunk
        if key not in self._datasets:
            task = self._tasks[which]
            seed = _FIRST_SEED + hashed(self._seed, "chunk", which, chunk) % _SEEDS
            dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=CHUNK, **task.params)
            self._datasets[key] = dataset
            if len(self._datasets) > _CHUNKS_AT_HAND * len(self._tasks):
                self._datasets.popitem(last=False)
        return self._datasets[key]


class TaskSource:
    """A `TaskStream` as a prompt source."""

    size: int | None = None

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, path: str = "data.train.tasks"):
        """As `TaskStream`."""
        self._stream, self._seed = TaskStream(tasks, seed, path), seed
        self._names = ", ".join(task.name for task in tasks)

    @property
    def fingerprint(self) -> str:
        return self._stream.fingerprint

    @property
    def description(self) -> str:
        return f"tasks {self._names}"

    def row(self, index: int) -> Row:
        item = self._stream[index]
        return Row(
            f"{item.task}:{self._seed:x}:{index}", item.question, item.answer, item.task, item.metadata
        )


def _problems(task: TaskConfig, path: str) -> list[ConfigProblem]:
    """What is wrong with name and parameter names of a task."""
    if task.name not in DATASETS:
        allowed = f"no task of reasoning-gym{_nearest(task.name, DATASETS)}"
        return [ConfigProblem(f"{path}.name", task.name, allowed)]
    known = [f.name for f in fields(DATASETS[task.name][1]) if f.name not in _RESERVED]
    problems = []
    for name in task.params:
        if name in _RESERVED:
            allowed = "is set by the stream; use the source's own seed"
            problems.append(ConfigProblem(f"{path}.params.{name}", task.params[name], allowed))
        elif name not in known:
            allowed = f"no parameter of {task.name}{_nearest(name, known)}"
            problems.append(ConfigProblem(f"{path}.params.{name}", task.params[name], allowed))
    return problems


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else f"; one of: {', '.join(sorted(known))}"
