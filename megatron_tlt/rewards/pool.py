"""Judging samples in worker processes, with a timeout a sample.

    rank      sends a sample to each worker; waits for verdicts of all workers at once
    worker    judges the sample, sends the verdict
A worker that sends nothing for `timeout_s` is killed; one that dies closes its connection. In both cases its sample
gets a recorded failure, and a new worker takes its place. Workers are started with the first samples and wait between
steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from types import TracebackType

from megatron_tlt.config.data import RewardSection
from megatron_tlt.errors import ConfigError, RewardError
from megatron_tlt.rewards.base import NamedScorer, failed, judge
from megatron_tlt.rewards.build import build_scorers, function_problems
from megatron_tlt.rewards.process import Job, WorkerProcess
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup

_log = logging.getLogger(__name__)


class RewardPool:
    """The reward functions of a run on this rank. Use from one thread; close it."""

    def __init__(self, section: RewardSection, on_verdict: Callable[[], None] = lambda: None):
        """Checks the users' functions by importing them here. Raises ConfigError with all problems.

        `on_verdict` is called after every verdict, as a heartbeat.
        """
        self._section, self._on_verdict = section, on_verdict
        self._workers: list[WorkerProcess] = []
        self._inline: list[NamedScorer] | None = None
        if problems := function_problems(section):
            raise ConfigError(problems)

    def warm_up(self) -> None:
        """Starts the workers and returns at once: their imports take seconds."""
        if self._section.workers:
            self._launch(self._section.workers)

    def score(self, groups: Sequence[SampleGroup]) -> None:
        """Judges every sample: sets `rewards` of each group, in its samples' order.

        Functions see the texts but not token ids or log-probs, which stay here. Warns of failures, once a
        call. Raises RewardError only when workers cannot be started.
        """
        jobs: list[Job] = []
        for group in groups:
            prompt = replace(group.prompt, token_ids=())
            for sample in group.samples:
                jobs.append((len(jobs), prompt, replace(sample, token_ids=[], logprobs=[])))
        if self._section.workers:
            verdicts = self._score_in_workers(jobs)
        else:
            verdicts = {place: self._judge_here(prompt, sample) for place, prompt, sample in jobs}
        found = iter(verdicts[place] for place in range(len(jobs)))
        for group in groups:
            group.rewards = [next(found) for _ in group.samples]
        failures = [verdict.failure for verdict in verdicts.values() if verdict.failure is not None]
        if failures:  # a broken reward function would otherwise pass for a policy that is always wrong
            _log.warning("%d of %d rewards failed; one of them: %s", len(failures), len(jobs), failures[0])

    def close(self) -> None:
        """Ends the workers. Idempotent; a later `score` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge_here(self, prompt: Prompt, sample: Sample) -> RewardResult:
        if self._inline is None:
            self._inline = build_scorers(self._section)
        verdict = judge(self._inline, self._section.failure_value, prompt, sample)
        self._on_verdict()
        return verdict

    def _score_in_workers(self, jobs: list[Job]) -> dict[int, RewardResult]:
        verdicts: dict[int, RewardResult] = {}
        queue = deque(jobs)
        self._launch(min(self._section.workers, len(jobs)))
        for worker in self._workers:
            worker.wait_ready()
        while len(verdicts) < len(jobs):
            for worker in self._workers:
                if worker.job is None and queue:
                    worker.send(queue.popleft())
            self._wait(verdicts, bool(queue))
        return verdicts

    def _launch(self, count: int) -> None:
        """At least `count` live workers, which may still be loading their functions."""
        # After an error a worker may still have a job: its verdict would be taken for that of a new sample.
        dead = [worker for worker in self._workers if worker.job is not None or not worker.alive]
        for worker in dead:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in dead]
        self._workers += [WorkerProcess(self._section) for _ in range(count - len(self._workers))]

    def _wait(self, verdicts: dict[int, RewardResult], has_more: bool) -> None:
        """Waits for the next verdict, death or timeout. A worker that failed is replaced if samples are left."""
        busy = [worker for worker in self._workers if worker.job is not None]
        patience = min(w.since for w in busy) + self._section.timeout_s - time.monotonic()
        wait([w.connection for w in busy], timeout=max(patience, 0.0))
        for worker in busy:
            assert worker.job is not None
            place = worker.job[0]
            try:
                verdict = worker.verdict(self._section.timeout_s)
            except RewardError as error:
                verdict = failed(str(error), self._section.failure_value)
                self._workers.remove(worker)
                worker.kill()
                if has_more:
                    self._workers.append(WorkerProcess(self._section))
                    self._workers[-1].wait_ready()
            if verdict is not None:
                verdicts[place] = verdict
                self._on_verdict()
