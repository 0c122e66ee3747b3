"""Judging samples in worker processes, with a timeout a sample.

    rank      sends a batch to each worker; waits for verdicts of all workers at once
    worker    judges the batch in order, sends each verdict at once
A worker that sends nothing for `timeout_s` is killed; one that dies closes its connection. In both cases the sample it
was judging gets a recorded failure, and the rest of its batch goes to a new worker. Workers are started with the first
samples and wait between steps.
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
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.base import NamedScorer, failed, judge
from megatron_tlt.rewards.build import build_scorers, function_problems
from megatron_tlt.rewards.process import Job, WorkerProcess
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup

_LARGEST_BATCH = 64
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
        if not jobs:
            return {}
        self._start(min(self._section.workers, len(jobs)))
        size = min(-(-len(jobs) // (2 * len(self._workers))), _LARGEST_BATCH)
        queue = deque(jobs[i : i + size] for i in range(0, len(jobs), size))
        verdicts: dict[int, RewardResult] = {}
        while len(verdicts) < len(jobs):
            for worker in self._workers:
                if not worker.jobs and queue:
                    worker.send(queue.popleft())
            self._wait(verdicts, queue)
        return verdicts

    def _start(self, count: int) -> None:
        """At least `count` live workers, all with their functions loaded."""
        self._launch(count)
        for worker in self._workers:
            worker.wait_ready()

    def _launch(self, count: int) -> None:
        # After an error a worker may still have jobs: its verdicts would be taken for those of new samples.
        dead = [worker for worker in self._workers if worker.jobs or not worker.alive]
        for worker in dead:
            worker.kill()
        self._workers = [worker for worker in self._workers if worker not in dead]
        self._workers += [WorkerProcess(self._section) for _ in range(count - len(self._workers))]

    def _wait(self, verdicts: dict[int, RewardResult], queue: deque[list[Job]]) -> None:
        """Waits for the next verdicts, deaths or timeouts, and deals with them."""
        busy = [worker for worker in self._workers if worker.jobs]
        patience = min(w.since for w in busy) + self._section.timeout_s - time.monotonic()
        wait([w.connection for w in busy], timeout=max(patience, 0.0))
        for worker in busy:
            # Verdicts that have arrived count, even late ones: replacing another worker takes a while.
            if not self._receive(worker, verdicts):
                self._replace(worker, f"worker {worker.exit_text()}", verdicts, queue)
            elif worker.jobs and time.monotonic() - worker.since >= self._section.timeout_s:
                self._replace(worker, f"no verdict within {self._section.timeout_s:g} s", verdicts, queue)

    def _receive(self, worker: WorkerProcess, verdicts: dict[int, RewardResult]) -> bool:
        """Takes all verdicts that are there; False if the worker is dead."""
        try:
            while worker.jobs and worker.connection.poll(0):
                verdicts[worker.jobs[0][0]] = worker.connection.recv()
                del worker.jobs[0]
                worker.since = time.monotonic()
                self._on_verdict()
        except (EOFError, ConnectionError):
            return False
        return True

    def _replace(
        self, worker: WorkerProcess, why: str, verdicts: dict[int, RewardResult], queue: deque[list[Job]]
    ) -> None:
        """Puts a fresh worker in place of one that hangs or died, and records a failure for its sample."""
        worker.kill()
        (place, _, _), *rest = worker.jobs
        verdicts[place] = failed(why, self._section.failure_value)
        if rest:
            queue.appendleft(rest)
        self._workers.remove(worker)
        if queue:
            self._workers.append(WorkerProcess(self._section))
            self._workers[-1].wait_ready()
