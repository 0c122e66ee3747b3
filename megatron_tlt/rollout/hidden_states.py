"""`HiddenStateCollector`: the hidden states of finished answers, on which the drafter trains.

Nothing is done while a request decodes: its states lie in `PagedHiddenStates` and are read once, at its end.
Legend: L tokens of prompt and answer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.types import HiddenStateSample


class HiddenStateCollector:
    """Emits a `HiddenStateSample` for every finished answer of at least `min_tokens` tokens.

    All ranks of a tensor-parallel group emit the same.
    """

    def __init__(
        self,
        sink: Callable[[HiddenStateSample], None],
        policy_version: Callable[[], int] = lambda: 0,
        min_tokens: int = 2,
    ):
        """`sink` is called inside the engine's step; samples are copies. `policy_version()` is that of the weights."""
        self._sink, self._policy_version, self._min_tokens = sink, policy_version, min_tokens

    def collect(self, request: Request, pages: PagedHiddenStates) -> None:
        """Emits the sample of a finished `request`, whose blocks in `pages` hold all its tokens but the last one."""
        if len(request.output) < self._min_tokens:
            return
        tokens = np.concatenate((request.prompt, np.asarray(request.output, np.int32)))
        self._sink(
            HiddenStateSample(
                prompt_id=request.prompt_id,
                sample_index=request.sample_index,
                policy_version=self._policy_version(),
                token_ids=tokens,
                hidden=pages.read(request.blocks, len(tokens) - 1),
                prompt_len=len(request.prompt),
                key=request.key,
            )
        )
