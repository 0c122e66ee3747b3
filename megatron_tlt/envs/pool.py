"""The environments of a run on this rank: the workers, which live as long as the run, and one rollout's trajectories.

    engine --submit(turn)--> Trajectories --Play--> worker's thread --pipe--> worker process: step
           <--poll(): tokens--             <--Step--

A trajectory stays with one worker. Where that worker died or was killed, the next one plays the trajectory's past turns
again: they decide an environment's state, and an answer that differs ends the trajectory.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.base import GivenTokens, Step
from megatron_tlt.envs.process import EnvWorker
from megatron_tlt.envs.worker import Discard, Key, Open, Play
from megatron_tlt.errors import EnvError, TltError
from megatron_tlt.types import Prompt, TurnResult, TurnsEnd
from megatron_tlt.workers.worker import WorkerError, twice, wait_for

_log = logging.getLogger(__name__)


class EnvironmentPool:
    """The worker processes. Use from one thread; close it."""

    def __init__(
        self,
        section: EnvSection,
        on_wait: Callable[[], None] = lambda: None,
        *,
        in_thought: bool = False,
        longest_opening: int | None = None,
        cpus: Collection[int] = (),
    ):
        """Starts nothing yet. `on_wait` is called every second or so of waiting in `openings`, as a heartbeat.

        `in_thought`: see `load_environment`; `longest_opening`: characters of a `reset`'s text that are read;
        `cpus`: those of the workers, see `set_up`.
        """
        self.section, self._on_wait, self._longest_opening = section, on_wait, longest_opening
        self.workers = [EnvWorker(section, in_thought=in_thought, cpus=cpus) for _ in range(section.workers)]

    def warm_up(self) -> None:
        """Starts the workers and returns at once: their imports take seconds."""
        for worker in self.workers:
            worker.do(worker.ensure_running)

    def openings(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The text that `reset` adds to each prompt. Raises EnvError naming the first prompt for which it fails, also
        when it is asked again.
        """
        futures = []
        for number, prompt in enumerate(prompts):
            worker = self.workers[number % len(self.workers)]
            request = Open(_row_of(prompt), self._longest_opening)
            ask = partial(twice, partial(worker.ask, request), WorkerError)  # one failure would end the run
            futures.append(worker.do(ask))
        openings = []
        for prompt, future in zip(prompts, futures, strict=True):
            wait_for([future], self._on_wait)
            try:
                openings.append(future.result())
            except WorkerError as error:
                raise EnvError(f"the environment gave no opening for prompt {prompt.dataset_id!r}: {error}") from None
        return openings

    def trajectories(self, tokens: GivenTokens) -> Trajectories:
        """The environments of one rollout."""
        return Trajectories(self.workers, self.section.max_turns, tokens, self._longest_opening)

    def close(self) -> None:
        """Ends the workers. The pool cannot be used afterwards."""
        for worker in self.workers:
            worker.close()


@dataclass(eq=False)
class _Trajectory:
    begin: Open
    worker: EnvWorker
    turns: list[str] = field(default_factory=list)
    drawn: Sequence[int] = ()  # the last turn's tokens
    submitted: float = 0.0  # when it was passed on, seconds of time.perf_counter
    steps: list[Step] = field(default_factory=list)  # the answers to the turns before the last one
    played: tuple[int, int] = (0, 0)  # starts of the worker, turns that its process has played since the last one

    def play(self, key: Key, longest: int) -> Step:
        """The answer to the last turn, with an observation of up to `longest` characters. In the worker's thread.

        Raises EnvError, WorkerError.
        """
        self.worker.ensure_running()
        starts, done = self.played
        is_new = starts != self.worker.starts
        if is_new:
            done = 0
        request = Play(key, self.begin if is_new else None, tuple(self.turns[done:]), longest)
        steps = self.worker.ask_running(request, request.num_calls)
        again = steps[: len(self.steps) - done]
        if again != self.steps[done:]:
            raise EnvError("the environment is not a function of prompt, seed and turns: played again after its worker "
                           "was lost, it answered otherwise")  # fmt: skip
        self.played = self.worker.starts, len(self.turns)
        answer: Step = steps[-1]
        self.steps.append(answer)
        return answer


