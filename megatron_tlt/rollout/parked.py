"""Requests whose drawn turn has ended and that wait for their environments. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.rollout.request import Prefill, Request


class ParkedRequests:
    """Each as a `Prefill` of all its tokens but the last drawn one, with the KV blocks that it keeps."""

    def __init__(self) -> None:
        self._prefills: dict[tuple[int, int], Prefill] = {}  # by prompt and sample
        self._ended_turns: list[Request] = []

    def __len__(self) -> int:
        return len(self._prefills)

    def __iter__(self) -> Iterator[Prefill]:
        return iter(self._prefills.values())

    def add(self, request: Request, blocks: list[int], cached: int) -> None:
        """Parks a request without a row; `blocks`, a reference to each, hold its first `cached` tokens. Mutates."""
        request.end_turn()
        prefill = Prefill(request.computed, [request], blocks=blocks, done=cached, kept=cached)
        self._prefills[request.prompt_id, request.sample_index] = prefill
        self._ended_turns.append(request)

    def pop(self, request: Request) -> Prefill:
        """Removes and returns a parked request. Mutates."""
        return self._prefills.pop((request.prompt_id, request.sample_index))

    def take_ended_turns(self) -> list[Request]:
        """Requests that were parked since the last call, by order. Mutates."""
        ended = sorted(self._ended_turns, key=lambda r: r.order)
        self._ended_turns.clear()
        return ended

    def clear(self) -> list[Prefill]:
        """Removes and returns all of them."""
        prefills = list(self._prefills.values())
        self._prefills.clear()
        self._ended_turns.clear()
        return prefills
