"""`HiddenStateCollector`: the hidden states of finished responses, on which the drafter trains.

A request's states stay in `PagedHiddenStates` while it decodes and are read once, at its end, if they are kept. On a
GPU they are gathered, copied while the next steps run, and the sample is emitted when they have arrived on the host.

Legend: L tokens of prompt and response, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from megatron_tlt.models.decoders.torch.transfer import HostCopy
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.types import LEAST_TRAINED, HiddenStateSample, Trajectory


class HiddenStateCollector:
    """Emits a `HiddenStateSample` for every finished response of at least `LEAST_TRAINED` tokens.

    All ranks of a tensor-parallel group emit the same.
    """

    def __init__(
        self,
        sink: Callable[[HiddenStateSample], None],
        policy_version: Callable[[], int] = lambda: 0,
        offer: Callable[[HiddenStateSample], bool] | None = None,
    ):
        """`sink` is called inside the engine's step; samples are copies. `policy_version()`: of the weights. `offer` is
        called before, in the same order, with states on the meta device; False: they are not read.
        """
        self._sink, self._policy_version, self._offer = sink, policy_version, offer
        self._leaving: deque[tuple[HostCopy, Callable[..., HiddenStateSample]]] = deque()

    def collect(self, request: Request, pages: PagedHiddenStates) -> None:
        """Starts the copy of a finished `request`, whose blocks in `pages` hold all its states but the last."""
        if len(request.output) < LEAST_TRAINED:
            return
        assert request.finish_reason is not None
        trajectory = Trajectory(
            request.prompt_id,
            request.sample_index,
            token_ids=request.stream,
            logprobs=np.asarray(request.logprobs, np.float32),
            given=request.given,
            finish_reason=request.finish_reason,
            policy_version=self._policy_version(),
        )
        sample, count = partial(HiddenStateSample, trajectory, key=request.key), trajectory.length - 1
        if self._offer is None or self._offer(sample(hidden=pages.like(count))):
            self._leaving.append((pages.start_read(request.blocks, count), sample))

    def emit(self, wait: bool) -> None:
        """Emits the samples that are on the host, in the order of `collect`; with `wait` all of them."""
        while self._leaving and (wait or self._leaving[0][0].is_done):
            states, sample = self._leaving.popleft()
            self._sink(sample(hidden=states.wait_pageable()))
