"""Judging samples in worker processes (`rewards.worker`), with a timeout a sample, by `pebble.ProcessPool`.

The pool kills a worker that exceeds `timeout_s`, notices one that dies, and starts another in its place; the sample
gets a recorded failure. Workers start with the first samples and wait between steps.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import replace

from pebble import ProcessExpired, ProcessPool

from megatron_tlt.config.data import RewardSection
from megatron_tlt.errors import ConfigError, RewardError
from megatron_tlt.rewards import worker
from megatron_tlt.rewards.base import failed, judge, labels
from megatron_tlt.rewards.build import function_problems
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup
from megatron_tlt.workers.process import ended

Job = tuple[Prompt, Sample]
_START_TIMEOUT_S = 120.0
_BEAT_S = 1.0  # of waiting for results, between two signs of life
_STARTS = 3  # of the pool for one list of samples: workers may also die between two samples


def trial_line(section: RewardSection, prompt: Prompt) -> str:
    """What users' functions give an empty response to `prompt`, a warning where they fail; empty without any."""
    functions = tuple(function for function in section.functions if function.name == "python")
    if not functions:
        return ""
    group = SampleGroup(prompt, [Sample(prompt.prompt_id, 0, [], [], "", "stop", 0)])
    with closing(RewardPool(section.model_copy(update={"functions": functions, "workers": 1}))) as pool:
        pool.score([group])
    result, of = group.rewards[0], "of an empty response to the first prompt"
    if result.failure is None:
        return f"Rewards {of}: {', '.join(f'{label} {value:g}' for label, value in result.parts.items())}"
    return f"warning: rewards {of} failed, which counts {section.failure_value:g}: {result.failure}"


class RewardPool:
    """The reward functions of a run on this rank. Use from one thread; close it."""

    def __init__(self, section: RewardSection, on_wait: Callable[[], None] = lambda: None, cpus: Collection[int] = ()):
        """Checks the users' functions by importing them here. Raises ConfigError with all problems.

        `on_wait` is called every second or so of waiting for results, as a heartbeat. `cpus`: those of the workers, see
        `set_up`.
        """
        self._section, self._on_wait, self._cpus = section, on_wait, cpus
        self._pool: ProcessPool | None = None
        self._ready: Future[str | None] | None = None
        if problems := function_problems(section):
            raise ConfigError(problems)

    def warm_up(self) -> None:
        """Starts the workers and returns at once: their imports take seconds."""
        if self._section.functions and (self._pool is None or not self._pool.active):
            self.close()
            arguments = (self._section.model_dump_json(), os.getpid(), self._cpus)
            self._pool = ProcessPool(
                self._section.workers,
                initializer=worker.start,
                initargs=arguments,
                context=worker.WorkerContext(),  # type: ignore[arg-type]
            )
            self._ready = self._pool.schedule(worker.problem)

    def score(self, groups: Sequence[SampleGroup]) -> str | None:
        """Judges every sample: sets `rewards` of each group, in its samples' order.

        Functions see the texts but not token ids, log-probs or experts, which stay here. Returns a warning of failures,
        if there are any. Raises RewardError only when workers cannot be started.
        """
        jobs = [
            (replace(group.prompt, token_ids=()), replace(sample, token_ids=[], logprobs=[], routed_experts=None))
            for group in groups
            for sample in group.samples
        ]
        if self._section.functions:
            results = self._score_in_workers(jobs)
        else:
            results = [judge((), self._section.failure_value, *job) for job in jobs]
        found = iter(results)
        for group in groups:
            group.rewards = [next(found) for _ in group.samples]
        failures = [result.failure for result in results if result.failure is not None]
        # A broken reward function would otherwise pass for a policy that is always wrong.
        return f"{len(failures)} of {len(jobs)} rewards failed; one of them: {failures[0]}" if failures else None

    def close(self) -> None:
        """Ends the workers. Idempotent; a later `score` starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            for process in multiprocessing.active_children():
                if isinstance(process, worker.RewardProcess):
                    process.kill_group()
            self._pool.join()
            self._pool = None

    def _score_in_workers(self, jobs: list[Job]) -> list[RewardResult]:
        results: dict[int, RewardResult] = {}
        for _ in range(_STARTS):
            futures = self._schedule({place: job for place, job in enumerate(jobs) if place not in results})
            for future in self._completed(futures):
                if not isinstance(future.exception(), BrokenProcessPool):
                    results[futures[future]] = self._result(future)
            if len(results) == len(jobs):
                break
        lost = failed("no worker could be kept running", self._section.failure_value)
        return [results.get(place, lost) for place in range(len(jobs))]

    def _completed(self, futures: Iterable[Future[RewardResult]]) -> Iterator[Future[RewardResult]]:
        """The futures as they end, with signs of life: a slow function is no hang."""
        left = set(futures)
        while left:
            with suppress(TimeoutError):  # of a piece of the wait
                for future in as_completed(left, _BEAT_S):
                    left.discard(future)
                    yield future
            self._on_wait()

    def _schedule(self, jobs: dict[int, Job]) -> dict[Future[RewardResult], int]:
        """The futures of jobs, with their places; fewer if the pool breaks meanwhile. Raises RewardError."""
        futures: dict[Future[RewardResult], int] = {}
        if not jobs:
            return futures
        self.warm_up()
        assert self._pool is not None
        assert self._ready is not None
        try:
            problem = self._ready.result(_START_TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError, ProcessExpired) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self.close()
            raise RewardError(f"a reward worker did not start: {problem}")
        try:
            for place, job in jobs.items():
                future = self._pool.schedule(worker.judge_sample, job, timeout=self._section.timeout_s)
                futures[future] = place
        except RuntimeError:  # a worker has died between two samples, and the pool with it
            pass
        return futures

    def _result(self, future: Future[RewardResult]) -> RewardResult:
        """The result of a finished job, or its failure."""
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            names = ", ".join(labels(self._section))  # the worker is gone, and with it which of them was running
            why = f"no result of {names} within {self._section.timeout_s:g} s (rewards.timeout_s)"
        elif isinstance(error, ProcessExpired):
            why = ended(error.exitcode)
        else:  # such as KeyboardInterrupt, which `judge` lets pass
            why = f"{type(error).__name__}: {error}"
        return failed(why, self._section.failure_value)
