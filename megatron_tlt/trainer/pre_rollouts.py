"""`PreRoller`: responses of the next two steps, decoded in idle windows; these steps draft with them.

    step n      rank 0   rollout ================================|                exchange of token ids
                rank 1   rollout =====| pre-rollout of step n + 1 ~~~~~|          every rank gets all of them
    step n + 1  every rank   rollout, whose first drafts they are

The noise of a token is that of (seed, prompt, sample, position), whatever the policy, so a pre-rolled response and the
one that the next policy draws part only where the update has moved the logits by more than the gap between two
candidates. They are proposals, no more: nothing of a step's samples, rewards or metrics sees them, no checkpoint keeps
them, and losing them costs time only.

With environments only first turns are pre-rolled: no environment sees them.

Who waits for whom: no rank in the window; `look_ahead` and `exchange` are collectives of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.distributed.exchange import gather_columns, gather_large
from megatron_tlt.errors import BackendError, DataError, EnvError, error_line
from megatron_tlt.idle.state import RankState
from megatron_tlt.trainer.engine_stats import joined
from megatron_tlt.types import EngineStats, GenerateCall

if TYPE_CHECKING:
    from megatron_tlt.data.prompt_queue import PromptQueue, PromptQueues
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.idle.window import PreRoll
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import Prompt, Sample, SamplingParams

_TOKEN_BYTES = 4
_log = logging.getLogger(__name__)
Name = tuple[int, int]  # prompt id, sample index


@dataclass(frozen=True)
class Drafts:
    """Responses of one rank, compact."""

    names: np.ndarray  # int64 [n, 2], prompt id and sample index
    lengths: np.ndarray  # int64 [n]
    whole: np.ndarray  # bool [n]; others were ended by the window
    tokens: np.ndarray  # int32 [sum of lengths], one response behind the other

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Drafts:
        """All of `samples`."""
        return cls(
            np.array([(sample.prompt_id, sample.sample_index) for sample in samples], np.int64).reshape(-1, 2),
            np.array([len(sample.token_ids) for sample in samples], np.int64),
            np.array([sample.finish_reason != "abort" for sample in samples], bool),
            np.array([token for sample in samples for token in sample.token_ids], np.int32),
        )

    def responses(self) -> Iterator[tuple[Name, np.ndarray, bool]]:
        """Name, tokens int32 [R] and whether it is whole, of each response."""
        ends = np.cumsum(self.lengths)
        for (prompt_id, index), length, end, whole in zip(self.names, self.lengths, ends, self.whole, strict=True):
            yield (int(prompt_id), int(index)), self.tokens[end - length : end], bool(whole)


def exchanged(
    world: World, samples: Sequence[Sample], max_bytes: int
) -> tuple[list[tuple[Name, np.ndarray, bool]], int]:
    """The longest responses of all ranks, as in `Drafts.responses`, as many as `max_bytes` of tokens hold: they decide
    how long a rollout takes. And the number of tokens of the others, which are dropped.

    `samples`: this rank's. Collective.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    rows = gather_columns(world, {"rank": np.full(len(samples), world.rank), "length": lengths})
    order = np.argsort(-rows["length"], kind="stable")
    fits = np.zeros(len(order), bool)
    fits[order] = _TOKEN_BYTES * np.cumsum(rows["length"][order]) <= max_bytes
    kept = [sample for sample, fit in zip(samples, fits[rows["rank"] == world.rank], strict=True) if fit]
    parts = gather_large(world, Drafts.of(kept) if kept else None)
    return [response for of in parts for response in of.responses()], int(rows["length"][~fits].sum())


