"""Procedural tasks of `reasoning-gym` as one infinite, seeded prompt source with random access."""

from __future__ import annotations

import difflib
import json
import os
import random
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_tlt.config.data import TaskConfig
from megatron_tlt.data.hashing import digest, hashed
from megatron_tlt.data.sources import Row, first_drawn
from megatron_tlt.errors import ConfigError, ConfigProblem, UndrawnRowError
from megatron_tlt.types import Answer

# Items that share a dataset of reasoning-gym. It draws item i of a dataset from seed + i, so two datasets with near
# seeds share items; chunks with hashed seeds do not, and tasks that prepare all `size` items at once stay cheap.
CHUNK = 500
# Hashed seeds are in the upper half of the 32 bits that numpy takes; the lower half is for seeds chosen by people, such
# as that of the data the policy was fine-tuned on.
_FIRST_SEED, _SEEDS = 2**31, 2**31 - CHUNK
_CACHED_CHUNKS = 2  # datasets kept per task, a chunk each; some hold a dictionary of words
_RESERVED = ("seed", "size")
_TRIED_ITEMS = 20  # of a task, at the start: some generators give up on every second item
# Tasks whose items follow Python's hashes of texts, by trial of 40 items of each task with two seeds of them.
_HASHED = {
    "composite",  # of others
    *("intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
}
# Errors of generators that cannot draw an item or refuse a parameter; they validate by assertions.
_GENERATOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TaskSource:
    """An infinite prompt source. Row i is a pure function of (tasks, seed, i); tasks are mixed at random by weight."""

    size: int | None = None

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, path: str = "data.train.tasks"):
        """`path` names the configuration field in errors. Raises ConfigError with all bad tasks at once."""
        problems = [p for k, task in enumerate(tasks) for p in _problems(task, f"{path}.{k}")]
        if not tasks:
            problems = [ConfigProblem(path, [], "needs at least one task")]
        if problems:
            raise ConfigError(problems)
        self._tasks, self._seed = tuple(tasks), seed
        self._bounds = list(accumulate(task.weight for task in tasks))
        self._dataset = lru_cache(_CACHED_CHUNKS * len(self._tasks))(self._make_dataset)
        self._answers: list[tuple[str, Answer | None]] = []
        for k, task in enumerate(self._tasks):  # some generators check parameters only now, or draw none
            try:
                entry = first_drawn(self._dataset(k, 0).__getitem__, _TRIED_ITEMS, *_GENERATOR_ERRORS)
            except _GENERATOR_ERRORS as error:
                allowed = f"{task.name} refuses: {error!r}"
                raise ConfigError.of(f"{path}.{k}.params", task.params, allowed) from error
            self._answers.append((f"{path}.{k}.name = {task.name}", _answer(entry)))

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes an item: tasks, seed, version of the generator."""
        tasks = [task.model_dump(mode="json") for task in self._tasks]
        return digest("tasks", json.dumps(tasks, sort_keys=True, default=str), self._seed, reasoning_gym.__version__)

    @property
    def description(self) -> str:
        return f"tasks {', '.join(task.name for task in self._tasks)}"

    def row(self, index: int) -> Row:
        """Row `index` >= 0. Its metadata is for the task's verifier: task_name, task_params, task_entry.

        Raises UndrawnRowError naming task and item when the generator fails.
        """
        draw = hashed(self._seed, "task", index) / 2**64 * self._bounds[-1]
        which = min(bisect_right(self._bounds, draw), len(self._tasks) - 1)
        task = self._tasks[which]
        chunk, offset = divmod(index, CHUNK)
        try:
            with _seeded(hashed(self._seed, "random", index) % 2**32):
                entry = self._dataset(which, chunk)[offset]
        except _GENERATOR_ERRORS as error:
            raise UndrawnRowError(f"task {task.name!r}, item {index}: the generator failed: {error!r}") from error
        metadata = {"task_name": task.name, "task_params": task.params, "task_entry": entry}
        return Row(f"{task.name}:{self._seed:x}:{index}", entry["question"], _answer(entry), task.name, metadata)

    def answers(self) -> Iterable[tuple[str, Answer | None]]:
        """Of each task's first item that can be drawn; its place is the field that names the task."""
        return self._answers

    def _make_dataset(self, which: int, chunk: int) -> Any:
        task = self._tasks[which]
        seed = _FIRST_SEED + hashed(self._seed, "chunk", which, chunk) % _SEEDS
        return reasoning_gym.create_dataset(task.name, seed=seed, size=CHUNK, **task.params)


def _answer(entry: Mapping[str, Any]) -> str | None:
    """The reference answer of an item; None where its task has none, only a verifier."""
    return None if entry["answer"] is None else str(entry["answer"])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within it the global generators of Python and numpy, from which some tasks draw, begin at `seed`, of 32 bits."""
    state, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)


def hash_problems(tasks: Sequence[TaskConfig], path: str) -> list[ConfigProblem]:
    """Tasks in the field `path` that draw other items in another process, whose hashes of texts are others."""
    seed = "" if sys.flags.ignore_environment else os.environ.get("PYTHONHASHSEED", "")
    if seed not in ("", "random"):
        return []
    allowed = "draws other items in each process: start all ranks with PYTHONHASHSEED=0, as launch/ and slurm/ do"
    found = [(k, task.name) for k, task in enumerate(tasks) if task.name in _HASHED]
    return [ConfigProblem(f"{path}.{k}.name", name, allowed) for k, name in found]


def _problems(task: TaskConfig, path: str) -> list[ConfigProblem]:
    """Problems with name and parameter names of a task."""
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
