"""`TurnExchange`: drawn turns to the environments of a rollout, and their results back, the same on all ranks of an
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_tlt.types import Prompt, TurnResult

if TYPE_CHECKING:
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.interfaces import TurnSource
    from megatron_tlt.rollout.request import Request

_POLL_S = 0.02  # of waiting for a result where no request can run: progress is reported in between


class TurnExchange:
    """Of the ranks of an engine the first one's environments are used; all of them make the same calls."""

    def __init__(
        self,
        source: TurnSource,
        tp: TensorParallel,
        while_parked: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`while_parked`: see `GenerateCall`."""
        self._source, self._tp, self._while_parked, self._clock = source, tp, while_parked, clock
        self._prompts: dict[int, Prompt] = {}
        self._waits_since: float | None = None  # where nothing but waiting is left

    def add(self, prompt: Prompt) -> None:
        """A prompt whose responses take turns."""
        self._prompts[prompt.prompt_id] = prompt

    def submit(self, request: Request, text: str) -> None:
        """The last turn of `request`, drawn to its end."""
        self._waits_since = None  # drawing it was no waiting
        if self._tp.rank == 0:
            prompt, turn = self._prompts[request.prompt_id], len(request.turn_rewards)
            self._source.submit(prompt, request.sample_index, turn, request.output[request.turn_start :], text)

    def discard(self, request: Request) -> None:
        """`request` has ended without its environment."""
        if self._tp.rank == 0:
            self._source.discard(request.prompt_id, request.sample_index)

    def poll(self, wait: bool) -> list[TurnResult]:
        """Results that have come. With `wait` nothing else is left to do: does a piece of other work, if there is any,
        else waits for a moment. Collective.
        """
        seconds = 0.0
        if not wait:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self._clock()
        else:
            seconds = self._clock() - self._waits_since
        worked = wait and self._while_parked is not None and self._while_parked(seconds)
        timeout_s = _POLL_S if wait and not worked else 0.0
        return self._tp.broadcast_object(self._source.poll(timeout_s) if self._tp.rank == 0 else [])
