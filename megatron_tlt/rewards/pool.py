"""Judging samples in worker processes (`rewards.worker`), with a timeout a sample.

A sample whose function exceeds `timeout_s` or ends its worker gets a recorded failure, and another worker takes that
one's place. Workers start with the first samples and wait between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from megatron_tlt.config.data import RewardSection
from megatron_tlt.errors import ConfigError, RewardError
from megatron_tlt.rewards.base import failed, judge, labels
from megatron_tlt.rewards.build import function_problems
from megatron_tlt.rewards.worker import RewardHost
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup
from megatron_tlt.workers.user_code import loaded_code
from megatron_tlt.workers.worker import Worker, WorkerError, WorkerLateError, WorkerStartError, twice, wait_for

Job = tuple[Prompt, Sample]


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
        self._section, self._on_wait = section, on_wait
        if problems := function_problems(section):
            raise ConfigError(problems)
        code: dict[str, str] = {}
        for function in section.functions:
            code |= loaded_code(function.path)
        make_host = partial(RewardHost, section.model_dump_json())
        self._new_worker = partial(Worker, make_host, code, section.worker_memory_mib, section.timeout_s, cpus)
        self._workers: list[Worker] = []

    def warm_up(self) -> None:
        """Starts the workers and returns at once: their imports take seconds."""
        if self._section.functions and not self._workers:
            self._workers = [self._new_worker() for _ in range(self._section.workers)]
        for worker in self._workers:
            worker.do(worker.ensure_running)

    def score(self, groups: Sequence[SampleGroup]) -> str | None:
        """Judges every sample: sets `rewards` of each group, in its samples' order.

        Functions see the texts but not token ids, log-probs or experts, which stay here. Returns a warning of their
        failures, if there are any. Raises RewardError only when workers cannot be started.
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
        failures = [r.failure for r, (_, sample) in zip(results, jobs) if r.failure is not None and not sample.failure]
        if not failures:
            return None
        value, above = f"rewards.failure_value = {self._section.failure_value:g}", ""
        if any(_is_praised(group, self._section.failure_value) for group in groups):
            above = f", each as {value}, above its group's mean: such responses are reinforced"
        # A broken reward function would otherwise pass for a policy that is always wrong.
        return f"{len(failures)} of {len(jobs)} rewards failed{above}; one of them: {failures[0]}"

    def close(self) -> None:
        """Ends the workers. Idempotent; a later `score` starts new ones."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _score_in_workers(self, jobs: list[Job]) -> list[RewardResult]:
        """Each worker takes the next job when it has done one. Raises RewardError."""
        if not jobs:
            return []
        self.warm_up()
        left, results = deque(enumerate(jobs)), dict[int, RewardResult]()

        def work(worker: Worker) -> None:
            """In the worker's thread."""
            while True:
                try:
                    place, job = left.popleft()
                except IndexError:  # all are taken
                    return
                try:
                    results[place] = self._result(worker, job)
                except WorkerStartError:
                    left.clear()  # the others end with what they have: the run ends, too
                    raise

        futures = [worker.do(partial(work, worker)) for worker in self._workers]
        wait_for(futures, self._on_wait)
        try:
            for future in futures:
                future.result()
        except WorkerStartError as error:
            self.close()
            raise RewardError(f"rewards: {error}") from None
        return [results[place] for place in range(len(jobs))]

    def _result(self, worker: Worker, job: Job) -> RewardResult:
        """The result of a job, or its failure. Raises WorkerStartError."""
        try:
            return twice(partial(worker.ask, job))
        except WorkerStartError:
            raise
        except WorkerLateError:
            names = ", ".join(labels(self._section))  # the worker is gone, and with it which of them was running
            why = f"no result of {names} within {self._section.timeout_s:g} s (rewards.timeout_s)"
        except WorkerError as error:
            why = str(error)
        return failed(why, self._section.failure_value)


def _is_praised(group: SampleGroup, failure_value: float) -> bool:
    """Whether a failed reward function gives a response more than its group's others have on average."""
    pairs = list(zip(group.samples, group.rewards, strict=True))
    judged = [reward.value for _, reward in pairs if reward.failure is None]
    has_failed = any(reward.failure is not None and sample.failure is None for sample, reward in pairs)
    return has_failed and bool(judged) and failure_value > sum(judged) / len(judged)