@dataclass(kw_only=True, eq=False)
class PreRoller:
    """One rank's part. All ranks make the same calls, but for the function that `open` returns."""

    stream: PromptStream
    queues: PromptQueues
    backend: RolloutBackend
    params: SamplingParams
    """Of what is pre-rolled: whole responses or first turns."""
    num_samples: int
    num_prompts: int
    """Of a step."""
    last_step: int
    """Behind it nothing is pre-rolled."""
    max_bytes: int
    """Of the drafts of all replicas, in one exchange."""
    _drafts: dict[Name, np.ndarray] = field(default_factory=dict)  # the same on every rank
    _whole: set[Name] = field(default_factory=set)  # of them, those that no window ended
    _new: list[Sample] = field(default_factory=list)  # of this replica, in the present window
    _stats: EngineStats | None = None  # of the step's rollouts so far
    _step: int = 0  # the present one
    _ahead: list[Prompt] | None = None  # the next prompts, where environments add texts to them
    _is_open: bool = False
    _has_failed: bool = False
    _has_dropped: bool = False  # for lack of room

    def look_ahead(self, step: int) -> None:
        """Before the rollout of `step`, whose prompts have left the stream: where the environment's `reset` adds texts
        to the prompts of the next steps, all ranks ask for them, which no rank can do alone in its window. Collective.
        """
        if self.stream.has_openings:
            self._ahead = self._peek(step)

    def open(self, step: int) -> PreRoll | None:
        """Pre-rolls in the window behind a rollout of `step`; None: there is no next step. The same on every rank."""
        self._step = step
        self._is_open = step < self.last_step
        return partial(self._run, self.queues.open_shared()) if self._is_open else None

    def take(self, prompts: Sequence[Prompt]) -> dict[Name, np.ndarray]:
        """The drafts of these prompts, whose rollout begins. Forgets them."""
        names = [(prompt.prompt_id, index) for prompt in prompts for index in range(self.num_samples)]
        self._whole.difference_update(names)
        return {name: self._drafts.pop(name) for name in names if name in self._drafts}

    def exchange(self) -> int:
        """After the window that was opened: every rank gets what all replicas have pre-rolled. Returns the number of
        tokens that `max_bytes` had no room for, of all replicas. Collective.

        Prompts of earlier windows that no rollout has used keep what they have, unless there is more now.
        """
        if not self._is_open:
            return 0
        new, self._new = self._new, []
        responses, dropped = exchanged(self.queues.world, new, self.max_bytes)
        if dropped and not self._has_dropped and self.queues.world.is_main:
            _log.warning(
                "idle.pre_rollout_mib = %g had no room for %d tokens that were pre-rolled; with a higher value, 4 "
                "bytes a token, the next steps draft with them, too (later steps: pre_rollout/dropped_tokens)",
                self.max_bytes / 2**20, dropped,
            )  # fmt: skip
        self._has_dropped |= dropped > 0
        for name, tokens, is_whole in responses:
            if is_whole or len(tokens) > len(self._drafts.get(name, ())):
                self._drafts[name] = tokens.copy()  # the exchange's whole array would live as long
                if is_whole:
                    self._whole.add(name)
                else:
                    self._whole.discard(name)
        return dropped

    def take_stats(self) -> EngineStats:
        """The engine's counters of the step's rollouts, without pre-rollouts. Resets them."""
        held, self._stats = self._stats, None
        rest = self.backend.take_stats()
        return rest if held is None else joined(held, rest)

    def _run(self, queue_of: Callable[[Sequence[Prompt]], PromptQueue], until: Callable[[], bool]) -> int:
        """After a failure, which is logged once, this replica pre-rolls no more. Of several
        ranks those that have not failed wait in the middle of a step: there it passes through, and ends the job.
        """
        if self._has_failed:
            return 0
        try:
            self._stats = self.take_stats()
            samples = self._generate(queue_of, until)
            tokens = self.backend.take_stats().generated_tokens
        except Exception as error:  # whatever it was: the next step decodes without drafts
            if self.queues.tp > 1:
                raise
            self._has_failed, samples, tokens = True, [], 0
            with suppress(BackendError):  # where its process is gone
                self.backend.take_stats()
            _log.warning("this replica pre-rolls no more, and drops what it had: %s", error_line(error))
        if self.queues.is_first:
            self._new = [sample for sample in samples if sample.token_ids]
        return tokens

    def _generate(self, queue_of: Callable[[Sequence[Prompt]], PromptQueue], until: Callable[[], bool]) -> list[Sample]:
        """Responses to those of the next prompts that this replica fetches, at once no more than its share of a step.

        With more the first idle replicas would hold all prompts, in batches that are too large to get far.
        """
        queue = queue_of(self._next_prompts())
        share = -(-self.num_prompts // self.queues.num_replicas) * self.num_samples
        call = GenerateCall(queue, self.params, self.num_samples, self._report, drafts=self._drafts, until=until)
        return self.backend.generate(replace(call, most_running=share))

    def _next_prompts(self) -> list[Prompt]:
        """Those of the next step, then of the one after it; of each first those without whole responses."""
        ahead = self._peek(self._step) if self._ahead is None else self._ahead
        steps = (ahead[: self.num_prompts], ahead[self.num_prompts :])
        return [prompt for step in steps for prompt in sorted(self.backend.ordered(step), key=self._is_whole)]

    def _peek(self, step: int) -> list[Prompt]:
        """The prompts behind those of `step`; none where one cannot be read, which the step that needs it says."""
        try:
            return self.stream.peek(self._num_ahead(step))
        except (EnvError, DataError) as error:
            if self.queues.world.is_main:
                _log.warning("nothing of the next step is pre-rolled: %s", error)
            return []

    def _num_ahead(self, step: int) -> int:
        """Prompts of the two steps behind `step`, as far as the run has them."""
        return min(2, self.last_step - step) * self.num_prompts

    def _is_whole(self, prompt: Prompt) -> bool:
        """Whether all of its responses are there to the end."""
        return all((prompt.prompt_id, index) in self._whole for index in range(self.num_samples))

    def _report(self, running: int, waiting: int, generated_tokens: int) -> None:
        """A sign of life."""
        self.queues.world.heartbeat(state=RankState.PRE_ROLLING.name, running=running, queued=waiting)
