"""`HiddenStateCollector`: hands on the hidden states of finished answers, on which the drafter trains.

Nothing is done while a request decodes: its states lie in the pages (`rollout.pages`) and are read once, at its end.
Legend: L tokens of prompt and answer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.types import HiddenStateSample


class HiddenStateCollector:
    """Emits a `HiddenStateSample` for every finished answer of at least `min_tokens` tokens.

    All ranks of a tensor-parallel group emit the same.
    """

    def __init__(self, sink: Callable[[HiddenStateSample], None], min_tokens: int = 2):
        """`sink` is called inside the engine's step, with chunks that nobody changes any more."""
        self._sink, self._min_tokens = sink, min_tokens

    def take(self, request: Request, blocks: Sequence[int], pages: PagedHiddenStates, policy_version: int) -> None:
        """`request` is finished, its output complete; `blocks` still hold all tokens but the last one.

        `policy_version` is that of the weights that answered.
        """
        if len(request.output) < self._min_tokens:
            return
        tokens = np.concatenate((request.prompt, np.asarray(request.output, np.int32)))
        chunk = HiddenStateSample(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            policy_version=policy_version,
            token_ids=tokens,
            hidden=pages.read(blocks, len(tokens) - 1),
            prompt_len=len(request.prompt),
            key=request.key,
        )
        self._sink(chunk)
