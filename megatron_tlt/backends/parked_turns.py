"""Turns that an engine in another process has drawn to their end and that wait for their environments, on the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.turns import TurnExchange

if TYPE_CHECKING:
    from megatron_tlt.backends.serving import Message
    from megatron_tlt.rollout.request import Request
    from megatron_tlt.types import GenerateCall, Prompt, TurnResult


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """A request whose newest turn is drawn: the engine's message, which may name a file, and the turn's text."""

    request: Request
    message: Message
    text: str


class ParkedTurns:
    """The trajectories of one `generate` that wait; the engine has no request of theirs meanwhile."""

    def __init__(self, call: GenerateCall | None = None, tp: TensorParallel | None = None):
        """Without a call, or with one without environments, nothing is ever parked."""
        self._exchange: TurnExchange | None = None
        if call is not None and call.turns is not None:
            self._exchange = TurnExchange(call.turns, tp or TensorParallel(), call.while_parked)
        self._parked: dict[tuple[int, int], DrawnTurn] = {}  # by prompt id and sample index

    def __len__(self) -> int:
        return len(self._parked)

    def add_prompt(self, prompt: Prompt) -> None:
        """Before the first request of a prompt."""
        if self._exchange is not None:
            self._exchange.add(prompt)

    def park(self, turn: DrawnTurn) -> None:
        """Passes the turn to its environment. Mutates its request."""
        assert self._exchange is not None
        turn.request.finish_reason = None
        self._parked[turn.request.prompt_id, turn.request.sample_index] = turn
        self._exchange.submit(turn.request, turn.text)

    def poll(self, wait: bool) -> Iterator[tuple[DrawnTurn, TurnResult]]:
        """Turns whose environments have answered; each is parked until it is yielded. `wait`: see `TurnExchange.poll`.
        Collective among the ranks of an engine, which have the same turns parked.
        """
        assert self._exchange is not None
        for result in self._exchange.poll(wait):
            turn = self._parked.pop((result.prompt_id, result.sample_index), None)
            if turn is not None:
                yield turn, result

    def discard(self, request: Request) -> None:
        """The request has ended without its environment."""
        if self._exchange is not None:
            self._exchange.discard(request)

    def abandon(self, drop: Callable[[Message], None]) -> None:
        """Discards all that are parked; `drop` removes what lies beside their messages."""
        for turn in self._parked.values():
            drop(turn.message)
            self.discard(turn.request)
        self._parked.clear()