class Trajectories:
    """The `TurnSource` of one rollout. Use from one thread."""

    def __init__(
        self, workers: Sequence[EnvWorker], max_turns: int, tokens: GivenTokens, longest_opening: int | None = None
    ):
        self._workers, self._max_turns, self._tokens = workers, max_turns, tokens
        for worker in workers:
            worker.has_failed = False  # each rollout tries it again
        self._longest_opening = longest_opening
        self._running: dict[Key, _Trajectory] = {}
        self._answers: queue.SimpleQueue[tuple[_Trajectory, Key, Step | TltError]] = queue.SimpleQueue()

    def submit(self, prompt: Prompt, sample_index: int, turn: int, token_ids: Sequence[int], text: str) -> None:
        key = prompt.prompt_id, sample_index
        trajectory = self._running.get(key)
        if trajectory is None:
            # One that does not start has few trajectories, because each fails at once.
            worker = min(self._workers, key=lambda w: (w.has_failed, w.load))
            worker.load += 1
            begin = Open(_row_of(prompt), self._longest_opening, _opening_of(prompt))
            trajectory = self._running[key] = _Trajectory(begin, worker)
        assert turn == len(trajectory.turns), f"turn {turn} after {len(trajectory.turns)} turns"
        trajectory.turns.append(text)
        trajectory.drawn = tuple(token_ids)
        trajectory.submitted = time.perf_counter()
        trajectory.worker.do(lambda: self._play(trajectory, key))

    def poll(self, timeout_s: float = 0.0) -> list[TurnResult]:
        results: list[TurnResult] = []
        while True:
            try:
                if results or timeout_s <= 0:
                    trajectory, key, answer = self._answers.get_nowait()
                else:
                    trajectory, key, answer = self._answers.get(timeout=timeout_s)
            except queue.Empty:
                return results
            if self._running.get(key) is trajectory:  # it may have been discarded meanwhile
                results.append(self._result(key, trajectory, answer))

    def discard(self, prompt_id: int, sample_index: int) -> None:
        key = prompt_id, sample_index
        if (trajectory := self._running.pop(key, None)) is not None:
            worker = trajectory.worker
            worker.load -= 1
            worker.do(lambda: _discard(worker, key))

    def close(self) -> None:
        """Ends the trajectories that still run; the workers live on. Logs how many environments failed to close since
        the last rollout's end.
        """
        for key in list(self._running):
            self.discard(*key)
        failures: list[str] = []
        for worker in self._workers:
            while worker.close_failures:
                failures.append(worker.close_failures.pop(0))
        if failures:
            _log.warning("close() of %d environments failed; one of them: %s", len(failures), failures[0])

    def _play(self, trajectory: _Trajectory, key: Key) -> None:
        """In the worker's thread."""
        answer: Step | TltError
        longest = self._tokens.max_characters + 1  # one more, by which `given` finds that it is cut
        try:
            answer = twice(lambda: trajectory.play(key, longest))
        except TltError as error:
            answer = error
        except Exception as error:  # noqa: BLE001  a turn without any result would hang the rollout
            answer = EnvError(f"{type(error).__name__}: {error}")
        self._answers.put((trajectory, key, answer))

    def _result(self, key: Key, trajectory: _Trajectory, answer: Step | TltError) -> TurnResult:
        seconds = time.perf_counter() - trajectory.submitted
        if isinstance(answer, TltError):
            return self._failed(key, seconds, str(answer))
        if answer.done or len(trajectory.turns) >= self._max_turns:
            self.discard(*key)
            ended: TurnsEnd = "max_turns" if not answer.done else "cut" if answer.truncated else "env"
            return TurnResult(*key, given=(), reward=answer.reward, seconds=seconds, ended=ended)
        try:
            given = self._tokens.given(answer.observation, answer.role, trajectory.drawn)
        except (TltError, ValueError) as error:  # raised here, it would leave other ranks of the engine waiting
            return self._failed(key, seconds, f"its observation cannot be a message of the {answer.role}: {error}")
        return TurnResult(*key, given=given, reward=answer.reward, seconds=seconds)

    def _failed(self, key: Key, seconds: float, why: str) -> TurnResult:
        self.discard(*key)
        return TurnResult(*key, given=(), seconds=seconds, failure=why)


def _discard(worker: EnvWorker, key: Key) -> None:
    """In the worker's thread. The trajectory has its result already, so a failure is noted only."""
    if not worker.is_running:  # its environments have ended with it
        return
    try:
        worker.ask_running(Discard(key))
    except WorkerError as error:
        worker.close_failures.append(str(error))


def _row_of(prompt: Prompt) -> Prompt:
    """The prompt as every `reset` sees it, that of the opening and those of the trajectories: texts of its row."""
    text = prompt.text if prompt.row_text is None else prompt.row_text
    return replace(prompt, token_ids=(), text=text, row_text=None)


def _opening_of(prompt: Prompt) -> str | None:
    """The text that `Row.with_opening` put behind that of the row; None: there is none."""
    row = prompt.row_text
    return None if row is None else prompt.text.removeprefix(f"{row}\n\n" if row else "")
